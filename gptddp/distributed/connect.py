"""The ranks of a job: into the process group, what they do together, and out of it again."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from gptddp import errors
from gptddp.distributed import pulse, torch_private
from gptddp.distributed.environment import (
    cpu_sharers,
    has_own_gpus,
    job,
    ranks,
    restarts,
    shared_memory,
)
from gptddp.distributed.hardware import cpu_quota

# The first step connects the peers and, on an accelerator, compiles kernels.
FIRST_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0
PART_S = 10.0  # for all ranks to come out of the last collective
_SMALL_BYTES = 1 << 20

_left: list[Any] = []  # the group that this process has left: it goes with the process


@dataclass(frozen=True)
class World:
    """All ranks of the job, as one of them sees them: for as long as `connect` lasts."""

    rank: int
    world_size: int
    device: torch.device
    nodes: int  # pods in the present world
    restarts: int  # of this pod's workers by its agent
    address: str  # the pod's own address when it has one to itself, else ""
    memory: Path | None  # a folder in memory that outlives this process, of the pod's ranks alone
    job: str | None  # the job by a name of its own, the same in all its lives; None: this process
    pods: tuple[str, ...]  # the name of each rank's pod, "" where it is in none

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks: the sum of a small tensor over the ranks, on the CPU."""
        on_device = values.to(self.device)
        td.all_reduce(on_device)
        result = on_device.cpu()
        pulse.beat()
        return result

    @torch.no_grad()
    def broadcast(self, tensors: Collection[torch.Tensor], source: int) -> None:
        """All ranks: the values of the rank `source`, in place.

        Small tensors travel as one: each broadcast costs a round trip (208 tensors of 16 MB, four
        ranks on one machine: 0.2 s one by one, 0.03 s so). A copy of large ones costs more.
        """
        # by item size, so that each begins where a view of its dtype may
        small = sorted((t for t in tensors if t.nbytes < _SMALL_BYTES), key=lambda t: -t.itemsize)
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in small])
        td.broadcast(flat, src=source)
        for tensor, part in zip(small, torch.split(flat, [t.nbytes for t in small]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        for tensor in tensors:
            if tensor.nbytes >= _SMALL_BYTES:
                td.broadcast(tensor, src=source)
                pulse.beat()

    def gather(self, value: Any) -> list[Any]:
        """All ranks: every rank's small value, by rank."""
        values = [None] * self.world_size
        td.all_gather_object(values, value)
        pulse.beat()
        return values

    def broadcast_value(self, value: Any, source: int) -> Any:
        """All ranks: the small value that the rank `source` has."""
        box = [value]
        td.broadcast_object_list(box, src=source, device=self.device)
        pulse.beat()
        return box[0]

    def leave_together(self) -> None:
        """All ranks: nobody leaves before everybody is here, and has left its last collective.

        gloo may never wake a rank whose peer closes its connections while it still sends. So the
        last word goes through the store, which rank 0 has: it is the last to go.
        """
        self.all_reduce(torch.zeros(1))
        store = torch_private.default_store()
        end = time.monotonic() + PART_S
        # at its end rank 0 has seen all, and has left
        with time_limit(2 * PART_S), contextlib.suppress(td.DistError):
            store.add("parted", 1)
            while store.add("parted", 0) < self.world_size and time.monotonic() < end:
                time.sleep(0.005)
        if self.rank == 0 and self.world_size > 1:
            time.sleep(0.05)

    def from_rank_0(self, work: Callable[[], Any]) -> Any:
        """All ranks: the result of `work`, done on rank 0 only; its user error is everybody's.

        Storage is read by one process, and all ranks take the same decision or none.
        """
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [("ok", work())]
            except errors.GptddpError as error:
                box = [(type(error).__name__, str(error))]
        td.broadcast_object_list(box, src=0, device=self.device)
        pulse.beat()
        kind, value = box[0]
        if kind != "ok":
            shared = getattr(errors, kind)(value)
            shared.shared = True
            raise shared
        return value

    def set_timeout(self, seconds: float) -> None:
        """How long a collective waits for a silent peer before it fails: a minute at least."""
        pulse.allow(max(TIMEOUT_S, seconds))
        torch_private.set_collective_timeout(timedelta(seconds=max(TIMEOUT_S, seconds)))

    @property
    def names(self) -> list[str]:
        """Every rank as a message says it, by rank."""
        return [f"rank {i} ({pod})" if pod else f"rank {i}" for i, pod in enumerate(self.pods)]


def gpu_of(local_rank: int) -> int:
    """The number of this rank's GPU among those that it sees; a ConfigError where it has none."""
    count = torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    if count and has_own_gpus():
        return 0
    raise errors.ConfigError(
        f"device is cuda, but local rank {local_rank} finds {count} GPUs: start fewer processes a "
        "node, give each a GPU (`srun --gpus-per-task=1`), or use --device cpu"
    )


@contextlib.contextmanager
def connect(device: str | None) -> Iterator[World]:
    """Join the process group, in torch's order: device, then group; leave it on every path."""
    pulse.allow(FIRST_TIMEOUT_S)
    rank, local_rank, world_size, local_world_size = ranks()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.device("cuda", gpu_of(local_rank)) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, cpu_quota() // cpu_sharers(local_world_size)))
    if kind == "cuda":
        torch.cuda.set_device(where)
    alone = world_size == 1 and "MASTER_ADDR" not in os.environ
    pods = [""] * world_size
    with time_limit(FIRST_TIMEOUT_S + 10):
        td.init_process_group(
            backend="nccl" if kind == "cuda" else "gloo",
            rank=rank,
            world_size=world_size,
            store=td.HashStore() if alone else None,  # type: ignore[attr-defined]
            device_id=where if kind == "cuda" else None,
            timeout=timedelta(seconds=FIRST_TIMEOUT_S),
        )
        td.all_gather_object(pods, os.environ.get("POD_NAME", ""))  # all ranks
    try:
        yield World(
            rank=rank,
            world_size=world_size,
            device=where,
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            restarts=restarts(),
            address=os.environ.get("POD_ADDRESS", ""),
            memory=shared_memory(),
            job=job(),
            pods=tuple(pods),
        )
    finally:
        # Its destructor joins gloo's threads without letting go of the GIL (torch 2.13). One that
        # still needs it, to drop the tensor of the last collective, would never end, nor would we.
        _left[:] = [td.group.WORLD]
        td.destroy_process_group()


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """End the process if this takes longer: torch waits for a stopped rank 0's store for ever."""

    def give_up() -> None:
        print(f"[rank {ranks().rank}] a peer has not answered for {seconds:g} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
