"""The lives of a run: the start, the end and the cost of each restart."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gptddp.run.owners import Owners

MOST_RANKS = 1 << 16  # of a life; a ledger with more is damaged
_BUDGETS = {
    "steps": "all its steps were done",
    "max_tokens": "its token budget was used up",
    "max_time": "its time budget was used up",
    "stopped": "stopped by a signal",
}
_CLOSED = "Connection closed by peer"  # by Gloo, if the process at the other end is gone


@dataclass
class LifeRecord:
    """One life in the ledger: its events, and values from `Owners`."""

    start: Mapping[str, Any] = field(default_factory=dict)
    stop: Mapping[str, Any] = field(default_factory=dict)
    end: Mapping[str, Any] = field(default_factory=dict)
    follows_fault: bool = False  # did nobody request the end of the previous life?
    free_since: float = 0.0  # the time of that end, in unix seconds; 0: unknown

    @property
    def generation(self) -> int:
        return int(self.start["generation"])

    @property
    def began(self) -> float:
        """The start of its rank 0, in unix seconds."""
        return float(self.start["time"]) - number(self.start.get("seconds"))

    @property
    def world_size(self) -> int:
        """Its ranks; 0: unknown."""
        ranks = int(number(self.start.get("world_size")))
        return ranks if 0 < ranks <= MOST_RANKS else 0

    @property
    def cause(self) -> str:
        """The cause of its end in the ledger; "": it runs, or the cause is not recorded."""
        return str((self.stop or self.end).get("cause", ""))

    @property
    def why_over(self) -> str:
        """The cause of its end, in plain words for budgets, signals and lost connections."""
        lost = "another rank was lost: " if _CLOSED in self.cause else ""
        return lost + (_BUDGETS.get(self.cause, self.cause) or "cause not recorded")

    @property
    def took_over(self) -> bool:
        """Did a new rank 0 begin it while training continued?"""
        return self.start.get("source") == "memory"

    @property
    def parts(self) -> dict[str, float]:
        """Seconds from the end of the previous life to its first step; {}: unknown, or none."""
        if not self.free_since or self.took_over:
            return {}
        before = "recovery" if self.follows_fault else "stopped"  # no world was formed then
        until, took = float(self.start["time"]), number(self.start.get("seconds"))
        gap = max(0.0, until - self.free_since)
        return {before: gap - min(gap, max(0.0, took)), "reload": min(gap, max(0.0, took))}

    @property
    def lost_s(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def redone(self) -> int:
        """Steps that it had to do again."""
        return int(number(self.start.get("redo")))


@dataclass
class WorldRecord:
    """The ranks of one world, with their seconds from `Owners`; it begins at a start or a loss."""

    began: float  # unix seconds
    world_size: int
    follows_fault: bool
    until_then: dict[str, float]  # rank-seconds of the run when it began
    tables: list[dict[str, list[float]]] = field(default_factory=list)  # of `Owners.phases`


def lives_of(
    events: Sequence[Mapping[str, Any]],
) -> tuple[list[LifeRecord], list[WorldRecord], Owners]:
    """The lives by generation, their worlds, and the rank-seconds of all lives.

    A life without a start is skipped.
    """
    found: dict[int, LifeRecord] = {}
    worlds: list[WorldRecord] = []
    owners = Owners()
    for event in events:
        life = found.setdefault(event["generation"], LifeRecord())
        if (kind := event["event"]) in ("start", "stop", "end"):
            setattr(life, kind, event)
        before = owners.generation, owners.began
        owners.add(event)
        if (owners.generation, owners.began) != before:
            fault = owners.follows_fault
            worlds.append(WorldRecord(owners.began, owners.world_size, fault, owners.so_far()))
            if kind == "start":
                life.follows_fault = fault
        if owners.phases and owners.phases not in worlds[-1].tables[-1:]:
            worlds[-1].tables.append(owners.phases)
    worlds = [it for it in worlds if 0 < it.world_size <= MOST_RANKS]
    lives = [found[it] for it in sorted(found) if found[it].start]
    for last, life in pairwise(lives):
        life.free_since = number(last.stop.get("time") if last.stop else last.end.get("at"))
    return lives, worlds, owners


def moved(before: LifeRecord, life: LifeRecord) -> bool:
    """Did its launcher stop a life as pods joined or left, and continue with this one?"""
    return before.cause == "stopped" and life.follows_fault


def number(value: Any, none: float = 0.0) -> float:
    """The value as a float; `none` if it is not a finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            if math.isfinite(found := float(value)):
                return found
    return none
