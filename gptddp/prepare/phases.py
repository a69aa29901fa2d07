"""Progress of a long command, in plain lines on stderr: stdout has only results."""

import time
from typing import TextIO

_EVERY_S = 10.0  # between two lines of the same phase


class Phases:
    """`begin` a phase, `advance` it, `say` a fact; silent without a stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._what, self._done, self._total = "", 0, 0
        self._said_s = 0.0

    def begin(self, what: str, total: int = 0) -> None:
        """Start a phase of `total` units; 0: unknown."""
        self._what, self._done, self._total = what, 0, total
        self.say(what)

    def advance(self, units: int) -> None:
        """Count units as done."""
        self._done += units
        if self._total and time.monotonic() - self._said_s > _EVERY_S:
            self.say(f"{self._what} {min(100, 100 * self._done // self._total):3} %")

    def say(self, text: str) -> None:
        """Print a line."""
        self._said_s = time.monotonic()
        if self._stream is not None:
            print(text, file=self._stream, flush=True)
