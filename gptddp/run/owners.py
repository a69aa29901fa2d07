"""Every rank-second of a run has an owner, over all lives and between them.

A life tells where the seconds of each of its ranks went, by phase (training/clock.py), with every
checkpoint and at its end; what is between that and the next life was spent noticing the fault and
forming the world again. The owners add up to the elapsed time, times the ranks that there were.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

OWNERS = (
    "training",  # steps that no life had finished before
    "waiting",  # for a slower rank
    "data",  # waiting for the rows of a step
    "evaluation",
    "checkpoint",  # what saves take from training
    "redone",  # steps that a lost life had finished
    "detection",  # from the last step, the one in flight included, until a fault is noticed
    "reforming",  # from then until all ranks of the next life have begun
    "reload",  # until its first step is done
    "start",  # the same, of a life that follows no fault
    "stopped",  # nobody trained, and nobody was meant to
    "other",
)
LOSSES = OWNERS[1:]
_OF_PHASE = {
    "step": "training",
    "wait": "waiting",
    "data_wait": "data",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "redo": "redone",
}
_BEFORE_STEPS = ("init", "restore", "warmup")

Phases = Mapping[str, list[float]]  # seconds of each rank


def owner_of(phase: str, follows_fault: bool) -> str:
    """The owner of a phase's seconds, in a life that follows a fault, or does not."""
    if phase in _BEFORE_STEPS:
        return "reload" if follows_fault else "start"
    return _OF_PHASE.get(phase, "other")


@dataclass
class Owners:
    """The rank-seconds of a run by owner, as far as its ledger knows."""

    seconds: dict[str, float] = field(default_factory=dict)  # of lives that are over, and between
    generation: int = 0  # of the newest life
    world_size: int = 0
    began: float = 0.0  # unix seconds, on rank 0
    follows_fault: bool = False
    phases: dict[str, list[float]] = field(default_factory=dict)  # as last told
    stop_time: float | None = None  # it ended in good order
    noticed: float | None = None  # it did not: when a survivor noticed, or its last step ended
    survived: bool = False  # did a rank survive, to say so?

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one more event of the ledger; one that has been counted changes nothing.

        Nor does one without what is needed here, of version 0.1.0 or written by hand: whose seconds
        nobody knows have no owner.
        """
        with suppress(LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            self._add(event)

    def _add(self, event: Mapping[str, Any]) -> None:
        kind, generation = event["event"], event["generation"]
        if kind == "start" and generation > self.generation:
            self._next(event)
        elif generation != self.generation or kind not in ("checkpoint", "stop", "end"):
            return
        if kind == "stop":
            self.stop_time = float(event["time"])
        elif kind == "end":
            self.noticed = float(event["at"])
            self.survived = bool(event.get("phases"))
        if told := event.get("phases"):
            self._hear({str(name): [float(it) for it in row] for name, row in told.items()})

    def _hear(self, phases: dict[str, list[float]]) -> None:
        fits = all(len(row) == self.world_size for row in phases.values())
        if fits and _of_rank(phases, 0) >= _of_rank(self.phases, 0):
            self.phases = phases

    def _next(self, start: Mapping[str, Any]) -> None:
        """The life before is over: its seconds, and those until this one, have their owners."""
        began = float(start["time"]) - float(start.get("seconds") or 0.0)
        # a launcher that is still there has stopped its workers for pods that come or go
        fault = self.generation > 0 and (self.stop_time is None or bool(start.get("restarts")))
        self.seconds = self.so_far(began, int(start["world_size"]), fault)
        self.generation, self.world_size = start["generation"], int(start["world_size"])
        self.began, self.follows_fault = began, fault
        self.phases, self.stop_time, self.noticed, self.survived = {}, None, None, False

    def so_far(
        self, until: float | None = None, world_size: int = 0, fault: bool = False
    ) -> dict[str, float]:
        """Rank-seconds by owner, the newest life included, as far as it has told.

        until: unix seconds, when a next life began with so many ranks; None: none has. fault: one
        that nobody had asked for.
        """
        seconds = dict.fromkeys(OWNERS, 0.0) | self.seconds
        for phase, row in self.phases.items():
            seconds[owner_of(phase, self.follows_fault)] += sum(row)
        of_0 = _of_rank(self.phases, 0)
        # a rank that began later than rank 0 was still being formed, or started
        later = "reforming" if self.follows_fault else "start"
        for rank in range(self.world_size if self.phases else 0):
            seconds[later] += of_0 - _of_rank(self.phases, rank)
        if not self.generation:
            return seconds
        told = self.began + of_0  # up to here its phases say
        if self.stop_time is not None:
            ended = max(told, self.stop_time)
            seconds["checkpoint"] += (ended - told) * self.world_size  # the last one
            if until is not None:
                owner = "reforming" if fault else "stopped"
                seconds[owner] += max(0.0, until - ended) * world_size
        elif until is not None:
            noticed = min(max(told, self.noticed or told), max(told, until))
            owner = "detection" if self.survived else "training"
            seconds[owner] += (noticed - told) * self.world_size
            seconds["reforming"] += max(0.0, until - noticed) * world_size
        return seconds


def _of_rank(phases: Phases, rank: int) -> float:
    return sum(row[rank] for row in phases.values())
