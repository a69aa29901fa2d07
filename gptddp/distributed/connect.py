"""The ranks of a job: into the process group, what they do together, and out of it again."""

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from gptddp import errors
from gptddp.distributed import known_lives, pulse, torch_private, values
from gptddp.distributed.environment import (
    cpu_sharers,
    has_own_gpus,
    job,
    ranks,
    restarts,
    shared_memory,
    slurm_cpus,
    slurm_life,
)
from gptddp.distributed.hardware import cpu_quota
from gptddp.distributed.storage import Said
from gptddp.distributed.waiting import Tell, ended, teller, wait_for_end

# The first step connects the peers and, on an accelerator, compiles kernels.
FIRST_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0
STORE_S = 10.0  # added where the store itself may not answer, as its host is stopped
PART_S = 10.0  # for all ranks to come out of the last collective
_SMALL_BYTES = 1 << 20

_kept: list[Any] = []  # the process group after the end of its use, as long as this process


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
    job: str | None  # the name of the job, the same in all its lives; None: it has none
    life: str  # the id of this life, which no other has
    follows: frozenset[str]  # the ids of lives that are over, because pods of this one were in them
    pods: tuple[str, ...]  # the name of each rank's pod, "" where it is in none
    came: tuple[known_lives.Came, ...] = ()  # what each rank's pod knows of earlier lives
    _calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # of `from_rank_0`

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks: the sum of a small tensor over the ranks, on the CPU."""
        on_device = values.to(self.device)
        td.all_reduce(on_device)
        result = on_device.cpu()
        pulse.beat()
        return result

    def gather_parts(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        """All ranks: copy the parts of all ranks into `parts`, in the order of the ranks.

        All of one length, in any dtype: they travel as bytes, as gloo has no bf16.
        """
        td.all_gather_into_tensor(parts.view(torch.uint8), mine.view(torch.uint8))
        pulse.beat()

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
        """All ranks: every rank's small value, by rank; as JSON, so tuples come out as lists.

        Raises BadMessage where a rank has sent something else.
        """
        return values.gather(value, self.names, self.device)

    def broadcast_value(self, value: Any, source: int) -> Any:
        """All ranks: the small value that the rank `source` has; as JSON, as with `gather`."""
        return values.broadcast(value, source, self.names, self.device)

    def leave_together(self) -> None:
        """All ranks: wait until every rank has come out of its last collective.

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

    def from_rank_0(self, work: Callable[[Tell], Any]) -> Any:
        """All ranks: the small result of `work`, done on rank 0 only; all ranks raise its error.

        Storage is read by one process, and all ranks take the same decision or none. `work` takes a
        function that it tells how far it is: the others wait for as long as that changes, and give
        up when it has stood still for FIRST_TIMEOUT_S. The result travels as JSON. Raises the
        GptddpError that `work` has raised, on all ranks; LostPeer where rank 0 is lost or silent.
        """
        store, key = torch_private.default_store(), f"from rank 0: {next(self._calls)}"
        box: Any = None
        if self.rank == 0:
            with ended(store, key):
                try:
                    box = ["ok", work(teller(store, key, self.world_size == 1))]
                except errors.GptddpError as error:
                    # the nearest class that is made of its message alone
                    kind = next(c for c in type(error).__mro__ if "__init__" not in vars(c))
                    box = [kind.__name__, str(error)]
        else:
            said = Said(f"[rank {self.rank}] waiting for {self.names[0]}", ranks().local_rank == 0)
            with time_limit(FIRST_TIMEOUT_S + STORE_S) as answered:
                wait_for_end(store, key, self.names[0], FIRST_TIMEOUT_S, said, answered)
        return self._opened(self.broadcast_value(box, source=0))

    def _opened(self, box: Any) -> Any:
        """The value that rank 0 has sent, or its error raised."""
        kind, value = box if isinstance(box, list) and len(box) == 2 else (None, None)
        if kind == "ok":
            return value
        made: Any = getattr(errors, kind, None) if isinstance(kind, str) else None
        known = isinstance(made, type) and issubclass(made, errors.GptddpError)
        if not known or "__init__" in vars(made):
            raise errors.BadMessage(self.names[0], "neither a result nor an error of a known kind")
        shared = made(str(value))
        shared.shared = True
        raise shared

    def set_timeout(self, seconds: float) -> None:
        """How long a collective waits for a silent peer before it fails: a minute at least."""
        pulse.allow(max(TIMEOUT_S, seconds))
        td.set_timeout(timedelta(seconds=max(TIMEOUT_S, seconds)))

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


