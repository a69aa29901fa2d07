"""One job at a time has a run: `lease.json` in the run directory, which its holder keeps touching.

It names the job and the process that holds the run for it. A later life of the same job takes it
over at once; so does any process that sees that the holder is dead, which one of the same machine
and process namespace can. Any other job polls the file: while its time of change moves, the run is
refused; when it has stood still for EXPIRY_S, by the poller's own clock, it is taken over. No clock
is compared with another machine's, no lock of the file system is used, and touching needs no space
on a full disk: it works on NFS.

A holder that was only silent may come back, so a holder reads the lease again before each commit.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from gptddp.errors import ConfigError, Superseded, visible
from gptddp.files import write_all
from gptddp.run.directory import LEASE

PERIOD_S = 2.0  # between two touches by the holder
EXPIRY_S = 12.0  # without a touch, after which a lease is taken over; a slow volume delays some
_POLL_S = 0.25
_RENEWALS = 2  # seen by a poller that prove a living holder: one may be the last, seen late

log = logging.getLogger(__name__)

_Reading = tuple[bytes, int]  # content, time of change in ns


class Lease:
    """The holder's end, made by `acquire`: touches the file until it is released or lost."""

    def __init__(self, path: Path, me: dict[str, Any], expired: bytes = b"") -> None:
        self.path, self.me = path, me
        self.expired = expired  # the lease that a full disk has kept us from replacing
        self.lost = ""  # why the run is another's
        self._over = threading.Event()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise Superseded where the run is another's now; OSError where that cannot be told."""
        if not self.lost:
            seen = _read(self.path)
            if seen and seen[0] == self.expired and _remove_if_unchanged(self.path, seen):
                seen = None
            if seen is None:  # or removed by hand
                _create(self.path, self.me)
                seen = _read(self.path)
            other = _parse(seen[0]) if seen else None
            if other and other["holder"] != self.me["holder"]:
                self.lost = f"{_describe(other)} has taken over the run: this life of it is over"
        if self.lost:
            raise Superseded(self.lost)

    def release(self) -> None:
        """Remove the lease: nothing will be committed any more."""
        self.close()
        with contextlib.suppress(OSError, Superseded):
            self.check()
            os.unlink(self.path)

    def close(self) -> None:
        """Touch it no more; a later life of this job takes it over at once."""
        self._over.set()

    def _renew(self) -> None:
        warned = False
        while not self._over.wait(PERIOD_S):
            try:
                self.check()
                os.utime(self.path)
                warned = False
            except Superseded:
                return  # the training loop reports it
            except OSError as error:
                if not warned:  # once for each outage
                    log.warning("%s cannot be renewed (%s)", self.path, error.strerror)
                warned = True


def acquire(run: Path, job: str | None, known: bool = False) -> Lease:
    """Rank 0 only: take the run's lease, at once or after EXPIRY_S.

    `job`: the name of the job, the same in all its processes; None: the job is this process.
    A run that is `known` goes on when the disk is full or read-only: its lease is written when the
    disk works again, and before that nothing is committed. Raises ConfigError where another job has
    the run, OSError where the directory is unusable.
    """
    me = _own_lease(job)
    path = run / LEASE
    while True:
        seen = _wait_until_free(path, me)
        try:
            if (seen is None or _remove_if_unchanged(path, seen)) and _create(path, me):
                for rest in run.glob(f".{LEASE}.*"):  # of a process killed within a removal
                    rest.unlink(missing_ok=True)
                _create(path, me)  # again, if another's removal had just moved ours by mistake
                lease = _parse((_read(path) or (b"", 0))[0])
                if lease and lease["holder"] == me["holder"]:
                    return Lease(path, me)
        except OSError as error:
            if not known or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            return Lease(path, me, seen[0] if seen else b"")


def _wait_until_free(path: Path, me: dict[str, Any]) -> _Reading | None:
    """Wait until the lease may be taken; what was read then, None where there is none."""
    seen, renewals, end = _read(path), 0, 0.0
    while seen is not None:
        lease = _parse(seen[0])
        if lease and (lease["owner"] == me["owner"] or _is_dead(lease, me)):
            break
        now = time.monotonic()
        if not end:
            end = now + EXPIRY_S
            what = _describe(lease) if lease else f"{path}, which is damaged,"
            text = "run %s: waiting %.0f s to see whether %s is still there"
            log.warning(text, path.parent, EXPIRY_S, what)
        if now > end:
            log.warning("run %s: taken over, its lease has not been renewed", path.parent)
            break
        time.sleep(_POLL_S)
        before, seen = seen, _read(path)
        if seen is not None and seen != before:
            renewals, end = renewals + 1, time.monotonic() + EXPIRY_S
            if renewals == _RENEWALS:
                holder = _describe(_parse(seen[0]))
                raise ConfigError(
                    f"run {path.parent} is in use by {holder}, which renewed {LEASE} a moment ago: "
                    "stop that job first, or give another --run-dir"
                )
    return seen


def _read(path: Path) -> _Reading | None:
    """The file's content and time of change; None where there is none. Raises OSError."""
    try:
        with path.open("rb") as file:  # opened anew each time: so NFS asks its server
            return file.read(4096), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _parse(text: bytes) -> dict[str, Any] | None:
    """What a lease says; None where it is torn or foreign."""
    with contextlib.suppress(ValueError, AttributeError):
        lease: dict[str, Any] = json.loads(text)
        if {"owner", "holder", "host", "space", "pid", "started"} <= lease.keys():
            return lease
    return None


def _create(path: Path, me: dict[str, Any]) -> bool:
    """Write the lease where there is none: of several, one succeeds. Raises OSError."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        write_all(fd, json.dumps(me).encode() + b"\n")
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return True


def _remove_if_unchanged(path: Path, seen: _Reading) -> bool:
    """Remove the lease that was seen, and no other: of several processes, one succeeds."""
    aside = path.with_name(f".{LEASE}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
        now = _read(aside)
        same = now is None or now[0] == seen[0]
        if not same:  # another process was faster, and has the run
            os.link(aside, path)
        os.unlink(aside)
        return same
    except (FileNotFoundError, FileExistsError):
        return False


# -- processes -----------------------------------------------------------------------------------


def _own_lease(job: str | None) -> dict[str, Any]:
    """The lease of this process. `space`: where its pid means this process, and nowhere else."""
    host, pid, space = socket.gethostname(), os.getpid(), uuid.uuid4().hex
    with contextlib.suppress(OSError):  # not Linux: no other process can be seen to be dead
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{host} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    started = _start_ticks(pid)
    return {
        "owner": job or f"process {pid} {started} {space}",
        "holder": uuid.uuid4().hex,
        "job": job,
        "host": host,
        "space": space,
        "pid": pid,
        "started": started,
    }


def _is_dead(lease: dict[str, Any], me: dict[str, Any]) -> bool:
    """Is the holder seen to be gone? Its pid may have been given to another process since."""
    if lease["space"] != me["space"]:
        return False
    try:
        os.kill(lease["pid"], 0)
    except (PermissionError, TypeError, OverflowError):  # another user's, who may hide it in /proc
        return False
    except ProcessLookupError:
        return True
    return bool(_start_ticks(lease["pid"]) != lease["started"])


def _start_ticks(pid: int) -> int | None:
    """When the process began, in ticks since boot; None for a zombie or no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except OSError:
        return None


def _describe(lease: dict[str, Any] | None) -> str:
    """The holder as a message names it."""
    if lease is None:
        return "another job"
    job = f"job {visible(lease['job'])}" if lease.get("job") else "a training"
    return f"{job} on host {visible(lease['host'])} (process {visible(lease['pid'])})"
