"""The forkserver: a process that has imported everything and forks the workers.

A restarted worker is then a fork (tens of milliseconds) and not an import (seconds). torchrun uses
multiprocessing's server with `--start-method forkserver`; only its start is replaced here.
multiprocessing starts it as a new interpreter, which imports torch once more. But the launcher
needs torch too: so the server is forked off the launcher right after that import, and imports the
rest itself.

torchrun makes a queue and an event for each worker. With a forkserver their seven semaphores have
names in /dev/shm, and stay there if the whole pod is killed. So torchrun is given pipes instead.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from gptddp.distributed import torch_private
from gptddp.distributed.process import exit_now
from gptddp.launch.mesh import ENDED

# DDP() and every optimizer import torch._dynamo, which takes almost as long as torch. A module
# that cannot be imported is skipped here, and fails with a message in the worker.
PRELOAD = ["torch.distributed.run", "torch.nn.parallel", "torch._dynamo", "gptddp.train"]


def start_server(folder: Path) -> None:
    """Fork the server off this process; `folder`: for its socket, private to the user.

    This process has imported torch, and has not used CUDA. The server has none of its other
    threads, and closes their open files. If the server dies, multiprocessing starts another in the
    usual way.
    """
    multiprocessing.set_forkserver_preload(PRELOAD)
    context: Any = multiprocessing.get_context("forkserver")
    context.SimpleQueue, context.Event = Pipe, Pipe
    if torch_private.forkserver_has_key():  # then only multiprocessing can start it
        forkserver.ensure_running()
        return
    resource_tracker.ensure_running()  # before the fork: the workers share the launcher's
    with socket.socket(socket.AF_UNIX) as listener:
        address = str(folder / "fork")  # short: the path of a Unix socket has 107 bytes at most
        listener.bind(address)
        listener.listen()
        alive_r, alive_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            _note_ends(folder / ENDED)
            _serve(listener.detach(), alive_r)
        os.close(alive_r)
    torch_private.set_forkserver(address, alive_w, pid)


class Pipe:
    """The parts of a queue and of an event that torchrun uses: each passes one value, one way."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)

    def put(self, value: object) -> None:
        self._writer.send(value)

    def get(self) -> Any:
        return self._reader.recv()

    def empty(self) -> bool:
        return not self._reader.poll()

    def set(self) -> None:
        self._writer.send(None)

    def wait(self) -> None:
        self._reader.recv()


def _close_all_but(kept: set[int]) -> None:
    """Close the launcher's connections: held by a worker they would outlive the launcher."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(int(name))


def _outlive_signals() -> None:
    """Ignore signals: only the launcher's end ends the server, or its workers would die unsaved.

    Slurm signals all processes of a task, a terminal all processes of its group. In a worker
    without a handler such a signal has its default effect.
    """
    server = os.getpid()

    def pass_over(number: int, frame: object) -> None:
        if os.getpid() != server:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_over)  # neither the launcher's handlers, nor for the workers


def _note_ends(path: Path) -> None:
    """Write the end of the last worker to a file before it is reaped, and leaves /proc."""
    server, wait = os.getpid(), os.waitpid

    def reap(pid: int, options: int) -> tuple[int, int]:
        if os.getpid() != server:  # a worker has this function too
            return wait(pid, options)
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return 0, 0
        status = found.si_status << 8 * (found.si_code == os.CLD_EXITED)
        with contextlib.suppress(OSError):
            path.write_text(f"{found.si_pid} {status}")
        return wait(found.si_pid, 0)

    os.waitpid = reap


def _serve(listener_fd: int, alive_r: int) -> None:
    """Fork workers until the launcher ends; never returns."""
    _outlive_signals()
    _close_all_but({0, 1, 2, listener_fd, alive_r, resource_tracker.getfd() or 0})
    try:
        forkserver.main(listener_fd, alive_r, PRELOAD)
    except SystemExit:
        exit_now(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    exit_now(1)
