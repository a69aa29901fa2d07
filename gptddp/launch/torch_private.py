"""The names that the launcher uses of torch's own, beyond its API, and a check that they are there.

torch may rename them in any release. A launcher that found out in the middle of a recovery would
look like a fault of the job, so it looks before it starts.
"""

import importlib
from typing import Any

import torch

from gptddp.errors import ConfigError

VERIFIED = "2.13"  # the version of torch that all tests have passed with
_ELASTIC = "torch.distributed.elastic."
NAMES = {
    _ELASTIC + "rendezvous.dynamic_rendezvous": [
        *("_Action", "_NodeDesc", "_delay", "datetime"),
        *(f"_BackendRendezvousStateHolder.{name}" for name in (
            "_sanitize", "_settings", "_state", "mark_dirty",
        )),
        *(f"DynamicRendezvousHandler.{name}" for name in (
            "_get_deadline", "_op_executor", "_settings", "_state_holder", "_stop_heartbeats",
        )),
    ],
    _ELASTIC + "agent.server.api": ["SimpleElasticAgent._shutdown_timeout"],
    _ELASTIC + "agent.server.local_elastic_agent": [
        *("LocalElasticAgent._shutdown", "LocalElasticAgent._pcontext"),
        "LocalElasticAgent._monitor_workers",
    ],
    "torch.distributed.launcher.api": ["LocalElasticAgent"],
    "torch.distributed.elastic.multiprocessing.api": ["MultiprocessContext._pc"],
    "torch.multiprocessing.spawn": ["ProcessContext._join_procs_with_timeout"],
}  # fmt: skip


def check_torch() -> None:
    """Raise ConfigError, with the version to install, where torch lacks one of the names."""
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
