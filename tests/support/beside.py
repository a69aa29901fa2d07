"""Tests beside each other: `pytest -n` has several processes, and some tests want to be alone.

Every test holds a lock that others may share, one that is marked `alone` holds it by itself. The
locks are those of two files that are there anyway. Whoever waits for the first holds up all that
come later, so that a test that wants to be alone is not passed by for ever.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

ENTRANCE, ROOM = Path(__file__), Path(__file__).parents[1] / "conftest.py"


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with path.open() as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a process that the test has forked has the file too


@contextlib.contextmanager
def beside_others(alone: bool) -> Iterator[None]:
    """Within it there are tests of other processes of this pytest, or none if `alone`."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack:
        with _locked(ENTRANCE, fcntl.LOCK_EX):
            stack.enter_context(_locked(ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
