"""Which ranks are slower than the others, for so long that it is no accident.

DDP makes the steps of all ranks equally long, so the time of a step does not show a slow one. How
long each rank is busy does: with its rows, and with its part of the step up to its last gradient
(training/clock.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RATIO, OVER = 1.3, 1.15  # times the median: slow from the first on, and until the second
WINDOW_S, LEAST_STEPS = 15.0, 3  # of steps, that are judged together
JUDGE_S = 1.0  # of steps, between two looks
HOLD_S = 60.0  # a rank that is named stays so for this time at least: the ledger is not filled


@dataclass
class Slow:
    """A rank that is slower than the others."""

    rank: int
    ratio: float  # to the median, of late
    step: int  # at which it was named
    seconds: float = 0.0  # for so long


class Stragglers:
    """Rank 0 only: judges the ranks of a life by the last WINDOW_S seconds of its steps."""

    def __init__(self, slots: Sequence[int]) -> None:
        """`slots`: of each rank in a step; who has more of them may take longer."""
        self.slow: dict[int, Slow] = {}  # by rank
        self._slots = np.maximum(np.asarray(slots, dtype=float), 1.0)
        self._steps: deque[tuple[float, np.ndarray]] = deque()  # seconds of a step, busy_s
        self._seconds = 0.0  # of all of them
        self._unjudged_s = JUDGE_S

    def add(self, step: int, step_s: float, busy_s: np.ndarray) -> tuple[list[Slow], list[Slow]]:
        """One more step, of so many seconds; `busy_s` (ranks,): how long each rank was busy.

        Returns the ranks that are slow from now on, and those that are so no longer.
        """
        counted_s = min(step_s, WINDOW_S / LEAST_STEPS)  # one that has stalled is not all of it
        self._steps.append((counted_s, busy_s))
        self._seconds += counted_s
        while self._seconds - self._steps[0][0] >= WINDOW_S:
            self._seconds -= self._steps.popleft()[0]
        for it in self.slow.values():
            it.seconds += step_s
        self._unjudged_s += step_s
        if self._seconds < WINDOW_S - 1e-6 or self._unjudged_s < JUDGE_S:
            return [], []
        self._unjudged_s = 0.0
        found = self._ratios()
        for it in self.slow.values():
            it.ratio = found[it.rank]
        over = [it for it in self.slow.values() if it.ratio < OVER and it.seconds >= HOLD_S]
        for it in over:
            del self.slow[it.rank]
        new = [
            Slow(rank, ratio, step)
            for rank, ratio in enumerate(found)
            if ratio > RATIO and rank not in self.slow
        ]
        self.slow |= {it.rank: it for it in new}
        return new, over

    @property
    def shown(self) -> list[Slow]:
        """Those that are slow at present; one may be named still, and be so no longer."""
        return [it for it in self.slow.values() if it.ratio >= OVER]

    def _ratios(self) -> list[float]:
        """Of each rank to the median; of an even number the lower of the two in the middle.

        What is the same for all ranks takes the same time, and the slots take theirs: a rank with
        more of them is compared with both, as it is not known which part of the time is which.
        The longest step of each rank is left out: once is not slow, however long it was.
        """
        steps = np.stack([busy_s for _, busy_s in self._steps])
        busy = steps.sum(0) - steps.max(0)
        middle = (len(busy) - 1) // 2
        alike = np.sort(busy)[middle]
        by_slots = np.sort(busy / self._slots)[middle] * self._slots
        ratios: list[float] = (busy / np.maximum(np.maximum(alike, by_slots), 1e-9)).tolist()
        return ratios
