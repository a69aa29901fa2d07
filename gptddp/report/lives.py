"""The lives of a run: how each began and ended, and what it cost to go on."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gptddp.run.owners import Owners
from gptddp.run.recovery import PARTS

PART_NAMES = dict(zip(PARTS, ("detection", "reforming", "reload", "first step"), strict=True))
MOST_RANKS = 1 << 16  # of a life; a ledger that says more is damaged


@dataclass
class Life:
    """One life, as the ledger has it. Times are unix seconds; None: nobody has written it down."""

    generation: int
    start: Mapping[str, Any] = field(default_factory=dict)  # the event
    stop: Mapping[str, Any] | None = None
    end: Mapping[str, Any] | None = None
    recovered: Mapping[str, Any] | None = None
    saves: int = 0
    failed_saves: int = 0
    # as rank-seconds are counted: was the end of the life before unasked for, all seconds by owner
    # until this life began, and the last table of this life
    follows_fault: bool = False
    until_then: dict[str, float] = field(default_factory=dict)
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def began(self) -> float:
        """When rank 0 of it began."""
        return float(self.start["time"]) - number(self.start.get("seconds"))

    @property
    def world_size(self) -> int:
        """Its ranks; 0: unknown."""
        ranks = int(number(self.start.get("world_size")))
        return ranks if 0 < ranks <= MOST_RANKS else 0

    @property
    def ended(self) -> float | None:
        """When it stopped, or a survivor noticed that it was over."""
        if self.stop:
            return float(self.stop["time"])
        return number(self.end.get("at")) or None if self.end else None

    @property
    def cause(self) -> str:
        """Why it ended, in the ledger's words; "": it runs, or nobody could say."""
        return str((self.stop or self.end or {}).get("cause", ""))


def lives_of(events: Sequence[Mapping[str, Any]]) -> list[Life]:
    """By generation. A life whose start the ledger lacks is left out."""
    found: dict[int, Life] = {}
    for event in events:
        life = found.setdefault(event["generation"], Life(event["generation"]))
        match event["event"]:
            case "start":
                life.start = event
            case "stop":
                life.stop = event
            case "end":
                life.end = event
            case "recovered":
                life.recovered = event
            case "checkpoint" if event.get("error"):
                life.failed_saves += 1
            case "checkpoint":
                life.saves += 1
    lives = [found[it] for it in sorted(found) if found[it].start]
    _count({life.generation: life for life in lives}, events)
    return lives


def _count(lives: Mapping[int, Life], events: Sequence[Mapping[str, Any]]) -> None:
    """Have each life know what the owners of rank-seconds made of it."""
    owners = Owners()
    for event in events:
        before = owners.generation
        phases = owners.phases
        owners.add(event)
        if owners.generation != before:
            if before in lives:
                lives[before].phases = phases
            if owners.generation in lives:
                life = lives[owners.generation]
                life.follows_fault, life.until_then = owners.follows_fault, owners.so_far()
    if owners.generation in lives:
        lives[owners.generation].phases = owners.phases


_BUDGETS = {
    "steps": "all its steps were done",
    "max_tokens": "its tokens were used up",
    "max_time": "its time was used up",
    "stopped": "stopped by a signal",
}
_CLOSED = "Connection closed by peer"  # Gloo: the process at the other end is no more


def why_over(life: Life) -> str:
    """Why a life has ended, in the ledger's words but for those of budgets and signals.

    What a library says of a lost connection is not plain: what it means stands before it.
    """
    lost = "another rank was gone: " if _CLOSED in life.cause else ""
    return lost + (_BUDGETS.get(life.cause, life.cause) or "nobody has written down why")


def moved(before: Life, life: Life) -> bool:
    """Did its launcher stop a life for pods that came or went, and go on with this one?"""
    return before.cause == "stopped" and life.follows_fault


def number(value: Any, none: float = 0.0) -> float:
    """`none` for what is no finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer of hundreds of digits
            if math.isfinite(found := float(value)):
                return found
    return none
