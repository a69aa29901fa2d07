"""Locks for parallel tests: `pytest -n` has several processes, and some tests must run alone.

Every test shares the lock of the room; a test marked `alone` holds it exclusively. Two existing
files serve as locks. A test holds the entrance while it waits for the room, so that all later tests
wait behind it, and a test that must run alone gets its turn.
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
            fcntl.flock(file, fcntl.LOCK_UN)  # a process forked by the test has the file too


@contextlib.contextmanager
def beside_others(alone: bool) -> Iterator[None]:
    """Within it tests of other processes of this pytest may run, or none if `alone`."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with contextlib.ExitStack() as stack:
        with _locked(ENTRANCE, fcntl.LOCK_EX):
            stack.enter_context(_locked(ROOM, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
