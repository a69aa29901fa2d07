"""Distinguishes a wait of the main thread for a volume, of any length, from a hang.

Code that reads for the main thread runs within `waiting`. Then the thread that listens to the pulse
logs the file, and beats in the main thread's place. A stopped process stops that thread too, so the
launcher still notices it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from gptddp.distributed.environment import ranks

MOST_S = 3600.0  # then the wait is a hang: another node may have a better mount
FIRST_LINE_S, NEXT_LINE_S = 15.0, 60.0  # of waiting, until a log line, and between two lines

log = logging.getLogger(__name__)

_waits: list[tuple[Callable[[], str], float]] = []  # the innermost last; its begin, monotonic


class Said:
    """Lines in the log, if `aloud`: one after FIRST_LINE_S, then one every NEXT_LINE_S."""

    def __init__(self, head: str, aloud: bool = True, began: float | None = None) -> None:
        self.head, self.aloud = head, aloud
        self.began = time.monotonic() if began is None else began
        self.due_s = FIRST_LINE_S

    def update(self, doing: str) -> None:
        waited_s = time.monotonic() - self.began
        if self.aloud and waited_s >= self.due_s:
            self.due_s = waited_s + NEXT_LINE_S
            log.info("%s: %s (%.0f s so far)", self.head, doing, waited_s)


@contextlib.contextmanager
def waiting(what: Callable[[], str]) -> Iterator[None]:
    """The main thread only: within it, `what()` is the file that it waits for; "" for none.

    It is called in another thread.
    """
    _waits.append((what, time.monotonic()))
    try:
        yield
    finally:
        _waits.pop()


def waited_for() -> tuple[str, float]:
    """The file that the main thread waits for at this moment ("": none), and since when."""
    with contextlib.suppress(IndexError):  # the wait has just ended
        what, since = _waits[-1]
        return what(), since
    return "", 0.0


class Patience:
    """The listening thread's view of a wait; it calls `lasts` again and again."""

    def __init__(self) -> None:
        self._said = Said("")

    def lasts(self) -> bool:
        """Does the main thread wait for the storage, and not for too long? Also logs the wait."""
        what, since = waited_for()
        if not what:
            return False
        if since != self._said.began:
            self._said = Said(f"[rank {ranks().rank}] waiting for the storage", began=since)
        self._said.update(f"reading {what}")
        return time.monotonic() - since < MOST_S
