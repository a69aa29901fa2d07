"""What a run has recorded of its steps and lives, for an audit: log, ledger, and their copies.

All of it is read anew, and nothing from sums. What does not fit together is named.
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
    """Steps of the newest life and of what it has gone on from; of other branches, nothing."""

    run: Path
    lines: Mapping[int, Mapping[str, Any]]  # of the log, by step
    lives: Mapping[int, int]  # which life has logged a step
    prints: Mapping[int, Sequence[tuple[str, Any]]]  # fingerprints in the ledger, by step
    starts: Mapping[int, Event]  # by life
    configs: Mapping[int, Config]  # by life
    events: Sequence[Event]  # that say how many steps were done
    quarantine: dict[int, list[int]]
    aside: list[str]  # what does not count, and why
    wrong: list[str]  # what does not fit together

    @property
    def last(self) -> int:
        """The last step of the log."""
        return self._steps[-1]

    @property
    def data(self) -> str:
        """Where the newest life has read the data."""
        return self.configs[max(self.configs)].data

    @property
    def init_from(self) -> str:
        """Where the newest life that was given one has had the weights of the first step."""
        given = [it.init_from for _, it in sorted(self.configs.items()) if it.init_from]
        return given[-1] if given else ""

    @cached_property
    def _steps(self) -> list[int]:
        return sorted(self.lines)

    def config_at(self, step: int) -> Config:
        """What a step was done with; one that the log lacks, as the next or last that it has."""
        at = min(bisect_left(self._steps, step), len(self._steps) - 1)
        return self.configs[self.lives[self._steps[at]]]

    def same_config(self, first: int, end: int) -> int:
        """The last step up to `end` that was done with the configuration of the step `first`."""
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
        """The first later life that has begun before this step of a life; None: there is none."""
        away = (it for it, start in self.starts.items() if it > life and start["step"] < step)
        return min(away, default=None)

    def unrecorded(self, parents: Mapping[tuple[int, int], Any]) -> Iterator[tuple[int, int]]:
        """Checkpoints, by life and step, whose event the ledger lacks, though it has a later one.

        `parents`: of those that are there, the checkpoint that each says to follow. Of a life that
        was killed the last save may lack its event. Before a stop, or the next save of the same
        life, it was recorded.
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
    """What a run has recorded; of its lines, these fields. Raises AuditError, ConfigError, OSError.

    The copies are read first, as they are written last.
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
        f"{run / LEDGER}: the start of life {life} is not as it was written"
        for life, it in starts.items()
        if it.get(summary.HASH) != summary.hash_of(it)
    ]
    end = _end(lives, starts, events)
    beyond = [step for step in lines if step > end]
    for step in beyond:
        del lines[step], lives[step]
    if not lines:
        raise AuditError(f"{run} has no step of its newest life, nor of what that began from")
    aside = [f"the log's steps from {end + 1} on: the run has left them"] if beyond else []
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
    """What a stop says of its last step, and what has come out of the run, unlike the log."""
    for stop in (it for it in recorded.events if it["event"] == "stop"):
        if recorded.lives.get(stop["step"]) == stop["generation"]:
            line, results = recorded.lines[stop["step"]], stop.get("results")
            val_bpb = results.get("val_bpb") if isinstance(results, dict) else None
            for name, value in {"tokens": stop.get("tokens"), "val_bpb": val_bpb}.items():
                if None not in (value, line.get(name)) and value != line[name]:
                    what = f"step {stop['step']}: {name} is {shown(value)} in {LEDGER}"
                    yield f"{what}, and {shown(line[name])} in the log"


def _end(lives: Mapping[int, int], starts: Mapping[int, Event], events: Sequence[Event]) -> float:
    """How far the newest life has come: what lives before it have logged beyond, it has left.

    They may have done these steps otherwise, as with another learning rate.
    """
    if not (newest := max(starts, default=0)):
        return math.inf
    own = [step for step, life in lives.items() if life >= newest]
    own += [it["step"] for it in events if it["generation"] >= newest]
    return max(own)


def _configs(run: Path, starts: Mapping[int, Event], lives: Collection[int]) -> dict[int, Config]:
    """By life, without a cache: one has what the data had."""
    found = {
        life: replace(from_saved(run / LEDGER, start["config"]), cache_dir="none")
        for life, start in starts.items()
        if isinstance(start.get("config"), dict)
    }
    if unknown := sorted(lives - found.keys()):
        raise AuditError(
            f"{run / LEDGER} does not say what life {unknown[0]} was computed with: put the ledger "
            "back from a backup"
        )
    return found


def check_machine(recorded: Recorded, here: str) -> None:
    """Raise AuditError where this machine would have other bits, or none are promised."""
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
                f"{ledger} does not say what {life} was computed on: put it back from a backup"
            )
        moved = [it for it in recorded.events if it["event"] == "world"]  # others may have come
        came = [it.get("machines") for it in moved if it["generation"] == generation]
        for there in [*machines, *(one for it in came if isinstance(it, list) for one in it)]:
            if there != here:
                raise AuditError(
                    f"{life} was computed on {there}, and this is {here}: the last bits differ "
                    "between them. Give the command on a machine of that kind"
                )


# -- the copies for people -------------------------------------------------------------------------


def _copy(path: Path) -> Any:
    """The content of a file; None where it is not there; the error where it is torn, or none."""
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        return error


def _wrong_copies(recorded: Recorded, copies: Mapping[str, Any]) -> Iterator[str]:
    """What the copies say, and the ledger has otherwise of the same life."""
    for name, copy in copies.items():
        if copy is None:  # there is none
            continue
        path = recorded.run / name
        values = copy.get("config", copy) if isinstance(copy, dict) else None
        if not isinstance(values, dict):
            why = copy if isinstance(copy, Exception) else f"{path} is not as a life writes it"
            yield f"{why}: remove it; the run's next start, or its end, writes it anew"
            continue
        there = _in_ledger(recorded, name, copy.get("generation", max(recorded.starts, default=0)))
        if there is None:
            life = f"{path} is of life {shown(copy.get('generation'))}"
            yield f"{life}, and {recorded.run / LEDGER} has no {_WRITTEN_AT[name]} of it"
            continue
        here = {**copy, **values}
        for field in (it for it in there if here.get(it) != there[it]):
            what = f"{field} {shown(here.get(field))}, and the run {shown(there[field])}"
            yield f"{path} has {what}"


_WRITTEN_AT = {CONFIG: "start", DATASET: "start", FINISHED: "stop"}


def _in_ledger(recorded: Recorded, name: str, life: Any) -> dict[str, Any] | None:
    """What a copy that a life has written has to say; None where the ledger lacks its event."""
    events = (it for it in recorded.events if it["event"] == _WRITTEN_AT[name])
    own = [it for it in events if it["generation"] == life]
    if not own or life not in recorded.configs:
        return None
    start = recorded.starts[life]
    if name == DATASET:  # all lives have had the same data
        return {"sha256": start.get("dataset")}
    if name == CONFIG:
        about = {it: start.get(it) for it in ("run_id", "version")}
        return {**about, **start["config"]}
    budgets = {it: getattr(recorded.configs[life], it) for it in BUDGETS}
    stop = {it: own[-1].get(it) for it in ("step", "tokens", "train_s", "cause")}
    return {"run_id": start.get("run_id"), **budgets, **stop}
