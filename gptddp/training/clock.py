"""Where the seconds go: each second of a rank belongs to one phase, and all ranks know all of them.

The table of all ranks rides in the all-reduce that there is before each step (training/agree.py),
so it costs no message of its own, and a rank that survives rank 0 has it too.
"""

import time

import numpy as np
import torch

from gptddp.distributed.connect import World
from gptddp.distributed.hardware import PeakMemory

PHASES = (
    "init",  # from the start of the trainer until the newest state is known
    "restore",  # until it is on all ranks
    "warmup",  # the first step of a life
    "step",  # a step that no life had finished before, with the transport of its sums
    "redo",  # one that a lost life had finished
    "wait",  # within a step: for a slower rank
    "data_wait",  # for the rows of a step
    "checkpoint",  # what a save, or a fingerprint, takes from training
    "eval",
    "other",
)
STATES = {  # of rank 0, by its phase; the rest is training
    "init": "starting",
    "restore": "restoring",
    "checkpoint": "checkpointing",
    "eval": "evaluating",
}
STEPPING = ("warmup", "step", "redo")
_WAIT, _STEP = PHASES.index("wait"), PHASES.index("step")
_BUSY = [PHASES.index(phase) for phase in (*STEPPING, "data_wait")]
_TELL_US = 10_000_000  # of rank 0 between two records of the table in the log


class PhaseClock:
    """Each second since the start belongs to exactly one phase; the parts add up to the whole."""

    def __init__(self, phase: str = "init"):
        self.seconds = dict.fromkeys(PHASES, 0.0)  # of the phases that have ended
        self.phase, self._since = phase, time.monotonic()
        self.began = time.time()

    def enter(self, phase: str) -> float:
        """End the present phase and begin `phase`; seconds of the one that ended.

        A phase is added when it ends, so that a hang is never counted as a step.
        """
        now = time.monotonic()
        spent, ended = now - self._since, self.phase
        self.seconds[ended] += spent
        self.phase, self._since = phase, now
        return spent

    def state(self, draining: bool) -> str:
        """What this rank does now, in a word for who looks at it; `draining`: it is to stop."""
        return "draining" if draining else STATES.get(self.phase, "training")

    def waited(self, seconds: float) -> None:
        """So much of the present phase was spent waiting for other ranks."""
        self._since += seconds
        self.seconds["wait"] += seconds

    def micros(self) -> np.ndarray:
        """Until now, whole microseconds int64 (phases,), the present phase included."""
        self.enter(self.phase)
        return np.array([round(1e6 * self.seconds[phase]) for phase in PHASES], dtype=np.int64)


class RankSeconds:
    """The clocks of all ranks in this life, as of the last agreement: the same on every rank.

    With them goes the most memory that each rank has held, since the table was last due.
    """

    def __init__(self, clock: PhaseClock, world: World, device: torch.device | None = None) -> None:
        self.clock, self.memory = clock, PeakMemory(device)
        self.peaks = np.zeros((world.world_size, len(self.memory.kinds)), dtype=np.int64)  # bytes
        self.micros = np.zeros((world.world_size, len(PHASES)), dtype=np.int64)
        self.busy_s = np.zeros(world.world_size)  # of each rank, in the last step
        self.is_due = True  # is it time to put the table into the log? Now and then
        self._rank = world.rank

    def mine(self) -> np.ndarray:
        """What this rank brings to a sum over all ranks: its own row, zeros for the others."""
        rows = np.zeros((len(self.micros), len(PHASES) + len(self.memory.kinds)), dtype=np.int64)
        rows[self._rank] = *self.clock.micros(), *self.memory.read()
        return rows

    def take(self, rows: np.ndarray) -> None:
        """The sum of what all have brought.

        What every rank has waited since the last time is no wait for a slower rank but the time
        that the sums themselves take: it is given to the step.
        """
        rows, self.peaks = rows[:, : len(PHASES)], rows[:, len(PHASES) :]
        since = rows - self.micros
        common = int(since[:, _WAIT].min())
        rows[:, _WAIT] -= common
        rows[:, _STEP] += common
        self.clock.seconds["wait"] -= common / 1e6
        self.clock.seconds["step"] += common / 1e6
        self.busy_s = since[:, _BUSY].sum(1) / 1e6
        before, now = int(self.micros[0].sum()), int(rows[0].sum())
        self.is_due = not before or now // _TELL_US > before // _TELL_US
        if self.is_due:
            self.memory.reset()
        self.micros = rows

    def told(self) -> dict[str, list[float]]:
        """The table as JSON: for each phase that there was, the seconds of each rank."""
        seconds = {name: us / 1e6 for name, us in zip(PHASES, self.micros.T, strict=True)}
        return {name: it.round(3).tolist() for name, it in seconds.items() if it.any()}
