"""Shared by all scripts: ranks, the process group, and operations over all ranks.

One process, several under torchrun, several nodes and Slurm's tasks differ in a few environment
variables. Only this module reads them.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

TIMEOUT = timedelta(minutes=5)  # a collective that waits longer is an error on each rank
_left: list[Any] = []  # keeps the process group; see `run`
log = logging.getLogger("examples")


@dataclass(frozen=True)
class World:
    """This process and the number of all processes of the job."""

    rank: int  # 0 to world_size - 1, over all nodes
    local_rank: int  # among the processes of this node
    world_size: int  # number of processes, not of GPUs or nodes
    device: torch.device


def ranks(env: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, world size) from torchrun, from srun, or for a single process.

    srun sets no RANK. Its own variables count if the job script has exported MASTER_ADDR, so that a
    command in an interactive Slurm shell is still one process. Several tasks without it would be
    separate jobs that write the same files.
    """
    if "RANK" in env:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    elif "SLURM_PROCID" in env and "MASTER_ADDR" in env:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
    elif int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        raise SystemExit(
            f"{env['SLURM_STEP_NUM_TASKS']} tasks of srun, but no MASTER_ADDR: export it and "
            "MASTER_PORT in the job script, as examples/digits.sbatch does"
        )
    else:
        return 0, 0, 1
    if missing := [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in env]:
        raise SystemExit(f"{names[0]} is set but {', '.join(missing)} is not: use torchrun")
    rank, local_rank, world_size = (int(env[name]) for name in names)
    return rank, local_rank, world_size


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The GPU of this process, or the CPU. Raises SystemExit if there are too few GPUs."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}: "
            "start one process per GPU (torchrun --nproc-per-node gpu), or use --device cpu. On "
            "Slurm each task must see all GPUs of its node: use --gres, not --gpus-per-task"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def connected(wanted: str = "auto") -> Iterator[World]:
    """All ranks: join the process group, and leave it at the end, also after an error."""
    rank, local_rank, world_size = ranks(os.environ)
    # Only rank 0 logs progress. Warnings and errors come from any rank, with its number.
    level = logging.INFO if rank == 0 else logging.WARNING
    name = f"[rank {rank}] " if world_size > 1 else ""
    logging.basicConfig(level=level, format=f"{name}%(message)s", force=True)
    device = pick_device(wanted, local_rank)
    where: dict[str, Any] = {}  # default: env://, with the variables of torchrun
    if device.type == "cuda":
        # Before the group: otherwise the first collective of every rank would open GPU 0.
        torch.cuda.set_device(device)
        where["device_id"] = device
    if world_size == 1:
        where["store"] = dist.HashStore()  # in this process, without a port
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT, **where)
    try:
        log.info("%d process%s, %s on %s", world_size, "es" * (world_size > 1), backend, device)
        yield World(rank, local_rank, world_size, device)
    finally:
        _left.append(dist.group.WORLD)  # see `run`
        dist.destroy_process_group()


def run(main: Callable[[], None]) -> NoReturn:
    """Run `main`, then end this process with its exit code, without destructors.

    The destructor of gloo's group joins gloo's threads while it holds the GIL (torch 2.15). If a
    thread needs the GIL to drop the tensor of the last collective, neither ends: on a busy machine
    this happens every other time. So the group is kept until the process ends.
    """
    code: Any = 0
    try:
        record(main)()  # under torchrun, the error of the rank that failed first is shown
    except SystemExit as end:  # a user's mistake: its message, or argparse's exit code
        code = end.code
        if isinstance(code, str):
            logging.error(code)
            code = 1
    except KeyboardInterrupt:
        logging.error("stopped; the same command continues from the newest snapshot")
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def agree(given: Mapping[str, Any], world: World) -> None:
    """All ranks: raise SystemExit, on all ranks, if their flags differ.

    Each node has its own command line. With fewer epochs or larger batches on one node, its ranks
    would end early, and the others would wait for them until the timeout.
    """
    all_given: list[Any] = [None] * world.world_size
    dist.all_gather_object(all_given, dict(given))  # all ranks
    for rank, other in enumerate(all_given):
        for name, value in all_given[0].items():
            if other[name] != value:
                raise SystemExit(
                    f"--{name.replace('_', '-')} is {value!r} for rank 0, but {other[name]!r} for "
                    f"rank {rank}: give all nodes the same value"
                )


def sync_batch_norm(model: nn.Module, world: World, batch_size: int) -> nn.Module:
    """Make BatchNorm use the samples of all ranks; on CPUs only log that it does not.

    Call it before DDP wraps the model. `SyncBatchNorm` refuses tensors on a CPU.
    """
    kinds = nn.modules.batchnorm._BatchNorm
    if world.world_size == 1 or not any(isinstance(m, kinds) for m in model.modules()):
        return model
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    log.info(
        "BatchNorm: PyTorch's SyncBatchNorm needs GPUs, so each rank normalises by its own %d "
        "samples, not by all %d, and rank 0's running averages are tested and saved. With few "
        "samples per rank, raise --batch-size.",
        batch_size,
        batch_size * world.world_size,
    )
    return model


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """All ranks: copy rank 0's running averages, which are saved, to all ranks.

    DDP does this before a forward pass in training. An evaluation runs without DDP, because ranks
    may have different numbers of batches; each rank would test a different model.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def sum_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """All ranks: the sums over the ranks, equal on each. Counts are exact up to 2**53."""
    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(total)
    return total.tolist()
