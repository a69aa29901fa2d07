"""A file of JSON lines that only grows."""

import contextlib
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptddp.files import explain, fsync

Line = dict[str, Any]  # of a run's log
WAIT_S = 0.05  # wait for a line to be written, at most once per outage
LOCK_S = 1.0  # wait for another process that appends to the same file
RETRY_S = 1.0  # after a disk error


class Lines:
    """A file of JSON lines that only grows; a thread writes them.

    The caller of `append` never waits for a hanging disk: lines are kept in memory, in order, and
    written when it works again. Lines whose fsync failed are written again, since the system may
    have dropped them: a line may occur twice.
    """

    sync_every = 1000  # lines between two fsyncs; until then they are kept in memory too
    shared = False  # do processes on several machines append to it?

    def __init__(self, path: Path, after: "Lines | None" = None) -> None:
        """`after`: another file; its lines become durable before a line of this one is written."""
        self.path = path
        self._after = after
        self._lines: list[bytes] = []  # not yet written in full
        self._unsynced: list[bytes] = []
        self._changed = threading.Condition()  # guards the two lists
        self._disk = threading.Lock()  # `append` never takes it: its holder may hang
        self._fd: int | None = None
        self._opened = False  # opened, but not written to yet
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: str | None = None
        self._since = 0.0  # monotonic: since when lines wait for the disk

    def append(self, obj: Mapping[str, Any]) -> None:
        """Queue a line for writing, and wait for it up to WAIT_S, unless the disk is behind.

        So a kill right after this loses no line while the disk keeps up.
        """
        line = json.dumps({key: as_json(value) for key, value in obj.items()})
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
        """Make every line so far durable, however long that takes. Raises OSError."""
        self._put(sync=True)

    def settle(self, timeout_s: float) -> bool:
        """Wait until every line is written; False if that takes longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_s)

    @property
    def waiting(self) -> int:
        """The number of lines that are not durable yet."""
        with self._changed:
            return len(self._lines) + len(self._unsynced)

    def pending(self) -> list[dict[str, Any]]:
        """The objects of the lines that are not durable yet. Does not wait for the disk."""
        with self._changed:
            lines = [*self._unsynced, *self._lines]
        return [json.loads(line) for line in lines]

    def trouble(self, patience_s: float) -> str | None:
        """The disk's error, or that it has hung for over `patience_s`; None if all is well."""
        waited_s = time.monotonic() - self._since
        if self._error is None and not self._settled() and waited_s > patience_s:
            return f"{self.path}: the disk has hung for {waited_s:.0f} s"
        return self._error

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the waiting lines, if the disk accepts them in time."""
        settled = self.settle(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if settled and self._thread is not None:
            self._thread.join(timeout_s)

    def _settled(self) -> bool:
        return not self._lines and len(self._unsynced) < self.sync_every

    # -- may hang: runs in the file's own thread, or in the caller of `sync`

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._settled())
            try:
                self._put()
            except OSError:  # kept for `trouble`
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
                self._close()  # the next try opens it again: a stale handle never recovers
                raise

    def _write(self) -> None:
        data, done = b"".join(self._lines), 0
        try:
            if data:
                fd = self._open()
                with _alone(fd) if self.shared else contextlib.nullcontext():
                    self._end_torn_line(fd)
                    while done < len(data):
                        done += os.write(fd, data[done:])
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
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            # O_NOFOLLOW: a link in the place of the file must not make us write elsewhere
            self._fd = os.open(self.path, flags | os.O_NOFOLLOW, 0o644)
            if os.fstat(self._fd).st_size == 0:
                fsync(self.path.parent)
            self._opened = True
        return self._fd

    def _end_torn_line(self, fd: int) -> None:
        """Once after opening: end a line in which a writer died, or the disk was full."""
        size = os.fstat(fd).st_size if self._opened else 0
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
        self._opened = False

    def _close(self) -> None:
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def _alone(fd: int) -> Iterator[None]:
    """Hold the file's lock, so that one machine at a time appends.

    A network file system has no atomic append: each machine writes where it believes the end to be,
    and one line could overwrite another. A process that holds the lock for over LOCK_S must be
    suspended or cut off: we write without the lock, as on a file system without locks.
    """
    end = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.005)
                continue
        except OSError:
            pass
        break
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)


def as_json(value: Any) -> Any:
    """NaN and infinity are not JSON: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
