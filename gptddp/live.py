"""What a command does now: on a terminal the last line, which Rich draws; elsewhere plain lines.

    screen.phase("loading torch")             # what it does, until the next word
    screen.show(["step 3/100", "loss 5.21"])  # how far it is, the most important first
    screen.write("life 1: from scratch\\n")    # lines that stay

Rich is imported only where there is a terminal, as that takes a while.
"""

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, cast

HZ = 2  # the line is drawn so often in a second, for 0.12 % of a core; a phase at once


class Patient:
    """A stream whose reader may go: what is written after that is lost, which is no error.

    A character that its encoding lacks is written as `?`.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self.stream = stream = stream or open(os.devnull, "w")  # noqa: SIM115 - None: closed
        self.encoding = getattr(stream, "encoding", None) or "ascii"
        self.draws = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")

    def write(self, text: str) -> None:
        try:
            self.stream.write(text.encode(self.encoding, "replace").decode(self.encoding))
            self.stream.flush()
        except (OSError, ValueError):  # from now on to /dev/null, or the exit would fail as well
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self.stream.fileno())

    def flush(self) -> None:
        """`write` has done it."""


class Screen:
    """Lines that stay, on stderr, and on a terminal below them the line that is drawn."""

    def __init__(self, draws: bool = True, speaks: Callable[[], bool] = lambda: True) -> None:
        """draws: nobody else writes to this terminal. speaks: does this process tell its phases?"""
        self._stream, self._speaks = Patient(sys.stderr), speaks
        self._began = self._since = time.monotonic()
        self._phase, self._parts, self._next = "", list[str](), 0.0
        self.draws = draws and self._stream.draws
        with contextlib.suppress(OSError):  # behind a shell the line would wipe what is typed there
            self.draws = self.draws and os.tcgetpgrp(self._stream.stream.fileno()) == os.getpgrp()
        self._live: Any = None  # from the first thing that is drawn on

    def _draw(self) -> None:
        """The line anew, or for the first time; from then on HZ times a second."""
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
        """What is done from now on. `drawn_only`: not worth a plain line."""
        if text == self._phase or not self._speaks():
            return
        self._phase, self._since = text, time.monotonic()
        if self.draws:
            self._draw()
        elif not drawn_only:
            self.write(f"[{self._since - self._began:.1f} s] {text}\n")

    @property
    def is_due(self) -> bool:
        """Is it time to `show` more? To end a phase, and else HZ times a second."""
        return bool(self._phase) or (self.draws and time.monotonic() >= self._next)

    def show(self, parts: Iterable[str]) -> None:
        """How far it is, in the line that is drawn: as many of the parts as fit, the first ones."""
        self._phase, self._parts, self._next = "", [*parts], time.monotonic() + 1 / HZ
        if self.draws and not self._live:
            self._draw()

    def write(self, text: str) -> None:
        """Whole lines that stay."""
        if self._live:
            self._live.console.out(text, end="", highlight=False)
        else:
            self._stream.write(text)

    def close(self) -> None:
        """Leave the terminal as it was, with the lines that stay."""
        if self._live:
            self._live.stop()
        self._live, self.draws = None, False


def fit(parts: Iterable[str], width: int) -> str:
    """`step 3/100  loss 5.21`: as many parts as fit, the first ones; the very first may be cut."""
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
    """Within it this process has a screen; within another one it is that."""
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
    """That of this process."""
    return _screens[0] if _screens else None


def phase(text: str, drawn_only: bool = False) -> None:
    """Say it on the screen of this process, where it has one."""
    if _screens:
        _screens[0].phase(text, drawn_only)


def wipe() -> None:
    """Take the drawn line away in a process that ends without any cleaning up."""
    if _screens and _screens[0].draws and select.select([], [2], [], 0)[1]:
        with contextlib.suppress(OSError):
            os.write(2, b"\r\x1b[2K")
