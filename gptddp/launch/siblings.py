"""The launchers of a pod with several workers: one process each, forked off the pod's first.

torchrun ends all workers of an agent when one of them dies. Here a death costs one member only: so
each worker has a separate agent, and a member of the mesh is always one worker.
"""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptddp.distributed.process import PR_SET_PDEATHSIG, exit_now
from gptddp.distributed.watchdog import STOPS

_POLL_S = 0.1
_TRIES = 100
_PORTS = range(10_000, 20_000)  # below the ephemeral ports of any system
_once: int | None = None  # a pipe shared by all launchers of the pod, with one byte


def run(count: int, begin: Callable[[int], int]) -> int:
    """Call `begin(local rank)` in a process each; return the first exit code that is not 0, or 0.

    The first failure ends the others: then this pod's container must start again, or the job is
    over. A signal to this process is passed on to them. Call it with STOPS blocked, so that no
    signal is lost; `begin` unblocks them.
    """
    global _once
    _once, writer = os.pipe()
    os.write(writer, b"1")
    os.close(writer)
    alive = os.environ.get("GPTDDP_ALIVE", "")
    pids = {_fork(begin, local_rank, alive): local_rank for local_rank in range(count)}

    def pass_on(number: int, frame: Any = None) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    first = 0
    while pids:
        time.sleep(_POLL_S)
        _say_alive(alive, count)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pids.pop(pid, None) is None:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = code if code > 0 else 128 - code
            pass_on(signal.SIGTERM)
    return first


def is_first() -> bool:
    """Is this the first process of the pod that asks? It logs messages common to all of them."""
    return _once is None or bool(os.read(_once, 1))


def _fork(begin: Callable[[int], int], local_rank: int, alive: str) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent was killed before the line above
        exit_now(1)
    os.setpgid(0, 0)  # a terminal's Ctrl-C comes once, from the parent
    if alive:
        os.environ["GPTDDP_ALIVE"] = f"{alive}.{local_rank}"
    exit_now(begin(local_rank))


def _say_alive(alive: str, count: int) -> None:
    """Give the file of the liveness probe the oldest time of the siblings' own."""
    with contextlib.suppress(OSError):  # a sibling has not begun its loop
        times = [Path(f"{alive}.{i}").stat().st_mtime for i in range(count if alive else 0)]
        if times:
            Path(alive).touch()
            os.utime(alive, times=(min(times),) * 2)


def free_ports(count: int) -> int:
    """The first of `count` consecutive ports of 127.0.0.1 that no process uses now.

    The ports are below those that the kernel gives to outgoing connections: a connection of any
    process may take such a port before a launcher listens on it. Raises OSError.
    """
    for _ in range(_TRIES):
        first = secrets.choice(_PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise OSError(f"no {count} consecutive ports of 127.0.0.1 are free")
