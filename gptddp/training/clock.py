"""Accounting of time: each second of a rank belongs to one phase, and all ranks have the table.

The table of all ranks travels in the all-reduce before each step (training/agree.py). So it costs
no extra message, and a rank that survives rank 0 has it too.
"""

import time

import numpy as np
import torch

from gptddp.distributed.connect import World
from gptddp.distributed.hardware import PeakMemory

PHASES = (
    "init",  # from the start of the trainer until the newest state is known
    "restore",  # while rank 0 reads it, and while it is copied to all ranks
    "warmup",  # the first step of a life
    "step",  # a new step, with the transport of its sums
    "redo",  # a step that a lost life had finished before
    "wait",  # for a slower rank, within a step
    "data_wait",  # wait for the rows of a step
    "checkpoint",  # training time that a save or a fingerprint takes
    "eval",
    "logging",  # log, ledger and metrics, on rank 0
    "other",
)
STATES = {  # of rank 0, by its phase; the rest is training
    "init": "starting",
    "restore": "restoring",
    "checkpoint": "checkpointing",
    "eval": "evaluating",
}
STEPPING = ("warmup", "step", "redo")
_WAIT = PHASES.index("wait")
_BUSY = [PHASES.index(phase) for phase in (*STEPPING, "data_wait")]
_RECORD_US = 10_000_000  # of rank 0 between two records of the table in the log


class PhaseClock:
    """Each second since the start belongs to exactly one phase; the parts add up to the whole."""

    def __init__(self, phase: str = "init"):
        self._ns = dict.fromkeys(PHASES, 0)  # integers: no microsecond is lost or added
        self.phase, self._since = phase, time.monotonic_ns()  # the present phase, and its begin
        self.began = time.time()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase, up to the last change of phase."""
        return {phase: ns / 1e9 for phase, ns in self._ns.items()}

    def enter(self, phase: str) -> None:
        """End the present phase and begin `phase`.

        A phase is added when it ends, so that a hang is never counted as a step.
        """
        now = time.monotonic_ns()
        self._ns[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def waited(self, seconds: float) -> int:
        """Count this much of the present phase, at most all of it, as waiting for other ranks.

        Returns whole microseconds.
        """
        micros = int(min(seconds * 1e6, (time.monotonic_ns() - self._since) / 1e3))
        self._since += 1000 * micros
        self._ns["wait"] += 1000 * micros
        return micros

    def worked(self, micros: int, phase: str) -> None:
        """Count this much of the waiting time as `phase` instead."""
        self._ns["wait"] -= 1000 * micros
        self._ns[phase] += 1000 * micros

    def state(self, draining: bool) -> str:
        """The present state of this rank, for a metric; `draining`: it was asked to stop."""
        return "draining" if draining else STATES.get(self.phase, "training")

    def micros(self) -> np.ndarray:
        """Whole microseconds until now, int64 (phases,), the present phase included.

        It changes nothing: any thread may call it.
        """
        ns = {**self._ns}
        ns[self.phase] += time.monotonic_ns() - self._since
        return np.array([ns[phase] // 1000 for phase in PHASES], dtype=np.int64)


class RankSeconds:
    """The clocks of all ranks in this life, as of the last agreement; equal on every rank.

    A rank waits twice in a step: at the agreement for later ranks, and within the step for the
    sums. The wait at the agreement is the difference to the slowest rank since the last meeting.
    The shortest wait for the sums, over all ranks, is the time of their transport: it is no wait,
    and stays with the step.

    The table also has the peak memory of each rank since the table was last due.
    """

    def __init__(self, clock: PhaseClock, world: World, device: torch.device | None = None) -> None:
        self.clock, self.memory = clock, PeakMemory(device)
        self._before = np.zeros(len(PHASES), dtype=np.int64)  # us of this rank, before this world
        self._begin(world)

    def enter(self, world: World, before: np.ndarray) -> None:
        """Clear the table in another world; the seconds before it are in the ledger.

        `before`: `PhaseClock.micros` when the event of the world was made.
        """
        self._before = before
        self._begin(world)

    def _begin(self, world: World) -> None:
        self.peaks = np.zeros((world.world_size, len(self.memory.kinds)), dtype=np.int64)  # bytes
        self.micros = np.zeros((world.world_size, len(PHASES)), dtype=np.int64)
        self.busy_s = np.zeros(world.world_size)  # of each rank, in the last step
        self.is_due = True  # the table is due in the log
        self._rank = world.rank
        self._late = np.zeros(world.world_size, dtype=np.int64)  # us before the last rank
        self._sums = 0  # us that this rank waited within the last step
        self._kind = "step"  # phase of the last step
        self._meet()  # a life is made right after a collective for its origin

    def _meet(self) -> None:
        """All ranks are here at the same moment: after a collective that needs all of them."""
        self.met, self._met_busy = time.monotonic(), int(self.own()[_BUSY].sum())
        self._met_phase = self.clock.phase

    @property
    def since_s(self) -> float:
        """Seconds since the meeting of the present table; any thread may ask."""
        return time.monotonic() - self.met

    def own(self) -> np.ndarray:
        """Whole microseconds of this rank in this world until now, int64 (phases,)."""
        return self.clock.micros() - self._before

    def waited(self, seconds: float) -> None:
        """Count this long of the present phase, a step, as this rank's wait for the sums."""
        self._sums, self._kind = self.clock.waited(seconds), self.clock.phase

    def mine(self) -> np.ndarray:
        """This rank's contribution to a sum over all ranks: its own row, zeros for the others.

        int64 (ranks, phases + 3 + kinds of memory). Microseconds in each phase, since the ranks
        met, busy since then, and waited for the sums; then bytes of memory.
        """
        width = len(PHASES) + 3 + len(self.memory.kinds)
        rows = np.zeros((len(self.micros), width), dtype=np.int64)
        now = self.own()
        busy = now[_BUSY].sum() - self._met_busy
        met = round(1e6 * self.since_s), busy, self._sums
        rows[self._rank] = *now, *met, *self.memory.read()
        return rows

    def take(self, rows: np.ndarray) -> None:
        """Take the sum of all contributions: the ranks have met."""
        rows, met, self.peaks = np.split(rows, [len(PHASES), len(PHASES) + 3], axis=1)
        (since, busy, sums), rows = met.T, rows.copy()
        common, kind = int(sums.min()), self._kind
        rows[:, _WAIT] -= common
        rows[:, PHASES.index(kind)] += common
        self.clock.worked(common, kind)
        self._late, self._sums, self.busy_s = since.max() - since, 0, busy / 1e6
        self.clock.waited(self._late[self._rank] / 1e6)
        before, now = int(self.micros[0].sum()), int(rows[0].sum())
        changed = not before or self.clock.phase != self._met_phase
        self.is_due = changed or now // _RECORD_US > before // _RECORD_US
        if self.is_due:
            self.memory.reset()
        self.micros = rows
        self._meet()

    def by_phase(self) -> dict[str, list[float]]:
        """The table for log and ledger, as of the last meeting: seconds of each rank, by phase."""
        rows = self.micros.copy()
        rows[:, _WAIT] += self._late
        seconds = {name: us / 1e6 for name, us in zip(PHASES, rows.T, strict=True)}
        return {name: it.round(3).tolist() for name, it in seconds.items() if it.any()}
