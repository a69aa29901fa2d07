"""A loss or a gradient norm that is finite, and many times its usual size."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW, LEAST = 64, 32  # steps, whose median is what is usual; fewer than the second say nothing
TIMES = {"loss": 1.5, "grad_norm": 25.0}


class Spikes:
    """Rank 0 only: judges the steps of a life."""

    def __init__(self) -> None:
        self._recent = {name: deque[float](maxlen=WINDOW) for name in TIMES}
        self._high = dict.fromkeys(TIMES, False)  # is the last step of a streak?

    def add(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One more step, by its line of the log: what begins to be too large with it."""
        found = []
        for name, times in TIMES.items():
            value, recent = line[name], self._recent[name]
            if value is None:  # a step that is skipped neither ends a streak nor begins one
                continue
            usual = statistics.median(recent) if len(recent) >= LEAST else None
            high = usual is not None and value > times * usual
            if high and not self._high[name]:
                found.append({"field": name, "value": value, "usual": usual})
            self._high[name] = high
            recent.append(value)
        return found
