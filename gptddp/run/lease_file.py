"""Create, read and remove the file of a run's lease, and check whether its holder lives."""

import contextlib
import errno
import json
import os
import socket
import uuid
from pathlib import Path
from typing import Any

from gptddp.errors import visible
from gptddp.files import parse_json, write_all
from gptddp.run.directory import LEASE

Reading = tuple[bytes, int]  # content, time of change in ns


def read(path: Path) -> Reading | None:
    """The file's content and time of change; None without a file. Raises OSError."""
    try:
        with path.open("rb") as file:  # opened each time, so that NFS asks its server
            return file.read(4096), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        if path.is_symlink():  # dangling: no lease can be created, and the wait would be endless
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
        return None


def parse(text: bytes) -> dict[str, Any] | None:
    """The fields of a lease; None if it is torn or invalid."""
    with contextlib.suppress(ValueError, AttributeError):
        lease: dict[str, Any] = parse_json(text)
        known = {"owner", "holder", "host", "space", "pid", "started"} <= lease.keys()
        return lease if known and isinstance(lease["owner"], str) else None
    return None


def create(path: Path, me: dict[str, Any]) -> bool:
    """Write the lease if there is none: one of several processes succeeds. Raises OSError."""
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


def remove_if_unchanged(path: Path, seen: Reading) -> bool:
    """Remove the lease only if it is still `seen`: one of several processes succeeds."""
    aside = path.with_name(f".{LEASE}.{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
        now = read(aside)
        same = now is None or now[0] == seen[0]
        if not same:  # another process was faster, and holds the run
            os.link(aside, path)
        os.unlink(aside)
        return same
    except (FileNotFoundError, FileExistsError):
        return False


def lease_of(job: str | None, life: str) -> dict[str, Any]:
    """The lease of this process. `space`: the machine and pid namespace in which its pid counts."""
    host, pid, space = socket.gethostname(), os.getpid(), uuid.uuid4().hex
    with contextlib.suppress(OSError):  # not Linux: dead processes cannot be recognized
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{host} {boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return {
        "owner": life,
        "holder": uuid.uuid4().hex,
        "job": job,
        "host": host,
        "space": space,
        "pid": pid,
        "started": start_ticks(pid),
    }


def is_over(lease: dict[str, Any], me: dict[str, Any]) -> bool:
    """Is the holder known to be dead, or this very process? Another process may have its pid."""
    if lease["space"] != me["space"]:
        return False
    if (lease["pid"], lease["started"]) == (me["pid"], me["started"]):  # an earlier life of ours
        return True
    try:
        os.kill(lease["pid"], 0)
    except (PermissionError, TypeError, OverflowError):  # another user's, maybe hidden in /proc
        return False
    except ProcessLookupError:
        return True
    return bool(start_ticks(lease["pid"]) != lease["started"])


def start_ticks(pid: int) -> int | None:
    """The start time of a process, in ticks since boot; None for a zombie or no process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except OSError:
        return None


def describe(lease: dict[str, Any] | None) -> str:
    """The name of the holder in messages."""
    if lease is None:
        return "another job"
    job = f"job {visible(lease['job'])}" if lease.get("job") else "a job without a name"
    return f"{job} on host {visible(lease['host'])} (process {visible(lease['pid'])})"
