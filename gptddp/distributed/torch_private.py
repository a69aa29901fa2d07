"""The private names of torch that this package uses, and a check that they exist.

No other module touches a private name of torch or of multiprocessing. torch is imported inside the
functions, because the launcher imports this module before it needs torch.
"""

import pkgutil
import platform
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

from gptddp.errors import ConfigError

VERIFIED = "2.15"  # the version of torch for which the names and all tests were checked
PYTHONS = "3.11 to 3.14"  # the versions of Python for which its names were checked
# Texts of gloo and NCCL in the errors of a collective that failed for a lost peer. They cannot be
# checked at the start: a test loses a peer of the installed gloo. NCCL has no test: torch 2.15
# raises some of its errors as a plain RuntimeError, and all have its name in their text.
LOST_PEER = ("gloo", "NCCL", "Connection closed by peer", "Application timeout caused pair closure")

NAMES = (
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._get_reconfigure_handle",
    "torch.distributed.distributed_c10d._reconfigure",
    "torch._softmax_backward_data",
    "torch.cpu._is_amx_tile_supported",
    "multiprocessing.forkserver._forkserver._forkserver_address",
    "multiprocessing.forkserver._forkserver._forkserver_alive_fd",
    "multiprocessing.forkserver._forkserver._forkserver_pid",
)


def check_torch() -> None:
    """Raise ConfigError, with the version to install, if a name is missing.

    Any release of torch may rename them. During a recovery, a launcher would count the missing name
    as a fault of the job, and a trainer as a fault of the life, and both would retry.
    """
    import torch

    for name in NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found = f"torch {torch.__version__}"
            fix = f"install torch {VERIFIED}, the version for which it was checked"
            if not name.startswith("torch"):
                found = f"Python {platform.python_version()}"
                fix = f"use one of Python {PYTHONS}, the versions for which it was checked"
            raise ConfigError(f"{found} has no {name}, which gptddp needs: {fix}") from None


# -- the process group, the processor and its kernels ---------------------------------------------


def default_store() -> Any:
    """The key-value store of the process group, hosted by rank 0: torch offers no other."""
    import torch.distributed as td

    return td.distributed_c10d._get_default_store()


def group_handle() -> str:
    """The identity of this process in the next `reconfigure`; it changes after each call.

    gloo checks only the process's own handle, and that the others differ: old ones are accepted.
    """
    import torch.distributed as td

    return td.distributed_c10d._get_reconfigure_handle()


def reconfigure(number: int, handles: list[str], limit: timedelta) -> None:
    """Give the default group these members, by rank; `number`: new, and equal on all members."""
    import torch.distributed as td

    td.distributed_c10d._reconfigure(number, handles, timeout=limit).wait()


def cpu_has_amx() -> bool:
    """Does this CPU multiply tiles of matrices in hardware? No public API has this."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def softmax_backward(grad: Any, weights: Any) -> Any:
    """The gradient of the scores; `weights` is their softmax over the last dimension.

    One pass, in fp32 inside; no product of public functions gives that. autograd calls it, too.
    """
    import torch

    return torch._softmax_backward_data(grad, weights, -1, grad.dtype)


# -- multiprocessing's forkserver ------------------------------------------------------------------


def forkserver_has_key() -> bool:
    """Does the forkserver need a key that only its own start can give? Python >= 3.14."""
    return hasattr(_server(), "_forkserver_authkey")


def set_forkserver(address: str, alive_fd: int, pid: int) -> None:
    """Let multiprocessing use a running forkserver, and start no other.

    `address`: its Unix socket; `alive_fd`: the write end of the pipe whose end ends it.
    """
    server = _server()
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_fd
    server._forkserver_pid = pid


def take_forkserver_alive_fd() -> int | None:
    """This process's write end of that pipe, for the caller to close; None without one."""
    server = _server()
    fd: int | None = server._forkserver_alive_fd
    server._forkserver_alive_fd = None
    return fd


def _server() -> Any:
    return forkserver._forkserver
