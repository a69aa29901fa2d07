"""The history of a run, in its directory: one log per generation, one ledger; stdlib only.

`log.<generation>.jsonl` has an object a step, `ledger.jsonl` an object an event. Both only grow.
"""

import contextlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptddp.files import explain, fsync

LEDGER = "ledger.jsonl"
_LOG = re.compile(r"log\.(\d+)\.jsonl", re.ASCII)
# `.bad.1` may follow, or a unique suffix in `.tmp` and `.trash`.
_CHECKPOINT = re.compile(r"step-\d+\.(\d+)(\..+)?", re.ASCII)

WAIT_S = 0.05  # for a line to be written; no more than once an outage
RETRY_S = 1.0  # after an error of the disk


class _Lines:
    """A file of JSON lines that only grows; a thread of its own writes them.

    The caller of `append` touches no disk: whatever the volume does, lines wait in memory, in
    order, and go out when it works again. Lines whose fsync has failed are written again, since
    the system may have dropped them: such a line may be there twice.
    """

    sync_every = 1000  # lines; until then they are kept in memory too

    def __init__(self, path: Path, after: "_Lines | None" = None) -> None:
        self.path = path
        self._after = after  # all that it has been given is durable before any of ours is written
        self._lines: list[bytes] = []  # not yet written in full
        self._unsynced: list[bytes] = []
        self._changed = threading.Condition()  # guards the two lists
        self._disk = threading.Lock()  # `append` never takes it: its owner may hang
        self._fd: int | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: str | None = None
        self._since = 0.0  # monotonic: since when the disk owes us something

    def append(self, obj: Mapping[str, Any]) -> None:
        """Have a line written: at once, or in its time where the disk is behind already.

        A disk that keeps up is waited for, so that a kill right after this loses no line.
        """
        line = json.dumps({key: _finite(value) for key, value in obj.items()})
        with self._changed:
            if keeps_up := self._settled():
                self._since = time.monotonic()
            self._lines.append(line.encode() + b"\n")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.path.name, daemon=True)
                self._thread.start()
            self._changed.notify_all()
            if keeps_up:
                self._changed.wait_for(self._settled, WAIT_S)

    def sync(self) -> None:
        """Make every line so far durable. Raises OSError where it cannot; takes what it takes."""
        self._put(sync=True)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every line is written; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_s)

    def trouble(self, patience_s: float) -> str | None:
        """What keeps lines from the disk: its error, or that it has hung for so long."""
        waited_s = time.monotonic() - self._since
        if self._error is None and not self._settled() and waited_s > patience_s:
            return f"{self.path} has taken nothing for {waited_s:.0f} s"
        return self._error

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, if the disk takes it in time."""
        settled = self.settle(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if settled and self._thread is not None:
            self._thread.join(timeout_s)

    def _settled(self) -> bool:
        return not self._lines and len(self._unsynced) < self.sync_every

    # -- where it may hang: in our thread, or in the caller of `sync`

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._settled())
            try:
                self._put()
            except OSError:  # `trouble` tells
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)
        with self._disk:
            self._close()

    def _put(self, sync: bool = False) -> None:
        with self._disk:
            try:
                if self._after is not None:
                    self._after.sync()
                self._write()
                if sync or len(self._unsynced) >= self.sync_every:
                    self._sync()
                self._error = None
            except OSError as error:
                self._error = explain(OSError(error.errno, error.strerror, str(self.path)))
                self._close()  # the next try opens anew: a stale handle never recovers
                raise

    def _write(self) -> None:
        data, done = b"".join(self._lines), 0
        try:
            while done < len(data):
                done += os.write(self._open(), data[done:])
        finally:
            whole = data.count(b"\n", 0, done)
            with self._changed:
                self._unsynced += self._lines[:whole]
                del self._lines[:whole]
                self._since = time.monotonic()
                self._changed.notify_all()

    def _sync(self) -> None:
        if not self._unsynced:
            return
        try:
            os.fsync(self._open())
        except OSError:
            with self._changed:
                self._lines[:0] = self._unsynced
            raise
        finally:
            with self._changed:
                self._unsynced = []
                self._changed.notify_all()

    def _open(self) -> int:
        if self._fd is None:
            self._fd = os.open(
                self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
            )
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
    """The log of one generation: `append` an object for each step. Rank 0 only.

    No step is logged before the events that came `before` it are durable.
    """

    def __init__(
        self, run_dir: str | Path, generation: int, before: "Ledger | None" = None
    ) -> None:
        super().__init__(Path(run_dir) / f"log.{generation}.jsonl", before)


class Ledger(_Lines):
    """The events of a run over all its lives: start, restore, checkpoint, stop, fault."""

    sync_every = 1

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / LEDGER)

    def event(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event with the time (unix seconds), durable as soon as the disk allows."""
        self.append({"event": event, "time": time.time(), "generation": generation, **fields})


# -- reading -----------------------------------------------------------------------------------


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a file and its object, but those that a dying writer or disk has torn."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                if isinstance(obj := json.loads(line), dict):
                    yield line, obj


def complete(
    run_dir: str | Path, log: RunLog, lines: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Log the steps up to `step` that the run has done but that rank 0 took with it unwritten."""
    if not lines:  # the usual start: spare it the reading of the whole history
        return
    known = {line["step"] for line in history(run_dir)}
    for line in lines:
        if line["step"] not in known and line["step"] <= step:
            log.append(line)


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
    """The run's events in the order in which they were written, each once; nothing else."""

    def is_event(it: dict[str, Any]) -> bool:
        event, time, generation = (it.get(key) for key in ("event", "time", "generation"))
        return isinstance(event, str) and isinstance(time, float) and isinstance(generation, int)

    lines = _read(Path(run_dir) / LEDGER)
    return list({line: event for line, event in lines if is_event(event)}.values())


def highest_generation(
    run_dir: str | Path, events: Sequence[Mapping[str, Any]] | None = None
) -> int:
    """The highest generation that has left anything in the run directory; 0 for a new run.

    `events`: those of its ledger, if they have been read.
    """
    found = [0]
    for name in _names(run_dir):
        if match := _LOG.fullmatch(name):
            found.append(int(match[1]))
    checkpoints = Path(run_dir) / "checkpoints"
    for folder in (checkpoints, checkpoints / ".tmp", checkpoints / ".trash"):
        found += [int(m[1]) for name in _names(folder) if (m := _CHECKPOINT.fullmatch(name))]
    events = read_ledger(run_dir) if events is None else events
    found += [event["generation"] for event in events]
    return max(found)


def _names(directory: str | Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
