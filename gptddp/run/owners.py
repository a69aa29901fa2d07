"""Where the time of a run went: the category ("owner") of every rank-second, over all lives.

A life records the seconds of each rank by phase (training/clock.py) with every checkpoint and at
its end. The time from there to the next life went to detection and recovery. The categories add up
to the elapsed time, times the number of ranks.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ABOUT = {
    "training": "steps done for the first time",
    "waiting": "waiting for a slower rank",
    "data": "waiting for the rows of a step",
    "evaluation": "measuring the validation loss",
    "checkpoint": "the part of a save that stops training, and the last save before a stop",
    "redone": "steps done again, because the result of the first time was lost",
    "detection": "from the last agreement of all ranks until a survivor noticed the loss",
    "recovery": "from then until all remaining ranks, and new ones, had the state",
    "reload": "a start after a fault, until its first step was done",
    "start": "the first start, or one after a stop, until its first step was done",
    "stopped": "after a requested stop, until the next start",
    "logging": "writing log, ledger and metrics, on rank 0",
    "other": "the rest of the loop",
}
OWNERS = tuple(ABOUT)
LOSSES = OWNERS[1:]
OF_FAULTS = ("redone", "detection", "recovery", "reload")
_OF_PHASE = {
    "step": "training",
    "wait": "waiting",
    "data_wait": "data",
    "eval": "evaluation",
    "checkpoint": "checkpoint",
    "logging": "logging",
    "redo": "redone",
}
_BEFORE_STEPS = ("init", "restore", "warmup")
_TIMED = ("checkpoint", "stop", "end", "world")  # events with the phases of a life

Phases = Mapping[str, list[float]]  # seconds of each rank


def owner_of(phase: str, follows_fault: bool) -> str:
    """The category of a phase's seconds. `follows_fault`: the life follows a fault."""
    if phase in _BEFORE_STEPS:
        return "reload" if follows_fault else "start"
    return _OF_PHASE.get(phase, "other")


@dataclass
class Owners:
    """The rank-seconds of a run by category, as far as its ledger has them."""

    seconds: dict[str, float] = field(default_factory=dict)  # of past lives, and between lives
    generation: int = 0  # of the newest life, like all fields below
    world_size: int = 0
    began: float = 0.0  # unix seconds, on rank 0
    follows_fault: bool = False
    beside_s: float = 0.0  # its first seconds, in which another job still had the run
    phases: dict[str, list[float]] = field(default_factory=dict)  # the last recorded ones
    stop_time: float | None = None  # of an orderly end
    noticed: float | None = None  # of another end: a survivor noticed it, or the last step ended
    survived: bool = False  # did a rank survive that end?
    since_s: float | None = None  # from the phases to the end of either kind
    redo_until: int = 0  # the last step that a lost life finished
    last_step: int = 0  # in the event of its end
    moved_step: int = -1  # the step at which its present world began; -1: its first world

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one more event of the ledger; an event that was counted changes nothing.

        An event of version 0.1.0, or written by hand, that lacks needed fields also changes
        nothing: seconds that are not known have no category.
        """
        with suppress(LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
            kind, generation = event["event"], event["generation"]
            if kind == "start" and generation > self.generation:
                self._next(event)
            elif generation != self.generation or kind not in _TIMED:
                return
            if kind == "stop":
                self.stop_time = float(event["time"])
            elif kind == "world" and (event["at"] <= self.began or self.stop_time is not None):
                return  # a takeover, counted with its `start`; or after the recorded stop
            elif kind in ("end", "world"):
                self.noticed, self.last_step = float(event["at"]), int(event.get("step") or 0)
                self.survived = kind == "world" or bool(event.get("survived", event.get("phases")))
            of_log = kind == "checkpoint" or (kind == "end" and not self.survived)
            if of_log and event.get("step", math.inf) <= self.moved_step:
                return  # its phases are those of the previous world
            newer_s = 0.0
            if phases := event.get("phases"):
                rows = {str(name): [float(it) for it in row] for name, row in phases.items()}
                newer_s = self._hear(rows)
            if kind != "checkpoint" and "since_s" in event:
                since_s = float(event["since_s"])
                self.since_s = max(0.0, since_s - newer_s) if 0 <= since_s < math.inf else None
            if kind == "world":  # later phases are of other ranks
                self._next(event, self.redo_until)
                self.moved_step = int(event["step"])

    def _hear(self, phases: dict[str, list[float]]) -> float:
        """Take these phases unless the known ones are newer; return by how many seconds."""
        for row in phases.values():
            if not (len(row) == self.world_size and 0 <= min(row) <= max(row) < math.inf):
                return 0.0
        newer_s = _of_rank(self.phases, 0) - _of_rank(phases, 0)
        if newer_s <= 0:
            self.phases = phases
        return max(0.0, newer_s)

    def _next(self, start: Mapping[str, Any], redo_until: int = 0) -> None:
        """End the previous life or world: its seconds, and those until `start`, get categories."""
        began = float(start["time"]) - float(start.get("seconds") or 0.0)
        # started by a launcher, or a rank, of the previous life
        same_job = bool(start.get("restarts")) or start.get("source") == "memory"
        fault = self.generation > 0 and (self.stop_time is None or same_job)
        self.seconds = self.so_far(began, int(start["world_size"]), fault)
        beside_s = self._ended() - began if self.generation else 0.0
        # else a clock has jumped
        self.beside_s = beside_s if 0 < beside_s <= float(start.get("seconds") or 0.0) else 0.0
        self.generation, self.world_size = start["generation"], int(start["world_size"])
        self.began, self.follows_fault = began, fault
        redo_until = max(redo_until, int(start.get("step") or 0) + int(start.get("redo") or 0))
        self.redo_until = redo_until
        self.phases, self.stop_time, self.noticed, self.survived = {}, None, None, False
        self.since_s, self.last_step, self.moved_step = None, 0, -1

    def so_far(
        self, until: float | None = None, world_size: int = 0, fault: bool = False
    ) -> dict[str, float]:
        """Rank-seconds by category, with those of the newest life, as far as recorded.

        until: unix seconds when a next life began with `world_size` ranks; None: there is none.
        fault: nobody requested that next life.
        """
        seconds = dict.fromkeys(OWNERS, 0.0) | self.seconds
        for phase, row in self.phases.items():
            if phase == "init":
                row = [max(0.0, it - self.beside_s) for it in row]
            seconds[owner_of(phase, self.follows_fault)] += sum(row)
        of_0 = _of_rank(self.phases, 0)
        # a rank that began later than rank 0 was still starting or joining
        later = "recovery" if self.follows_fault else "start"
        for rank in range(self.world_size if self.phases else 0):
            seconds[later] += of_0 - _of_rank(self.phases, rank)
        if not self.generation:
            return seconds
        phases_end = self.began + of_0  # the phases cover the time up to here
        if self.stop_time is not None:
            spent, owner = self._until(self.stop_time, phases_end), "checkpoint"  # the last save
        elif until is None:
            return seconds
        elif self.survived:
            spent, owner = self._until(self.noticed or phases_end, phases_end, until), "detection"
        else:  # up to its last step
            spent = self._until(self.noticed or phases_end, phases_end, until)
            owner = "redone" if 0 < self.last_step <= self.redo_until else "training"
        seconds[owner] += spent * self.world_size
        if until is not None:
            # by two clocks, which may differ and jump
            gaps = [gap for gap in (until - self._ended(), until - phases_end - spent) if gap >= 0]
            stopped = self.stop_time is not None and not fault
            seconds["stopped" if stopped else "recovery"] += min(gaps, default=0.0) * world_size
        return seconds

    def _ended(self) -> float:
        """Unix seconds of its end, else of its last recorded phases."""
        ended = self.noticed if self.stop_time is None else self.stop_time
        return ended or self.began + _of_rank(self.phases, 0)

    def _until(self, ended: float, phases_end: float, most: float = math.inf) -> float:
        """Seconds from the recorded phases to the end of the life."""
        if self.since_s is not None:
            return self.since_s
        return max(0.0, min(ended, most) - phases_end)


def goodput(rank_seconds: Mapping[str, float]) -> float | None:
    """The fraction of the rank-seconds that went to new steps; None before the first fault.

    Before a fault it would only show how long ago the run began. A joining rank counts like a lost
    one: the others stop for it.
    """
    if not any(rank_seconds.get(owner) for owner in OF_FAULTS):
        return None
    return rank_seconds["training"] / sum(rank_seconds.values())


def _of_rank(phases: Phases, rank: int) -> float:
    return sum(row[rank] for row in phases.values())
