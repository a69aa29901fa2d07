"""What torchrun, Slurm and the manifest say of this process, in environment variables."""

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from gptddp import errors

RESOLV_CONF = Path("/etc/resolv.conf")


def is_launched() -> bool:
    """Did torchrun or Slurm start this process, beside others?"""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


class Ranks(NamedTuple):
    """This process among all of the job, and among those of its pod."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def ranks() -> Ranks:
    """Torchrun's, Slurm's, or those of one process alone. Raises ConfigError for a broken set.

    `srun` sets no RANK, so its own variables are mapped; MASTER_ADDR and MASTER_PORT must then be
    exported by the job script.
    """
    env = os.environ
    if "RANK" in env:
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in env and "MASTER_ADDR" in env:
        keys = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    else:
        return Ranks(0, 0, 1, 1)
    try:
        rank, local_rank, world_size = (int(env[key]) for key in keys[:3])
        return Ranks(rank, local_rank, world_size, int(env.get(keys[3], "1")))
    except (KeyError, ValueError) as error:
        raise errors.ConfigError(
            f"the environment has {keys[0]} but no usable {error}: start through torchrun or srun"
        ) from None


def shared_memory() -> Path | None:
    """GPTDDP_MEMORY, which the manifest sets to the pod's /dev/shm: there, what is left has an end.

    On a machine of its own a run that is never taken up again would hold its state for ever.
    """
    return Path(os.environ["GPTDDP_MEMORY"]) if os.environ.get("GPTDDP_MEMORY") else None


def job() -> str | None:
    """The name of the job, the same in all its pods and lives, for messages and for who waits.

    Two jobs may have one name: of one manifest in two clusters, say. So it proves nothing; see
    `lives.py`. A rendezvous id alone is none: people copy it.
    """
    if step := slurm_step():
        return step
    run_id, endpoint = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("PET_RDZV_ENDPOINT")
    where = f" in namespace {name}" if (name := _namespace()) else ""
    return f"{run_id} at {endpoint}{where}" if run_id and endpoint else None


def slurm_step() -> str | None:
    """The Slurm step whose tasks are the ranks: Slurm runs it once. A shell in a step is none."""
    env = os.environ
    if "SLURM_PROCID" not in env or "MASTER_ADDR" not in env or "RANK" in env:
        return None
    cluster = f"{name}." if (name := env.get("SLURM_CLUSTER_NAME")) else ""
    return f"slurm-{cluster}{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"


def _namespace() -> str:
    """The namespace of this pod, by the first domain that its names are looked up in; or ""."""
    try:
        found = re.search(r"^search\s+([a-z0-9-]+)\.svc\.", RESOLV_CONF.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


def grace_s() -> float | None:
    """GPTDDP_GRACE_S: seconds from SIGTERM to SIGKILL; None where nobody has told."""
    text = os.environ.get("GPTDDP_GRACE_S", "")
    return float(text) if text.isdigit() else None


def restarts() -> int:
    """How often this pod's agent has started its workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def verdict() -> Path | None:
    """Where our launcher looks for a final error of its workers; the folder is the pod's own."""
    return Path(os.environ["GPTDDP_VERDICT"]) if os.environ.get("GPTDDP_VERDICT") else None


def pod() -> str:
    """The name of the pod or machine, for messages."""
    return os.environ.get("POD_NAME") or socket.gethostname()