def _device(wanted: str | None, local_rank: int) -> torch.device:
    """This rank's device, made the current one."""
    if (wanted or ("cuda" if torch.cuda.is_available() else "cpu")) != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", gpu_of(local_rank))
    torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def connect(device: str | None) -> Iterator[World]:
    """Join the process group, in torch's order: device, then group; leave it on every path."""
    pulse.allow(FIRST_TIMEOUT_S)
    rank, local_rank, world_size, local_world_size = ranks()
    where = _device(device, local_rank)
    threads = cpu_quota() // cpu_sharers(local_world_size)
    torch.set_num_threads(max(1, min(threads, slurm_cpus(local_world_size) or threads)))
    with time_limit(FIRST_TIMEOUT_S + STORE_S):
        _join(rank, world_size, where)
        world = World(
            rank=rank,
            world_size=world_size,
            device=where,
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            restarts=restarts(),
            address=os.environ.get("POD_ADDRESS", ""),
            memory=shared_memory(),
            job=job(),
            life="",
            follows=frozenset(),
            pods=("",) * world_size,
        )
        mine = [
            os.environ.get("POD_NAME", ""),
            uuid.uuid4().hex,
            known_lives.noted(),
            known_lives.deaths(),
        ]
        drawn, came = zip(*_introduced(world.gather(mine)), strict=True)  # all ranks
    life = slurm_life() or drawn[0]
    known_lives.note(life)
    follows = frozenset([life, *itertools.chain(*(it.lives for it in came))])
    pods = tuple(it.pod for it in came)
    try:
        yield dataclasses.replace(world, life=life, follows=follows, pods=pods, came=came)
    finally:
        # Its destructor joins gloo's threads without letting go of the GIL (torch 2.15). One that
        # still needs it, to drop the tensor of the last collective, would never end, nor would we.
        _kept[:] = [td.group.WORLD]
        td.destroy_process_group()


def _join(rank: int, world_size: int, device: torch.device) -> None:
    """All ranks: make the process group; a process without the variables of a rank is alone."""
    alone = world_size == 1 and "MASTER_ADDR" not in os.environ
    td.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        store=td.HashStore() if alone else None,  # type: ignore[attr-defined]
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(seconds=FIRST_TIMEOUT_S),
    )


def _introduced(brought: list[Any]) -> list[tuple[str, known_lives.Came]]:
    """What each rank has sent at the start: an id, and what its pod knows of earlier lives."""
    found = []
    for rank, it in enumerate(brought):
        try:
            pod, drawn, earlier, deaths = it
            if not _texts(pod, drawn, *earlier) or not all(_texts(*d) for d in deaths):
                raise ValueError
            died = [(life, of_rank, errors.visible(how)) for life, of_rank, how in deaths]
            found.append((drawn, known_lives.Came(errors.visible(pod), list(earlier), died)))
        except (TypeError, ValueError):
            raise errors.BadMessage(
                f"rank {rank}", f"{it!r:.80} for its pod and its lives"
            ) from None
    return found


def _texts(*values: object) -> bool:
    return all(isinstance(it, str) for it in values)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[Callable[[], None]]:
    """End the process if this takes longer: torch waits for a stopped rank 0's store for ever.

    Yields a function to call whenever the peer has answered: then the time begins anew.
    """
    began, over = time.monotonic(), threading.Event()

    def renew() -> None:
        nonlocal began
        began = time.monotonic()

    def watch() -> None:
        while (rest_s := began + seconds - time.monotonic()) > 0:
            if over.wait(rest_s):
                return
        print(f"[rank {ranks().rank}] a peer has not answered for {seconds:g} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=watch, name="time limit", daemon=True).start()
    try:
        yield renew
    finally:
        over.set()
