"""What a run has written down of its steps and lives, for who computes it once more.

All of it is read anew from the log and the ledger, and nothing from their sums. What does not fit
together as it is, is named.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gptddp.config import Config
from gptddp.errors import AuditError
from gptddp.flags import from_saved, of_run
from gptddp.run import log_check
from gptddp.run.directory import LEDGER
from gptddp.run.history import is_step, logged, read_ledger
from gptddp.run.progress import FINGERPRINT
from gptddp.run.quarantine import decided
from gptddp.run.summary import Summary


@dataclass(frozen=True)
class Books:
    """Lines and their lives by step; by life what it was begun with, and where."""

    run: Path
    lines: Mapping[int, Mapping[str, Any]]
    lives: Mapping[int, int]
    prints: Mapping[int, Mapping[str, int]]  # fingerprints by step, as the ledger has them
    begins: Mapping[int, int]  # by life: the step that it went on from
    configs: Mapping[int, Config]
    machines: Mapping[int, Sequence[str]]
    codes: Mapping[int, str | None]  # the hash of own code, None where it had none
    quarantine: dict[int, list[int]]
    left: str | None  # which lines are of a branch that the run has left, if any are
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


def read(run: Path, fields: Collection[str]) -> Books:
    """The books of a run; of its lines, these fields. Raises AuditError, ConfigError, OSError."""
    lines, lives = {}, {}
    check = log_check.LogCheck(run)
    for generation, line in logged(run):
        check.add(generation, line)
        if is_step(line):
            lines[line["step"]] = {name: line[name] for name in fields if name in line}
            lives[line["step"]] = generation
    if not lines:
        raise AuditError(f"{run} has logged no step yet: nothing to recompute")
    events = read_ledger(run)
    starts = {it["generation"]: it for it in events if it["event"] == "start"}
    away = _left(lives, starts, events)
    left = [step for step in lines if step > away]
    for step in left:
        del lines[step], lives[step]
    if not lines:
        raise AuditError(f"{run} has no step of its newest life, nor of what that began from")
    configs = _configs(run, starts, sorted(starts.keys() | set(lives.values())))
    wrong = [log_check.told(run, found)] if (found := check.found()) else []
    return Books(
        run=run,
        lines=lines,
        lives=lives,
        prints=_seed(starts) | check.prints,
        begins={life: it["step"] for life, it in starts.items() if _is_count(it.get("step"))},
        configs=configs,
        machines={life: _machines(it) for life, it in starts.items()},
        codes={life: it.get("code") for life, it in starts.items()},
        quarantine=_quarantine(events),
        left=f"the log's steps from {away + 1} on: the run has left them" if left else None,
        wrong=wrong,
    )


def _left(
    lives: Mapping[int, int],
    starts: Mapping[int, Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
) -> float:
    """How far the newest life has come: what lives before it have logged beyond, it has left.

    They may have done these steps otherwise, as with another learning rate.
    """
    newest = max(starts, default=0)
    if not newest or not _is_count(starts[newest].get("step")):
        return math.inf
    own = [step for step, life in lives.items() if life >= newest]
    told = [it.get("step") for it in events if it["generation"] >= newest]
    return max([*own, *(it for it in told if type(it) is int)])


def _seed(starts: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, int]]:
    """The fingerprint of step 0, as the lives have it that have begun there."""
    found = [it.get("state_fp") for it in starts.values() if it.get("step") == 0]
    known = [it for it in found if isinstance(it, str) and FINGERPRINT.fullmatch(it)]
    return {0: {"state_fp": int(known[-1], 16)}} if known else {}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _machines(start: Mapping[str, Any]) -> list[str]:
    found = start.get("machines")
    return [str(it) for it in found] if isinstance(found, list) else []


def _quarantine(events: Sequence[Mapping[str, Any]]) -> dict[int, list[int]]:
    found = Summary()
    for event in events:
        with suppress(LookupError, TypeError, ValueError, ArithmeticError):  # a foreign one
            found.add(event)
    return decided(found.quarantine, 0)


def _configs(
    run: Path, starts: Mapping[int, Mapping[str, Any]], lives: Sequence[int]
) -> dict[int, Config]:
    """By life; a start has its configuration where that is not the one of the start before."""
    found: dict[int, Config] = {}
    config: Config | None = None
    for life in lives:
        if isinstance(recorded := starts.get(life, {}).get("config"), dict):
            config = from_saved(run / LEDGER, recorded)
        if config is not None:
            found[life] = replace(config, cache_dir="none")  # one has what the data had
    if not found:
        raise AuditError(f"{run / LEDGER} does not say with what each life of the run was done")
    return found
