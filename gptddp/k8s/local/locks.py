"""Locks of a running local job: its folder, its loopback addresses and its port.

The kernel frees them with the last process that holds them, however that process ends.
"""

import contextlib
import os
import socket
import time
import zlib
from pathlib import Path
from typing import Any

from gptddp import files
from gptddp.errors import ConfigError
from gptddp.k8s.local.container import Network
from gptddp.k8s.objects import seconds

MAX_PODS = 150  # 127.A.B.100 upwards
_SLOTS = 4096
_FIRST_PORT = 23456  # the rendezvous of slot n listens on this + n: below the ephemeral ports


def lock(folder: Path, timeout_s: float = 15.0) -> int | None:
    """Lock a job's folder, creating it if needed; returns a file descriptor, or None if locked.

    After a runner was killed, its reaper still holds the lock for a moment: this waits for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + timeout_s
    while True:
        try:
            fd = files.lock(folder / "lock")
            break
        except BlockingIOError:
            if alive(holder(folder)) or time.monotonic() > end:
                return None
            time.sleep(0.05)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def is_running(folder: Path) -> bool:
    """Does the job have a runner, or are its pods still ending?"""
    return files.is_locked(folder / "lock")


def holder(folder: Path) -> int | None:
    """The process id of the runner that has, or last had, a job's lock."""
    try:
        return int((folder / "lock").read_text())
    except (OSError, ValueError):
        return None


def status(folder: Path) -> dict[str, Any]:
    """The content of a job's `status.json`; {} if it cannot be read, or has another form."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        found: Any = files.read_json(folder / "status.json")
        for it in [found, *found["pods"].values()]:
            seconds(it["startTime"])
        for it in found["conditions"]:
            _ = it["type"], it["status"], seconds(it["lastTransitionTime"])
        return {**found}
    return {}


def alive(pid: int | None) -> bool:
    """Does a process of this id exist that is no zombie?"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def network(key: str) -> tuple[Network, socket.socket]:
    """Addresses 127.A.B.* and a port that no other running job has, and the socket that holds them.

    A slot is taken by binding its address 127.A.B.1. The search begins at a slot derived from the
    key, so that a job usually gets the same addresses.
    """
    first = zlib.crc32(key.encode())
    for offset in range(_SLOTS):
        slot = (first + offset) % _SLOTS
        prefix = f"127.{64 + slot // 256}.{slot % 256}"
        held = socket.socket()
        try:
            held.bind((f"{prefix}.1", _FIRST_PORT - 1))
            with socket.socket() as probe:  # torch's store listens on every address
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", _FIRST_PORT + slot))
            return Network(prefix, _FIRST_PORT + slot), held
        except OSError:
            held.close()
    raise ConfigError(
        "no loopback address of 127.64.0.0/12 is free, and a local job needs one for each pod: "
        "see whether `ip address show lo` has 127.0.0.1/8"
    )
