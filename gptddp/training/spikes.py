"""A loss or a gradient norm that is finite, and many times its usual size."""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

WINDOW, LEAST = 64, 16  # steps whose median is the usual size; of fewer nothing is said
TIMES = 10.0


class Spikes:
    """Rank 0 only: judges each step by those before it in its life."""

    def __init__(self) -> None:
        self._recent = {name: deque[float](maxlen=WINDOW) for name in ("loss", "grad_norm")}
        self._high = dict.fromkeys(self._recent, False)  # was it in the last step?

    def add(self, line: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One more step, by its line of the log: `field`, `value` and `usual` of each new spike."""
        found = []
        for name, recent in self._recent.items():
            if (value := line[name]) is None:  # a step that is skipped: the streak goes on
                continue
            usual = statistics.median(recent) if len(recent) >= LEAST else math.inf
            high = value > (usual + math.log(TIMES) if name == "loss" else TIMES * usual)
            if high and not self._high[name]:
                found.append({"field": name, "value": value, "usual": usual})
            self._high[name] = high
            recent.append(value)
        return found
