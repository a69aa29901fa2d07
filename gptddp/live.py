"""The progress of a command: Rich draws it as the last line of a terminal; elsewhere plain lines.

    screen.phase("loading torch")             # what the command does from now on
    screen.show(["step 3/100", "loss 5.21"])  # progress, the most important part first
    screen.write("life 1: from scratch\\n")    # permanent lines

Rich is imported only on a terminal, to keep start-up short.
"""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, cast

HZ = 2  # redraws of the line per second, for 0.12 % of a core; a new phase is drawn at once


class Patient:
    """A stream whose reader may disappear: later output is discarded without an error.

    A character that the encoding lacks is written as `?`.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream = stream or open(os.devnull, "w")  # noqa: SIM115 - None: closed
        self.encoding = getattr(stream, "encoding", None) or "ascii"
        self.draws = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def write(self, text: str) -> None:
        try:
            self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            self.stream.flush()
        except (OSError, ValueError):  # write to /dev/null from now on, or the exit would fail too
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self.stream.fileno())

    def flush(self) -> None:
        """Nothing to do: `write` flushes."""


class Screen:
    """Permanent lines on stderr and, on a terminal, a line of progress below them."""

    def __init__(self, draws: bool = True, speaks: Callable[[], bool] = lambda: True) -> None:
        """draws: no other process writes to this terminal. speaks: does this one show phases?"""
        self._stream, self._speaks = Patient(sys.stderr), speaks
        self._began = self._since = time.monotonic()
        self._phase, self._parts, self._next = "", list[str](), 0.0
        self.draws = draws and self._stream.draws
        with contextlib.suppress(
            OSError
        ):  # in the background the line would overwrite the user's typing
            self.draws = self.draws and os.tcgetpgrp(self._stream.stream.fileno()) == os.getpgrp()
        self._live: Any = None  # set by the first drawing

    def _draw(self) -> None:
        """Draw the line now; from the first time on, Rich redraws it HZ times a second."""
        if not self._live:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=cast(IO[str], self._stream), force_terminal=True)
            self._live = Live(
                console=console,
                get_renderable=lambda: self._line(console.width - 1),
                refresh_per_second=HZ,
                redirect_stdout=bool(sys.stdout and sys.stdout.isatty()),
                transient=True,
            )
            self._live.start()
            console.show_cursor(True)  # Rich hides it: a killed process could not show it again
        self._live.refresh()

    def _line(self, width: int) -> Any:
        from rich.text import Text

        doing = f"{self._phase} {time.monotonic() - self._since:.0f} s" if self._phase else ""
        parts = [doing, *self._parts] if doing else self._parts
        return Text(fit(parts, width), no_wrap=True, overflow="crop")

    def phase(self, text: str, drawn_only: bool = False) -> None:
        """Start a phase. `drawn_only`: show it on a terminal only."""
        if text == self._phase or not self._speaks():
            return
        self._phase, self._since = text, time.monotonic()
        if self.draws:
            self._draw()
        elif not drawn_only:
            self.write(f"[{self._since - self._began:.1f} s] {text}\n")

    @property
    def is_due(self) -> bool:
        """Is it time for `show`? After a phase, and else HZ times a second."""
        return bool(self._phase) or (self.draws and time.monotonic() >= self._next)

    def show(self, parts: Iterable[str]) -> None:
        """Show the progress in the drawn line: the first parts, as many as fit."""
        self._phase, self._parts, self._next = "", [*parts], time.monotonic() + 1 / HZ
        if self.draws and not self._live:
            self._draw()

    def write(self, text: str) -> None:
        """Write whole, permanent lines."""
        if self._live:
            self._live.console.out(text, end="", highlight=False)
        else:
            self._stream.write(text)

    def close(self) -> None:
        """Remove the drawn line; the permanent lines stay."""
        if self._live:
            self._live.stop()
        self._live, self.draws = None, False


def fit(parts: Iterable[str], width: int) -> str:
    """`step 3/100  loss 5.21`: the first parts, as many as fit; the very first may be cut."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else part[:width]
        if len(longer) > width:
            break
        line = longer
    return line


# -- the screen of this process ------------------------------------------------------------------

_screens: list[Screen] = []  # none, or one


@contextlib.contextmanager
def shown(draws: bool = True, speaks: Callable[[], bool] = lambda: True) -> Iterator[Screen]:
    """Give this process a screen within the block; a nested block shares the outer screen."""
    if _screens:
        yield _screens[0]
        return
    _screens.append(screen := Screen(draws, speaks))
    try:
        yield screen
    finally:
        _screens.clear()
        screen.close()


def screen() -> Screen | None:
    """The screen of this process, if it has one."""
    return _screens[0] if _screens else None


def phase(text: str, drawn_only: bool = False) -> None:
    """Start a phase on the screen of this process, if it has one."""
    if _screens:
        _screens[0].phase(text, drawn_only)


def wipe() -> None:
    """Remove the drawn line, in a process that exits without clean-up."""
    if _screens and _screens[0].draws and select.select([], [2], [], 0)[1]:
        with contextlib.suppress(OSError):
            os.write(2, b"\r\x1b[2K")
