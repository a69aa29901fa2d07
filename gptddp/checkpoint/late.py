"""Late saves: a launcher saves a snapshot while the next life trains, here agreed with its workers.

A save that is shorter than a life is made by the life itself, from rank 0's memory. Where lives are
shorter, none would ever be finished. So when a life goes on from a snapshot and a checkpoint is
overdue, the launcher of that snapshot's pod saves it, in a process that the next fault does not
end. Worker and launcher meet in the folder of the pod that holds the verdict:

    late.asked  a worker asks for a late save; the launcher takes it away
    late.lock   locked by the process that saves, for as long as it lives; what it saves, and
                since when it has not come further
    late.more   that process wants a newer state; a worker takes it away when it has left one

A life that has a late save beside it leaves its own saves to it, until there is none any more. One
that hangs is killed when another is asked for.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptddp import files
from gptddp.distributed import pulse
from gptddp.files import exists

_REQUEST, _LOCK, _MORE = "late.asked", "late.lock", "late.more"
PATIENCE_S = 600.0  # without a chunk written or read back: it has hung, and another pod may try
STATE_S = 60.0  # that a newer state is waited for, or as long as the save has taken
_POLL_S = 0.05
_BEAT_S = 2.0  # between two looks whether a save has come further
_NOTE_BYTES = 256


def ask(folder: Path) -> None:
    """Worker: have the launcher save the pod's snapshot. Raises OSError."""
    (folder / _REQUEST).touch()


def is_asked(folder: Path) -> bool:
    """Launcher: does a worker ask? Raises OSError."""
    return exists(folder / _REQUEST)


def asked(folder: Path) -> bool:
    """Launcher: has a worker asked since the last call? Raises OSError."""
    try:
        (folder / _REQUEST).unlink()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def saving(folder: Path, doubtful: bool = False) -> Iterator["Note"]:
    """In the process that saves: it is seen to save what it notes, until it ends in any way.

    `doubtful`: the one before has hung, and so may this; no life leaves its own saves to it.
    Raises BlockingIOError where another process of the pod saves.
    """
    fd = files.lock(folder / _LOCK)
    try:
        hand_over(folder)  # nobody waits any more for what the process before has wanted
        note = Note(fd, doubtful)
        note.write("")  # it looks what there is to save
        with note.kept():
            yield note
    finally:
        os.close(fd)


def newer_state(folder: Path, took_s: float = 0.0) -> bool:
    """In the process that saves: has a worker left a newer snapshot? Waits for it for a while.

    No life may have begun yet. One that goes on from a checkpoint leaves none. A step, or an
    evaluation, may be long: a save that took `took_s` is worth as long a wait. Raises OSError.
    """
    (folder / _MORE).touch()
    end = time.monotonic() + max(STATE_S, took_s)
    while wants_state(folder):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)
    return True


def wants_state(folder: Path) -> bool:
    """Worker: does the process that saves wait for a newer state? Raises OSError."""
    return exists(folder / _MORE)


def hand_over(folder: Path) -> None:
    """Worker: the snapshot is there, or there is no memory for it."""
    with contextlib.suppress(OSError):  # it goes on after a while
        (folder / _MORE).unlink()


class Note:
    """What a late save is about."""

    def __init__(self, fd: int, doubtful: bool) -> None:
        self._fd, self._doubtful, self._name = fd, doubtful, ""
        self._over = threading.Event()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Have a thread note, as long as this lasts, that the process comes further (its pulse)."""
        thread = threading.Thread(target=self._keep, name="note", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()  # the descriptor may soon be another file's

    def _keep(self) -> None:
        seen = pulse.beats()
        while not self._over.wait(_BEAT_S):
            if seen != (seen := pulse.beats()):
                with contextlib.suppress(OSError):
                    self._put()

    def write(self, name: str) -> None:
        """The name of the checkpoint in the making."""
        self._name = name
        self._put()

    def _put(self) -> None:
        note = {"name": self._name, "alive": time.monotonic(), "doubtful": self._doubtful}
        text = json.dumps(note).encode()
        os.pwrite(self._fd, text.ljust(_NOTE_BYTES), 0)  # whole, whoever reads it meanwhile
        os.ftruncate(self._fd, _NOTE_BYTES)


def in_progress(folder: Path | None) -> str | None:
    """The checkpoint that this pod's launcher is saving; None where it saves none.

    "" as long as that is not known.
    """
    note = _note(folder)
    return None if note is None else note[0]


def relieves(folder: Path) -> bool:
    """Worker: may a life leave its own saves to the one in progress?"""
    note = _note(folder)
    return note is not None and not note[1]


def _note(folder: Path | None) -> tuple[str, bool] | None:
    """What the process that saves has noted, unless it has ended or hung."""
    if folder is None or not files.is_locked(folder / _LOCK):
        return None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        note: Any = files.read_json(folder / _LOCK)
        if time.monotonic() - note["alive"] < PATIENCE_S:
            return str(note["name"]), bool(note["doubtful"])
    return None
