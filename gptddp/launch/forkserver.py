"""The warm server: a process that has imported everything and forks the workers.

A restarted worker is then a fork (tens of milliseconds) and not an import (seconds). The server is
multiprocessing's own forkserver, which torchrun uses with `--start-method forkserver`; only its
start is ours. multiprocessing starts it as a new interpreter, which imports torch once more. But
the launcher needs torch too: so the server is forked off the launcher right behind that import,
and imports the rest while the launcher joins the rendezvous.
"""

import multiprocessing
import os
import signal
import socket
import sys
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from gptddp.distributed.process import leave

# DDP() and every optimizer import torch._dynamo, which takes almost as long as torch. A module
# that cannot be imported is passed over here, and fails with a message in the worker.
PRELOAD = ["torch.distributed.run", "torch.nn.parallel", "torch._dynamo", "gptddp.train"]


def start_server(folder: Path) -> None:
    """Fork the server off this process; `folder` is for its socket, and must be the user's alone.

    This process has imported torch, runs one thread and has not touched CUDA. Should the server
    die, multiprocessing starts another, in its own way.
    """
    server: Any = forkserver._forkserver
    multiprocessing.set_forkserver_preload(PRELOAD)
    if hasattr(server, "_forkserver_authkey"):  # Python >= 3.14: its server wants to be asked
        server.ensure_running()
        return
    quiet = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"]  # that it cleaned up
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, quiet))
    resource_tracker.ensure_running()  # before the fork: the workers share the launcher's
    with socket.socket(socket.AF_UNIX) as listener:
        address = str(folder / "warm")
        listener.bind(address)
        listener.listen()
        alive_r, alive_w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(alive_w)
            _serve(listener.detach(), alive_r)
        os.close(alive_r)
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_w
    server._forkserver_pid = pid


def _serve(listener_fd: int, alive_r: int) -> None:
    """Fork workers until the launcher is gone; never returns."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # the launcher's handlers are not the workers'
    try:
        forkserver.main(listener_fd, alive_r, PRELOAD)
    except SystemExit:
        leave(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    leave(1)
