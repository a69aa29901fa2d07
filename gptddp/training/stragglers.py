"""Ranks that are slower than the others, for so long that it is no accident.

DDP makes the steps of all ranks equally long, so the time of a step does not show a slow rank. The
busy time of each rank does: the time for its rows, and for its part of the step up to its last
gradient (training/clock.py).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RATIO, OVER = 1.3, 1.15  # times the median: slow above RATIO, until below OVER
WINDOW_S, LEAST_STEPS = 15.0, 3  # of steps that are judged together
JUDGE_S = 1.0  # of steps, between two judgements
HOLD_S = 60.0  # a rank stays named for this time at least, so that the ledger does not fill up


@dataclass
class Slow:
    """A rank that is named as slow."""

    ratio: float  # to the median, at present
    seconds: float = 0.0  # since it was named


class Stragglers:
    """Rank 0 only: judges the ranks of a life by the last WINDOW_S seconds of its steps."""

    def __init__(self, names: Sequence[str], slots: Sequence[int]) -> None:
        """By rank: names, and slots in a step; a rank with more slots may take longer."""
        self.slow: dict[int, Slow] = {}  # by rank
        self._names = names
        self._slots = np.maximum(np.asarray(slots, dtype=float), 1.0)
        self._steps: deque[tuple[float, np.ndarray]] = deque()  # seconds of a step, busy_s
        self._seconds = 0.0  # of all these steps
        self._unjudged_s = JUDGE_S

    def add(self, step_s: float, busy_s: np.ndarray) -> list[tuple[str, dict[str, Any]]]:
        """Add a step; `busy_s` (ranks,): how long each rank was busy in it.

        Returns events, `slow` and `slow_end`, with their fields.
        """
        counted_s = min(step_s, WINDOW_S / LEAST_STEPS)  # a stalled step does not fill the window
        self._steps.append((counted_s, busy_s))
        self._seconds += counted_s
        while self._seconds - self._steps[0][0] >= WINDOW_S:
            self._seconds -= self._steps.popleft()[0]
        for it in self.slow.values():
            it.seconds += step_s
        self._unjudged_s += step_s
        if self._seconds < WINDOW_S - 1e-6 or self._unjudged_s < JUDGE_S:
            return []
        self._unjudged_s = 0.0
        events: list[tuple[str, dict[str, Any]]] = []
        for rank, ratio in enumerate(self._ratios()):
            about, slow = {"rank": rank, "name": self._names[rank]}, self.slow.get(rank)
            if slow:
                slow.ratio = ratio
                if ratio < OVER and slow.seconds >= HOLD_S:
                    del self.slow[rank]
                    events.append(("slow_end", about | {"seconds": round(slow.seconds, 1)}))
            elif ratio > RATIO:
                self.slow[rank] = Slow(ratio)
                events.append(("slow", about | {"ratio": ratio}))
        return events

    @property
    def shown(self) -> dict[str, float]:
        """Name and ratio of the ranks that are slow now; a named rank may be fast again."""
        return {self._names[rank]: it.ratio for rank, it in self.slow.items() if it.ratio >= OVER}

    def _ratios(self) -> list[float]:
        """Busy time of each rank, relative to the (lower) median.

        Some work is the same on all ranks, and some grows with the slots, in unknown shares. So a
        rank is compared with the larger of the median and the median for its slots. The longest
        step of each rank is left out: one long step does not make a slow rank.
        """
        steps = np.stack([busy_s for _, busy_s in self._steps])
        busy = steps.sum(0) - steps.max(0)
        middle = (len(busy) - 1) // 2
        alike = np.sort(busy)[middle]
        by_slots = np.sort(busy / self._slots)[middle] * self._slots
        ratios: list[float] = (busy / np.maximum(np.maximum(alike, by_slots), 1e-9)).tolist()
        return ratios
