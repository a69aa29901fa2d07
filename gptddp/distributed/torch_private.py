"""What this package uses of torch beyond its API, and a check that it is there.

No other module touches a private name of torch or of multiprocessing. torch is imported inside the
functions, because the launcher imports this module before it needs torch.
"""

import pkgutil
import platform
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

from gptddp.errors import ConfigError

VERIFIED = "2.15"  # the version of torch in which the names were read, and all tests have passed
PYTHONS = "3.11 to 3.14"  # those of Python in which its own were read
# The texts of gloo and NCCL by which a failed collective tells a lost peer from a mistake of ours.
# No name to look for at the start: a test loses a peer of the installed gloo. NCCL has no test:
# torch 2.15 raises some of its errors as a plain RuntimeError, and all have its name in their text.
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
    """Raise ConfigError, with the version to install, where a name is missing.

    torch may rename them in any release. A launcher that found out in the middle of a recovery
    would take it for a fault of the job, and a trainer for a fault of the life: both try again.
    """
    import torch

    for name in NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found = f"torch {torch.__version__}"
            fix = f"install torch {VERIFIED}, the version in which it was read"
            if not name.startswith("torch"):
                found = f"Python {platform.python_version()}"
                fix = f"use one of Python {PYTHONS}, the versions in which it was read"
            raise ConfigError(f"{found} has no {name}, which gptddp needs: {fix}") from None


# -- the process group, the processor and its kernels ---------------------------------------------


def default_store() -> Any:
    """The key-value store of the process group, which rank 0 hosts: torch hands out no other."""
    import torch.distributed as td

    return td.distributed_c10d._get_default_store()


def group_handle() -> str:
    """By what the others know this process in the next `reconfigure`: another after each of them.

    gloo looks at the process's own alone, and wants the others' to differ: an old one will do.
    """
    import torch.distributed as td

    return td.distributed_c10d._get_reconfigure_handle()


def reconfigure(number: int, handles: list[str], limit: timedelta) -> None:
    """Give the default group these members, by rank; `number`: the same for all, and a new one."""
    import torch.distributed as td

    td.distributed_c10d._reconfigure(number, handles, timeout=limit).wait()


def cpu_has_amx() -> bool:
    """Does this CPU multiply tiles of matrices in hardware? No API tells."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


def softmax_backward(grad: Any, weights: Any) -> Any:
    """The gradient of the scores whose softmax over the last dimension `weights` is.

    One pass in fp32 within, which no product of public functions is: autograd calls it so too.
    """
    import torch

    return torch._softmax_backward_data(grad, weights, -1, grad.dtype)


# -- multiprocessing's forkserver ------------------------------------------------------------------


def forkserver_has_key() -> bool:
    """Does the forkserver ask for a key that only its own start can give it? Python >= 3.14."""
    return hasattr(_server(), "_forkserver_authkey")


def set_forkserver(address: str, alive_fd: int, pid: int) -> None:
    """Have multiprocessing use a forkserver that runs already, and start none of its own.

    `address`: its Unix socket; `alive_fd`: the write end of the pipe that it lives with.
    """
    server = _server()
    server._forkserver_address = address
    server._forkserver_alive_fd = alive_fd
    server._forkserver_pid = pid


def take_forkserver_alive_fd() -> int | None:
    """This process's write end of that pipe, for the caller to close; None where it has none."""
    server = _server()
    fd: int | None = server._forkserver_alive_fd
    server._forkserver_alive_fd = None
    return fd


def _server() -> Any:
    return forkserver._forkserver
