"""Read the recorded steps and lives of a run for an audit: log, ledger and their copies.

Log and ledger are read in full; only the quarantine is from sums. Contradictions are listed.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gptddp.budget import BUDGETS
from gptddp.config import Config, shown
from gptddp.errors import AuditError
from gptddp.files import read_json
from gptddp.flags import from_saved, of_run
from gptddp.run import log_check, summary
from gptddp.run.directory import CONFIG, DATASET, FINISHED, LEDGER
from gptddp.run.history import is_step, logged, read_ledger

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """The steps of the newest life and of the lives it continues; not those of other branches."""

    run: Path
    lines: Mapping[int, Mapping[str, Any]]  # of the log, by step
    lives: Mapping[int, int]  # the life that logged each step
    prints: Mapping[int, Sequence[tuple[str, Any]]]  # fingerprints in the ledger, by step
    starts: Mapping[int, Event]  # by life
    configs: Mapping[int, Config]  # by life
    events: Sequence[Event]  # with a number of finished steps
    quarantine: dict[int, list[int]]
    aside: list[str]  # records that do not count, and why
    wrong: list[str]  # contradictions

    @property
    def last(self) -> int:
        """The last logged step."""
        return self._steps[-1]

    @property
    def data(self) -> str:
        """The path of the dataset in the newest life."""
        return self.configs[max(self.configs)].data

    @property
    def init_from(self) -> str:
        """The newest given folder with the weights of the first step; "" if none was given."""
        given = [it.init_from for _, it in sorted(self.configs.items()) if it.init_from]
        return given[-1] if given else ""

    @cached_property
    def _steps(self) -> list[int]:
        return sorted(self.lines)

    def config_at(self, step: int) -> Config:
        """The configuration of a step; if the log lacks the step, of its next or last one."""
        at = min(bisect_left(self._steps, step), len(self._steps) - 1)
        return self.configs[self.lives[self._steps[at]]]

    def same_config(self, first: int, end: int) -> int:
        """The last step up to `end` with the configuration of the step `first`."""
        config = of_run(self.config_at(first))
        same: set[int] = set()  # lives
        begin = bisect_left(self._steps, first)
        for step in self._steps[begin : bisect_right(self._steps, end)]:
            if (life := self.lives[step]) in same:
                continue
            if of_run(self.configs[life]) != config:
                return step - 1
            same.add(life)
        return end

    def left_by(self, life: int, step: int) -> int | None:
        """The first life after `life` that started before `step`; None if there is none."""
        away = (it for it, start in self.starts.items() if it > life and start["step"] < step)
        return min(away, default=None)

    def unrecorded(self, parents: Mapping[tuple[int, int], Any]) -> Iterator[tuple[int, int]]:
        """Yield the checkpoints, as life and step, whose event is missing from the ledger.

        `parents`: the parent that each existing checkpoint names. The last save of a killed life
        may lack its event. Before a stop, or the next save of the same life, it is always recorded.
        """
        saves = [it for it in self.events if it["event"] in ("checkpoint", "branch")]
        known = {(it["generation"], it.get("step")) for it in saves if not it.get("error")}
        stops = [it for it in self.events if it["event"] == "stop"]
        due = {(it["generation"], it.get("step")) for it in stops}
        for at in sorted(parents, reverse=True):
            if at in due and at not in known:
                yield at
            if at in due | known and (before := parents[at]) and before[0] == at[0]:
                due.add(before)


def read(run: Path, fields: Collection[str]) -> Recorded:
    """Read the records of a run, with these fields of its log lines.

    The copies are read first, as they are written last. Raises AuditError, ConfigError, OSError.
    """
    copies = {name: _copy(run / name) for name in (CONFIG, DATASET, FINISHED)}
    check = log_check.LogCheck(run)
    lines, lives = {}, {}
    for generation, line in logged(run):
        check.add(generation, line)
        if is_step(line):
            lines[line["step"]] = {name: line[name] for name in fields if name in line}
            lives[line["step"]] = generation
    if not lines:
        raise AuditError(f"{run} has no logged step yet: train it first")
    events = read_ledger(run)
    wrong = [log_check.not_whole(run, found)] if (found := check.found()) else []
    wrong += [
        f"{run / LEDGER}: the {it['event']} of life {it['generation']} has the step "
        f"{shown(it.get('step'))}"
        for it in events
        if it["event"] in log_check.PRINTED and not log_check.is_done(it)
    ]
    events = list(filter(log_check.is_done, events))
    starts = {it["generation"]: it for it in events if it["event"] == "start"}
    wrong += [
        f"{run / LEDGER}: the start of life {life} does not match its hash"
        for life, it in starts.items()
        if it.get(summary.HASH) != summary.hash_of(it)
    ]
    end = _end(lives, starts, events)
    beyond = [step for step in lines if step > end]
    for step in beyond:
        del lines[step], lives[step]
    if not lines:
        raise AuditError(f"{run} lacks the log of its newest life: put it back from a backup")
    aside = [f"the log's steps from {end + 1} on: the run discarded them"] if beyond else []
    recorded = Recorded(
        run=run,
        lines=lines,
        lives=lives,
        prints=check.prints,
        starts=starts,
        configs=_configs(run, starts, set(lives.values())),
        events=events,
        quarantine=summary.decided(summary.read(run).quarantine, 0),
        aside=aside,
        wrong=wrong,
    )
    wrong += _wrong_stops(recorded)
    wrong += _wrong_copies(recorded, copies)
    return recorded


def _wrong_stops(recorded: Recorded) -> Iterator[str]:
    """Yield the differences between the results in a stop and the log line of the same step."""
    for stop in (it for it in recorded.events if it["event"] == "stop"):
        if recorded.lives.get(stop["step"]) == stop["generation"]:
            line, results = recorded.lines[stop["step"]], stop.get("results")
            val_bpb = results.get("val_bpb") if isinstance(results, dict) else None
            for name, value in {"tokens": stop.get("tokens"), "val_bpb": val_bpb}.items():
                if None not in (value, line.get(name)) and value != line[name]:
                    what = f"step {stop['step']}: {name} is {shown(value)} in {LEDGER}"
                    yield f"{what}, but {shown(line[name])} in the log"


def _end(lives: Mapping[int, int], starts: Mapping[int, Event], events: Sequence[Event]) -> float:
    """The last step of the newest life; it discards all that earlier lives logged beyond.

    They may have computed these steps differently, for example with another learning rate.
    """
    if not (newest := max(starts, default=0)):
        return math.inf
    own = [step for step, life in lives.items() if life >= newest]
    own += [it["step"] for it in events if it["generation"] >= newest]
    return max(own)


def _configs(run: Path, starts: Mapping[int, Event], lives: Collection[int]) -> dict[int, Config]:
    """The configuration of each life, without a cache: it could have older data."""
    found = {
        life: replace(from_saved(run / LEDGER, start["config"]), cache_dir="none")
        for life, start in starts.items()
        if isinstance(start.get("config"), dict)
    }
    if unknown := sorted(lives - found.keys()):
        raise AuditError(
            f"{run / LEDGER} has no configuration for life {unknown[0]}: put the ledger back from "
            "a backup"
        )
    return found


def check_machine(recorded: Recorded, here: str) -> None:
    """Raise AuditError if this machine gives other bits, or the run does not promise any."""
    ledger = recorded.run / LEDGER
    for generation in sorted(set(recorded.lives.values())):
        config, life = recorded.configs[generation], f"life {generation} of {recorded.run}"
        if config.reduce != "exact":
            raise AuditError(
                f"reduce is {config.reduce} in {life}: the bits of its sums depend on the world "
                "size. `gptddp fingerprints` compares the rows of two such runs"
            )
        machines = recorded.starts[generation].get("machines")
        if not isinstance(machines, list) or not machines:
            raise AuditError(
                f"{ledger} has no machine for {life}: put the ledger back from a backup"
            )
        moved = [it for it in recorded.events if it["event"] == "world"]  # machines may have joined
        came = [it.get("machines") for it in moved if it["generation"] == generation]
        for there in [*machines, *(one for it in came if isinstance(it, list) for one in it)]:
            if there != here:
                raise AuditError(
                    f"{life} was computed on {there}, but this is {here}: the last bits differ "
                    "between them. Run the audit on a machine of the first kind"
                )


# -- the copies for people -------------------------------------------------------------------------


def _copy(path: Path) -> Any:
    """The content of a file; None if it does not exist; the error if it cannot be read."""
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        return error


def _wrong_copies(recorded: Recorded, copies: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between the copies and the ledger's events of the same life."""
    for name, copy in copies.items():
        if copy is None:
            continue
        path = recorded.run / name
        values = copy.get("config", copy) if isinstance(copy, dict) else None
        if not isinstance(values, dict):
            why = copy if isinstance(copy, Exception) else f"{path} is not a JSON object"
            yield f"{why}: remove it; the run's next start, or its end, writes it again"
            continue
        there = _in_ledger(recorded, name, copy.get("generation", max(recorded.starts, default=0)))
        if there is None:
            life = f"{path} is of life {shown(copy.get('generation'))}"
            yield f"{life}, but {recorded.run / LEDGER} has no {_WRITTEN_AT[name]} of it"
            continue
        here = {**copy, **values}
        for field in (it for it in there if here.get(it) != there[it]):
            what = f"{field} {shown(here.get(field))}, but the ledger {shown(there[field])}"
            yield f"{path} has {what}"


_WRITTEN_AT = {CONFIG: "start", DATASET: "start", FINISHED: "stop"}


def _in_ledger(recorded: Recorded, name: str, life: Any) -> dict[str, Any] | None:
    """The values that a copy by this life must have; None if the ledger lacks its event."""
    events = (it for it in recorded.events if it["event"] == _WRITTEN_AT[name])
    own = [it for it in events if it["generation"] == life]
    if not own or life not in recorded.configs:
        return None
    start = recorded.starts[life]
    if name == DATASET:  # all lives have the same data
        return {"sha256": start.get("dataset")}
    if name == CONFIG:
        about = {it: start.get(it) for it in ("run_id", "version")}
        return {**about, **start["config"]}
    budgets = {it: getattr(recorded.configs[life], it) for it in BUDGETS}
    stop = {it: own[-1].get(it) for it in ("step", "tokens", "train_s", "cause")}
    return {"run_id": start.get("run_id"), **budgets, **stop}
