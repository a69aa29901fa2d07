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
WAIT_S = 0.05  # for a line to be written; no more than once an outage
LOCK_S = 1.0  # that another process is waited for which appends to the same file
RETRY_S = 1.0  # after an error of the disk


class Lines:
    """A file of JSON lines that only grows; a thread of its own writes them.

    The caller of `append` never waits for a disk that hangs: lines are kept in memory, in order,
    and are written when it works again. Lines whose fsync has failed are written again, since the
    system may have dropped them: such a line may be there twice.
    """

    sync_every = 1000  # lines between two fsyncs; until then they are kept in memory too
    shared = False  # do processes on several machines append to it?

    def __init__(self, path: Path, after: "Lines | None" = None) -> None:
        """`after`: another file, all of whose lines are durable before one of these is written."""
        self.path = path
        self._after = after
        self._lines: list[bytes] = []  # not yet written in full
        self._unsynced: list[bytes] = []
        self._changed = threading.Condition()  # guards the two lists
        self._disk = threading.Lock()  # `append` never takes it: its owner may hang
        self._fd: int | None = None
        self._opened = False  # and not written to yet
        self._thread: threading.Thread | None = None
        self._closed = False
        self._error: str | None = None
        self._since = 0.0  # monotonic: since when lines wait for the disk

    def append(self, obj: Mapping[str, Any]) -> None:
        """Have a line written: within WAIT_S, or later where the disk is behind already.

        A disk that keeps up is waited for, so that a kill right after this loses no line.
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
        """Wait until every line is written; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(self._settled, timeout_s)

    @property
    def waiting(self) -> int:
        """How many lines are not durable yet."""
        with self._changed:
            return len(self._lines) + len(self._unsynced)

    def pending(self) -> list[dict[str, Any]]:
        """The objects of the lines that are not durable yet; the disk is not waited for."""
        with self._changed:
            lines = [*self._unsynced, *self._lines]
        return [json.loads(line) for line in lines]

    def trouble(self, patience_s: float) -> str | None:
        """What keeps lines from the disk: its error, or that it has hung for so long."""
        waited_s = time.monotonic() - self._since
        if self._error is None and not self._settled() and waited_s > patience_s:
            return f"{self.path} has taken nothing for {waited_s:.0f} s"
        return self._error

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the lines that wait, if the disk takes them in time."""
        settled = self.settle(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if settled and self._thread is not None:
            self._thread.join(timeout_s)

    def _settled(self) -> bool:
        return not self._lines and len(self._unsynced) < self.sync_every

    # -- what may hang: it runs in the file's own thread, or in the caller of `sync`

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
                self._close()  # the next try opens anew: a stale handle never recovers
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
            # Who may write here may not have us write elsewhere, by a link in the file's place.
            self._fd = os.open(self.path, flags | os.O_NOFOLLOW, 0o644)
            if os.fstat(self._fd).st_size == 0:
                fsync(self.path.parent)
            self._opened = True
        return self._fd

    def _end_torn_line(self, fd: int) -> None:
        """Where a writer has died, or the disk was full, within a line; once after the opening."""
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
    """Hold the file's lock, so that of several machines one at a time appends.

    A network file system has no atomic append: each machine writes where it believes the end to be,
    and one line could take the place of another. Who holds the lock for long is stopped, or cut off
    from the run: it is not waited for. Nor is a file system that has no locks.
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
