"""What this package uses of torch beyond its API, read in torch 2.13, and a check that it is there.

No other module touches a private name of torch or of multiprocessing, but for the second half of
this one: `torch_private_elastic.py` has the parts of torchrun, for the launcher alone. torch is
imported inside the functions, because the launcher imports this module before it needs torch.
"""

import importlib
from datetime import timedelta
from multiprocessing import forkserver
from typing import Any

from gptddp.errors import ConfigError

VERIFIED = "2.13"  # the version of torch that all tests have passed with
_ELASTIC = "torch.distributed.elastic"
NAMES = {
    f"{_ELASTIC}.rendezvous.dynamic_rendezvous": [
        "_Action",
        "_NodeDesc",
        "_delay",
        "datetime",
        "_BackendRendezvousStateHolder._sanitize",
        "_BackendRendezvousStateHolder._settings",
        "_BackendRendezvousStateHolder.mark_dirty",
        "_BackendRendezvousStateHolder.state",
        "DynamicRendezvousHandler._get_deadline",
        "DynamicRendezvousHandler._op_executor",
        "DynamicRendezvousHandler._settings",
        "DynamicRendezvousHandler._state_holder",
        "DynamicRendezvousHandler._stop_heartbeats",
    ],
    f"{_ELASTIC}.agent.server.api": ["SimpleElasticAgent._shutdown_timeout"],
    f"{_ELASTIC}.agent.server.local_elastic_agent": [
        "LocalElasticAgent._monitor_workers",
        "LocalElasticAgent._pcontext",
        "LocalElasticAgent._shutdown",
    ],
    f"{_ELASTIC}.multiprocessing.api": ["MultiprocessContext._pc"],
    "torch.distributed.launcher.api": ["LocalElasticAgent"],
    "torch.multiprocessing.spawn": ["ProcessContext._join_procs_with_timeout"],
    "torch.distributed.distributed_c10d": ["_get_default_store", "_set_pg_timeout"],
    "torch.cpu": ["_is_amx_tile_supported", "_is_avx512_bf16_supported"],
}


def check_torch() -> None:
    """Raise ConfigError, with the version to install, where torch lacks one of the names.

    torch may rename them in any release. A launcher that found out in the middle of a recovery
    would take it for a fault of the job.
    """
    import torch

    for module, names in NAMES.items():
        for name in names:
            if not _has(module, name):
                raise ConfigError(
                    f"torch {torch.__version__} has no {module}.{name}, which the launcher needs: "
                    f"install torch {VERIFIED}, the version that it is tested with"
                )


def _has(module: str, name: str) -> bool:
    """Is there `function`, `Class` or `Class.member`? A member may be one that __init__ sets."""
    try:
        owner: Any = importlib.import_module(module)
        if "." in name:
            owner, name = getattr(owner, name.split(".")[0]), name.split(".")[1]
    except (ImportError, AttributeError):
        return False
    made = getattr(getattr(owner, "__init__", None), "__code__", None)
    return hasattr(owner, name) or (made is not None and name in made.co_names)


# -- the process group and the processor -----------------------------------------------------------


def default_store() -> Any:
    """The key-value store of the process group, which rank 0 hosts: torch hands out no other."""
    import torch.distributed as td

    return td.distributed_c10d._get_default_store()


def set_collective_timeout(timeout: timedelta) -> None:
    """How long a collective waits from now on: the API takes it only when the group is made."""
    import torch.distributed as td

    td.distributed_c10d._set_pg_timeout(timeout, td.group.WORLD)


def cpu_has_fast_bf16() -> bool:
    """Does this CPU multiply bf16 matrices in hardware (AMX or AVX512-BF16)? No API tells."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


# -- multiprocessing's forkserver, read in Python 3.11 to 3.14 -------------------------------------

_FORKSERVER: Any = forkserver._forkserver


def forkserver_has_key() -> bool:
    """Does the forkserver ask for a key that only its own start can give it? Python >= 3.14."""
    return hasattr(_FORKSERVER, "_forkserver_authkey")


def set_forkserver(address: str, alive_fd: int, pid: int) -> None:
    """Have multiprocessing use a forkserver that runs already, and start none of its own.

    `address`: its Unix socket; `alive_fd`: the write end of the pipe that it lives with.
    """
    _FORKSERVER._forkserver_address = address
    _FORKSERVER._forkserver_alive_fd = alive_fd
    _FORKSERVER._forkserver_pid = pid


def take_forkserver_alive_fd() -> int | None:
    """This process's write end of that pipe, for the caller to close; None where it has none."""
    fd: int | None = _FORKSERVER._forkserver_alive_fd
    _FORKSERVER._forkserver_alive_fd = None
    return fd
