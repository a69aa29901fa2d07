"""How far a long command has come: one line that rewrites itself on a terminal, else plain lines.

All of it goes to the given stream, stderr for a command, so that stdout has nothing but results.
"""

import time
from typing import TextIO

_REFRESH_S = 0.1
_PLAIN_S = 30.0  # between two lines of the same phase where there is no terminal


class ProgressBar:
    """`begin` a phase, `advance` it, `say` a fact; silent without a stream."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._what, self._done, self._total = "", 0, 0
        self._shown_s = 0.0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._print("")

    def begin(self, what: str, total: int = 0) -> None:
        """Begin a phase of `total` units; 0 where that is not known."""
        self._what, self._done, self._total = what, 0, total
        self._show()

    def advance(self, units: int) -> None:
        """Count units as done."""
        self._done += units
        if time.monotonic() - self._shown_s > (_REFRESH_S if self._live else _PLAIN_S):
            self._show()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._print(text + "\n")

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        percent = min(100, 100 * self._done // self._total) if self._total and self._done else 0
        text = f"{self._what} {percent:3} %" if percent else self._what
        self._print(text if self._live else text + "\n")

    def _print(self, text: str) -> None:
        """Print in place of the line that moves."""
        if self._stream is not None:
            print("\r\x1b[K" * self._live + text, end="", file=self._stream, flush=True)
