"""The facts of this process in the environment variables of torchrun, Slurm and the manifest."""

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from gptddp import errors

# Set by gptddp's launcher:
CODE = "GPTDDP_CODE"  # the hash of own code laid over the image's package
LOCAL = "GPTDDP_LOCAL"  # `1/2`: local rank of its worker, and number of workers in the pod
STARTS = "starts"  # a file beside the verdict: one byte for each start of the worker
RESOLV_CONF = Path("/etc/resolv.conf")


def is_launched() -> bool:
    """Did torchrun or Slurm start this process?"""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


class Ranks(NamedTuple):
    """The place of this process in the job, and in its pod."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int


def ranks() -> Ranks:
    """From torchrun, Slurm, or for a single process. Raises ConfigError for a broken set.

    `srun` sets no RANK, so its own variables are mapped; MASTER_ADDR and MASTER_PORT must then be
    exported by the job script.
    """
    env = os.environ
    if "RANK" in env:
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    elif is_slurm_rank():
        keys = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "")
    else:
        return Ranks(0, 0, 1, 1)
    try:
        rank, local_rank, world_size = (int(env[key]) for key in keys[:3])
        local = int(env.get(keys[3], "1")) if keys[3] else _slurm_tasks_here(local_rank)
        return Ranks(rank, local_rank, world_size, local)
    except (KeyError, ValueError) as error:
        raise errors.ConfigError(
            f"the environment has {keys[0]} but no usable {error}: start through torchrun or srun"
        ) from None


def is_slurm_rank() -> bool:
    """Is this process a task of `srun`, and thereby a rank?"""
    env = os.environ
    return "SLURM_PROCID" in env and "MASTER_ADDR" in env and "RANK" not in env


def _slurm_tasks_here(local_rank: int) -> int:
    """The tasks on this node: of the step, by its list with a number for each node, or of the job.

    SLURM_NTASKS_PER_NODE exists only with --ntasks-per-node.
    """
    env = os.environ
    for key in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        counts: list[int] = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get(key, "")):  # 4(x2),3
            counts += [int(count)] * int(times or 1)
        node = int(env.get("SLURM_NODEID", "0")) if len(counts) > 1 else 0
        if node < len(counts):
            return max(counts[node], local_rank + 1)
    return local_rank + 1


def cpu_sharers(local_world_size: int) -> int:
    """The number of ranks on this rank's CPUs: all of the node, unless Slurm binds tasks."""
    masks = os.environ.get("SLURM_CPU_BIND_LIST", "").split(",") if is_slurm_rank() else [""]
    return max(1, local_world_size // len(set(masks)))


def has_own_gpus() -> bool:
    """Does Slurm give this task GPUs that no other task sees? Then their numbers begin at 0.

    It does with --gpus-per-task, --ntasks-per-gpu=1 and some bindings, unless --gpu-bind=none.
    """
    env = os.environ
    return is_slurm_rank() and (
        "SLURM_GPUS_PER_TASK" in env
        or env.get("SLURM_NTASKS_PER_GPU") == "1"
        or "gpu" in env.get("SLURM_TRES_PER_TASK", "")
        or re.search(r"per_task|single:1\b|map_gpu", env.get("SLURM_GPU_BIND", "")) is not None
    )


def job() -> str | None:
    """The name of the job, equal in all its pods and lives, for messages and waiting processes.

    Two jobs may have one name, for example of one manifest in two clusters. So it proves nothing. A
    rendezvous id alone is no name: people copy it.
    """
    if step := slurm_step():
        return step
    run_id, endpoint = os.environ.get("TORCHELASTIC_RUN_ID"), os.environ.get("PET_RDZV_ENDPOINT")
    where = f" in namespace {name}" if (name := _namespace()) else ""
    return f"{run_id} at {endpoint}{where}" if run_id and endpoint else None


def slurm_step() -> str | None:
    """The Slurm step whose tasks are the ranks; None also for a shell in a step."""
    env = os.environ
    if not is_slurm_rank():
        return None
    cluster = f"{name}." if (name := env.get("SLURM_CLUSTER_NAME")) else ""
    return f"slurm-{cluster}{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"


def slurm_life() -> str | None:
    """The id of this life of the step: a requeued job keeps its job and step numbers.

    So a later start is distinct from this one, which a node lost by Slurm may still run.
    """
    step = slurm_step()
    return step and f"{step} start {int(os.environ.get('SLURM_RESTART_COUNT') or 0)}"


def slurm_cpus(local_world_size: int) -> int | None:
    """The CPUs that Slurm gives this rank, by --cpus-per-task; None without that option.

    Without cgroups and binding its processes may run on all CPUs of the node, beside other jobs.
    The workers of a launcher share the CPUs of its task.
    """
    count = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if "SLURM_PROCID" not in os.environ or not count.isdigit():
        return None
    return max(1, int(count) // (1 if is_slurm_rank() else local_world_size))


def _namespace() -> str:
    """The namespace of this pod, by the first search domain of its resolver; or ""."""
    try:
        found = re.search(r"^search\s+([a-z0-9-]+)\.svc\.", RESOLV_CONF.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


def grace_s() -> float | None:
    """GPTDDP_GRACE_S: seconds from SIGTERM to SIGKILL; None if it is not set."""
    text = os.environ.get("GPTDDP_GRACE_S", "")
    return float(text) if text.isdigit() else None


def restarts() -> int:
    """How often this process's launcher, or torchrun's agent, has started it again."""
    if path := verdict():
        with contextlib.suppress(OSError):  # a full disk, or none yet
            return max(0, path.with_name(STARTS).stat().st_size - 1)
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def nodes() -> tuple[int, int] | None:
    """PET_NNODES, MIN:MAX: the fewest pods, and the pods that the job asks for."""
    least, _, most = os.environ.get("PET_NNODES", "").partition(":")
    return (int(least), int(most or least)) if least.isdigit() and (most or "0").isdigit() else None


def verdict() -> Path | None:
    """The file for a worker's final error, read by the launcher; the folder is the pod's own."""
    return Path(os.environ["GPTDDP_VERDICT"]) if os.environ.get("GPTDDP_VERDICT") else None


def code() -> str | None:
    """The hash of the own code that this process runs; None for the installed code."""
    return os.environ.get(CODE) or None


def members() -> Path | None:
    """The Unix socket of the launcher, which knows the other workers; None without a launcher."""
    return Path(os.environ["GPTDDP_MEMBERS"]) if os.environ.get("GPTDDP_MEMBERS") else None


def pod_name() -> str:
    """The name of the pod, or "" outside a pod."""
    return os.environ.get("POD_NAME", "")


def pod() -> str:
    """The name of the pod or machine, for messages."""
    return pod_name() or socket.gethostname()
