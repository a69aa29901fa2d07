"""The history of a run, in its directory: one log per generation, one ledger; stdlib only.

`log.<generation>.jsonl` has an object a step, `ledger.jsonl` an object an event. Both only grow.
"""

import contextlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptddp.files import fsync

LEDGER = "ledger.jsonl"
_LOG = re.compile(r"log\.(\d+)\.jsonl", re.ASCII)
# `.bad.1` may follow, or a unique suffix in `.tmp` and `.trash`.
_CHECKPOINT = re.compile(r"step-\d+\.(\d+)(\..+)?", re.ASCII)

log = logging.getLogger(__name__)


class _Lines:
    """A file of JSON lines that only grows; safe to use from several threads.

    A line goes out in one write, so writers of one file do not mix theirs. While the disk
    refuses, lines wait in memory and go out with a later one: nothing is raised but by `sync`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._warned = False

    def append(self, obj: Mapping[str, Any]) -> None:
        line = json.dumps({key: _finite(value) for key, value in obj.items()})
        with self._lock:
            self._waiting += line.encode() + b"\n"
            try:
                self._flush()
                self._warned = False
            except OSError as error:
                if not self._warned:  # once for each outage
                    log.warning("%s; its lines are kept in memory until it can be written", error)
                self._warned = True

    def sync(self) -> None:
        """Make every line so far durable. Raises OSError where it cannot."""
        with self._lock:
            self._flush()
            if self._fd is None:
                return
            fd = os.dup(self._fd)
        try:
            os.fsync(fd)  # without the lock: it can take long, and the training loop appends
        finally:
            os.close(fd)

    def close(self) -> None:
        """Write what waits, if the disk allows."""
        with self._lock, contextlib.suppress(OSError):
            self._flush()
            self._close()

    def _flush(self) -> None:
        """Write what waits. After an error that is the lines not yet written in full."""
        written = 0
        try:
            while written < len(self._waiting):
                fd = self._fd if self._fd is not None else self._open()
                written += os.write(fd, self._waiting[written:])
        except OSError:
            self._close()  # the next try opens anew: a stale handle never recovers
            raise
        finally:
            self._waiting = self._waiting[self._waiting.rfind(b"\n", 0, written) + 1 :]

    def _open(self) -> int:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size == 0:
            fsync(self.path.parent)
        elif os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a writer died, or the disk was full, within a line
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


def _finite(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunLog(_Lines):
    """The log of one generation: `append` an object for each step. Rank 0 only."""

    def __init__(self, run_dir: str | Path, generation: int) -> None:
        super().__init__(Path(run_dir) / f"log.{generation}.jsonl")


class Ledger(_Lines):
    """The events of a run over all its lives: start, restore, checkpoint, stop, fault."""

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / LEDGER)

    def event(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event with the time (unix seconds), durably where the disk allows."""
        self.append({"event": event, "time": time.time(), "generation": generation, **fields})
        with contextlib.suppress(OSError):  # said by append
            self.sync()


# -- reading -----------------------------------------------------------------------------------


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a file and its object, but those that a dying writer or disk has torn."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                if isinstance(obj := json.loads(line), dict):
                    yield line, obj


def history(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The run's steps in order, each as the highest generation that has it logged it.

    Where the newest generation has not yet come as far as one before it, the steps beyond are
    the older one's. They are no fiction: the rows of a step are the same in every generation,
    and so are the losses but for rounding where the world size changed. When the newest gets
    there, its own lines take their place.
    """
    for _, line in logged(run_dir):
        yield line


def logged(run_dir: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of `history`, each with the generation that logged it."""
    logs = [(int(m[1]), name) for name in _names(run_dir) if (m := _LOG.fullmatch(name))]
    # as text: objects of a million steps would take a gigabyte
    lines: dict[int, tuple[int, bytes]] = {}
    for generation, name in sorted(logs):
        for line, obj in _read(Path(run_dir) / name):
            if isinstance(step := obj.get("step"), int):
                lines[step] = generation, line
    for step in sorted(lines):
        yield lines[step][0], json.loads(lines[step][1])


def read_ledger(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's events in the order in which they were written."""
    return [obj for _, obj in _read(Path(run_dir) / LEDGER)]


def highest_generation(run_dir: str | Path) -> int:
    """The highest generation that has left anything in the run directory; 0 for a new run."""
    found = [0]
    for name in _names(run_dir):
        if match := _LOG.fullmatch(name):
            found.append(int(match[1]))
    checkpoints = Path(run_dir) / "checkpoints"
    for folder in (checkpoints, checkpoints / ".tmp", checkpoints / ".trash"):
        found += [int(m[1]) for name in _names(folder) if (m := _CHECKPOINT.fullmatch(name))]
    found += [e["generation"] for e in read_ledger(run_dir) if isinstance(e.get("generation"), int)]
    return max(found)


def next_generation(run_dir: str | Path) -> int:
    """The generation of a life that begins now: 1 for a new run. Rank 0 asks and broadcasts."""
    return highest_generation(run_dir) + 1


def _names(directory: str | Path) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []
