"""What every script here begins with: the ranks, their process group, and what they share out.

One process, several under torchrun, several nodes and Slurm's tasks differ in a few environment
variables. They are read here, and nowhere else.
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

TIMEOUT = timedelta(minutes=5)  # a collective that waits for longer is an error on each rank
_left: list[Any] = []  # the group that this process has left
log = logging.getLogger("examples")


@dataclass(frozen=True)
class World:
    """All processes of the job, as one of them sees them."""

    rank: int  # 0 to world_size - 1, over all nodes
    local_rank: int  # among the processes of this node
    world_size: int  # processes, not GPUs and not nodes
    device: torch.device


def ranks(env: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local rank, world size): torchrun's, srun's, or those of a process alone.

    srun sets no RANK. Its own variables count where the job script has exported MASTER_ADDR, so
    that a command typed into a shell of Slurm's is still one process. Tasks beside each other
    without it would each be a job alone, and all write the same files.
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
        raise SystemExit(f"{names[0]} is set but {', '.join(missing)} is not: start by torchrun")
    rank, local_rank, world_size = (int(env[name]) for name in names)
    return rank, local_rank, world_size


def pick_device(wanted: str, local_rank: int) -> torch.device:
    """The GPU of this process, or the CPU. Raises SystemExit where there are too few GPUs."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"local rank {local_rank} has no GPU, as this node shows {torch.cuda.device_count()}: "
            "start one process a GPU (torchrun --nproc-per-node gpu), or use --device cpu. On "
            "Slurm each task has to see all GPUs of its node: by --gres, not --gpus-per-task"
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def connected(wanted: str = "auto") -> Iterator[World]:
    """All ranks: into the process group, and out of it again on every path."""
    rank, local_rank, world_size = ranks(os.environ)
    # Rank 0 tells how it goes. Warnings and errors come from any rank, with its number.
    level = logging.INFO if rank == 0 else logging.WARNING
    name = f"[rank {rank}] " if world_size > 1 else ""
    logging.basicConfig(level=level, format=f"{name}%(message)s", force=True)
    device = pick_device(wanted, local_rank)
    where: dict[str, Any] = {}  # env://: torchrun gives a free port, its own rendezvous
    if device.type == "cuda":
        # Before the group: else the first collective of every rank would open GPU 0.
        torch.cuda.set_device(device)
        where["device_id"] = device
    if world_size == 1:
        where["store"] = dist.HashStore()  # in this process: a port is not needed
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT, **where)
    try:
        log.info("%d process%s, %s on %s", world_size, "es" * (world_size > 1), backend, device)
        yield World(rank, local_rank, world_size, device)
    finally:
        _left.append(dist.group.WORLD)  # see `run`
        dist.destroy_process_group()


def run(main: Callable[[], None]) -> NoReturn:
    """`main`, and then the end of this process with its exit code: without destructors.

    That of gloo's group joins gloo's threads and holds the GIL meanwhile (torch 2.15). A thread
    that needs the GIL to drop the tensor of the last collective then never ends, nor does the
    process, every other time on a busy machine. So the group is kept, and goes with the process.
    """
    code: Any = 0
    try:
        record(main)()  # under torchrun, the error of the rank that failed first is shown
    except SystemExit as end:  # a mistake of the user's: its message, or argparse's exit code
        code = end.code
        if isinstance(code, str):
            logging.error(code)
            code = 1
    except KeyboardInterrupt:
        logging.error("stopped; the same command goes on from the newest snapshot")
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def agree(given: Mapping[str, Any], world: World) -> None:
    """All ranks: raises SystemExit, on all, unless all were given the same.

    Each node has a command line of its own. With fewer epochs or larger batches on one of them,
    its ranks would leave early, and the others wait for them until the time limit.
    """
    all_given: list[Any] = [None] * world.world_size
    dist.all_gather_object(all_given, dict(given))  # all ranks
    for rank, other in enumerate(all_given):
        for name, value in all_given[0].items():
            if other[name] != value:
                raise SystemExit(
                    f"--{name.replace('_', '-')} is {value!r} for rank 0, but {other[name]!r} for "
                    f"rank {rank}: give all nodes the same"
                )


def sync_batch_norm(model: nn.Module, world: World, batch_size: int) -> nn.Module:
    """BatchNorm over the samples of all ranks, where PyTorch has it; else a word, and as it is.

    To be called before the model is wrapped. `SyncBatchNorm` refuses tensors on a CPU.
    """
    kinds = nn.modules.batchnorm._BatchNorm
    if world.world_size == 1 or not any(isinstance(m, kinds) for m in model.modules()):
        return model
    if world.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    log.info(
        "BatchNorm: PyTorch's SyncBatchNorm needs GPUs, so each rank normalises by its own %d "
        "samples, not by all %d, and the running averages that are tested and saved are rank 0's. "
        "With few samples a rank, raise --batch-size.",
        batch_size,
        batch_size * world.world_size,
    )
    return model


@torch.no_grad()
def broadcast_buffers(model: nn.Module) -> None:
    """All ranks: rank 0's running averages, which are those that are saved.

    DDP does it before a forward pass in training. An evaluation runs without DDP, as ranks may
    have different numbers of batches there, and would test a different model on each rank.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def sum_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """All ranks: the sums over the ranks, the same on each. Counts are exact up to 2**53."""
    total = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(total)
    return total.tolist()
