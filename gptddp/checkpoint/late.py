"""Late saves: a launcher saves a snapshot while the next life trains, here agreed with its workers.

A save that is shorter than a life is made by the life itself, from rank 0's memory. Where lives are
shorter, none would ever be finished. So when a life goes on from a snapshot and a checkpoint is
overdue, the launcher of that snapshot's pod saves it, in a process that the next fault does not
end. Worker and launcher meet in the folder of the pod that holds the verdict:

    late.asked  a worker asks for a late save; the launcher takes it away
    late.lock   locked by the process that saves, for as long as it lives; what it saves, since when
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptddp import files

_REQUEST, _LOCK = "late.asked", "late.lock"
PATIENCE_S = 600.0  # then a save has hung, and another pod may try


def ask(folder: Path) -> None:
    """Worker: have the launcher save the pod's snapshot. Raises OSError."""
    (folder / _REQUEST).touch()


def asked(folder: Path) -> bool:
    """Launcher: has a worker asked since the last call? Raises OSError."""
    try:
        (folder / _REQUEST).unlink()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def saving(folder: Path) -> Iterator["Note"]:
    """In the process that saves: it is seen to save what it notes, until it ends in any way.

    Raises BlockingIOError where another process of the pod saves.
    """
    fd = files.lock(folder / _LOCK)
    try:
        os.ftruncate(fd, 0)
        yield Note(fd)
    finally:
        os.close(fd)


class Note:
    """What a late save is about."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, name: str) -> None:
        """The name of the checkpoint in the making."""
        text = json.dumps({"name": name, "began": time.monotonic()}).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)


def in_progress(folder: Path | None) -> str | None:
    """Worker: the checkpoint that this pod's launcher is saving; None where it saves none."""
    if folder is None or not files.is_locked(folder / _LOCK):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        note: Any = files.read_json(folder / _LOCK)
        if time.monotonic() - note["began"] < PATIENCE_S:
            return str(note["name"])
    return None
