"""The ranks of a job: they join the process group, run collectives, and leave it.

A worker of gptddp's launcher is a member of a mesh: its world changes with the members, in this
process (`form`). The world of any other process is static: a lost peer ends it.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td

from gptddp import errors
from gptddp.distributed import environment, pulse, torch_private, values
from gptddp.distributed.environment import (
    cpu_sharers,
    job,
    ranks,
    restarts,
    slurm_cpus,
    slurm_life,
)
from gptddp.distributed.group import Group, initialise
from gptddp.distributed.hardware import cpu_quota, device_of
from gptddp.distributed.members import Members, View
from gptddp.distributed.storage import Said
from gptddp.distributed.waiting import Tell, ended, teller, wait_for_end

# The first step connects the peers and, on an accelerator, compiles kernels.
FIRST_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0
PART_S = 10.0  # for all ranks to leave the last collective
_SMALL_BYTES = 1 << 20

_kept: list[Any] = []  # the process group after its use, until the end of this process


@dataclass
class World:
    """All ranks of the job, as one of them sees them now, while `connect` lasts."""

    rank: int
    world_size: int
    device: torch.device
    nodes: int  # pods in the present world
    restarts: int  # of this worker, by its launcher
    address: str  # the pod's own address, else ""
    job: str | None  # the name of the job, equal in all its lives; None: no name
    life: str  # the unique id of this life; "" before the first view of a mesh
    pods: tuple[str, ...]  # the name of each rank's pod, "" outside a pod
    group: Group | None = None  # None: the world is static
    _formed: str = ""  # identity of this world within the life
    _calls: Iterator[int] = dataclasses.field(default_factory=itertools.count)  # of `from_rank_0`
    _store: Any = None  # of a static world

    # -- its members -------------------------------------------------------------------------------

    @property
    def is_static(self) -> bool:
        """Are the members fixed?"""
        return self.group is None

    @property
    def members(self) -> Members | None:
        """The connection to the launcher; None if the world is static."""
        return self.group.members if self.group else None

    @property
    def ids(self) -> list[str]:
        """The identity of each rank's process, by rank."""
        return self.view.ids if self.view else [str(rank) for rank in range(self.world_size)]

    @property
    def view(self) -> View | None:
        """The view of the last `form`; None before it, or if the world is static."""
        return self.group.view if self.group else None

    def check(self) -> None:
        """Raise Broken if the world is over, so that no collective works any more.

        Not on GPUs: their work is queued ahead, and NCCL's abort must end before a new world forms.
        """
        if self.group and self.device.type == "cpu":
            self.group.check()

    def form(self, view: View) -> None:
        """All members of the view: form its world. Raises Broken; see `Group.form`."""
        assert self.group
        self.group.form(view)
        pods = tuple(it.pod for it in view.members)
        if view.by == "first":
            self.life = view.ids[0]
        self._become(view.ids.index(self.group.members.me), pods, str(view.number))

    def alone(self) -> None:
        """Form a world of one, as before the first `form`."""
        assert self.group
        self.group.alone()
        self._become(0, (self.pods[self.rank],), "alone")

    def _become(self, rank: int, pods: tuple[str, ...], formed: str) -> None:
        self.rank, self.world_size, self.pods = rank, len(pods), pods
        self.nodes = len(set(filter(None, pods))) + pods.count("")
        self._formed, self._calls = formed, itertools.count()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(len(pods)))  # see `environment.ranks`
        pulse.beat()

    # -- a board, for messages outside of collectives ---------------------------------------------

    def post(self, key: str, value: Any) -> None:
        """Show this small value to all ranks, as JSON, in place of the key's last value."""
        if self.group:
            self.group.members.post(key, value)
        else:
            self._board().set(f"{key} of {self.rank}", json.dumps(value))

    def posted(self, key: str, of: Iterable[int] | None = None) -> dict[int, Any]:
        """The values that the ranks `of` (default: all) have posted under this key, by rank.

        Raises DistError if rank 0 of a static world is lost.
        """
        some = range(self.world_size) if of is None else of
        if self.group:
            posts = self.group.members.posts(key)
            ids = self.view.ids if self.view else [self.group.members.me]
            return {rank: posts[ids[rank]] for rank in some if ids[rank] in posts}
        board, found = self._board(), {}
        for rank in some:
            if board.check([name := f"{key} of {rank}"]):
                found[rank] = values.decode(board.get(name), self.names[rank])
        return found

    def _board(self) -> Any:
        if self._store is None:  # a separate connection: another thread may wait on the first
            self._store = torch_private.default_store().clone()
        return self._store

    # -- collectives -------------------------------------------------------------------------------

    def wait(self, work: Any) -> None:
        """Wait for a collective. All begin with `async_op`, because gloo may never end one."""
        self.group.wait(work) if self.group else work.wait()

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks: the sum of a small tensor over the ranks, on the CPU."""
        on_device = values.to(self.device)
        self.wait(td.all_reduce(on_device, async_op=True))
        result = on_device.cpu()
        pulse.beat()
        return result

    def gather_parts(self, mine: torch.Tensor, parts: torch.Tensor) -> None:
        """All ranks: copy the parts of all ranks into `parts`, in the order of the ranks.

        All parts have one length and any dtype: they travel as bytes, because gloo has no bf16.
        """
        whole, part = parts.view(torch.uint8), mine.view(torch.uint8)
        self.wait(td.all_gather_into_tensor(whole, part, async_op=True))
        pulse.beat()

    @torch.no_grad()
    def broadcast(self, tensors: Collection[torch.Tensor], source: int) -> None:
        """All ranks: copy the values of the rank `source`, in place."""
        self._move(tensors, lambda flat: td.broadcast(flat, src=source, async_op=True))

    @torch.no_grad()
    def send(self, tensors: Collection[torch.Tensor], source: int, to: int) -> None:
        """All ranks: copy the values of the rank `source` to the rank `to` only, in place.

        It is an all-to-all whose other parts are empty: half a gigabyte takes 0.4 s, and 1.9 s by a
        broadcast (four ranks on two busy cores).
        """

        def move(flat: torch.Tensor) -> Any:
            part = flat.view(-1).view(torch.uint8)
            comes, goes = [0] * self.world_size, [0] * self.world_size  # bytes, by rank
            if self.rank == to:
                comes[source] = len(part)
            elif self.rank == source:
                goes[to] = len(part)
            into, out = (part if sum(it) else part[:0] for it in (comes, goes))
            return td.all_to_all_single(into, out, comes, goes, async_op=True)

        self._move(tensors, move)

    def _move(self, tensors: Collection[torch.Tensor], move: Callable[[torch.Tensor], Any]) -> None:
        """Move the tensors; small ones travel as one, because each `move` costs a round trip.

        208 tensors of 16 MB, four ranks on one machine: 0.2 s one by one, 0.03 s as one. For large
        tensors the copy costs more.
        """
        # by item size, so that each tensor is aligned for a view of its dtype
        small = sorted((t for t in tensors if t.nbytes < _SMALL_BYTES), key=lambda t: -t.itemsize)
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in small])
        self.wait(move(flat))
        for tensor, part in zip(small, torch.split(flat, [t.nbytes for t in small]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        for tensor in tensors:
            if tensor.nbytes >= _SMALL_BYTES:
                self.wait(move(tensor))
                pulse.beat()

    def gather(self, value: Any) -> list[Any]:
        """All ranks: every rank's small value, by rank; as JSON, so tuples come out as lists.

        Raises BadMessage if a rank has sent no JSON.
        """
        return values.gather(value, self.names, self.device, self.wait)

    def broadcast_value(self, value: Any, source: int) -> Any:
        """All ranks: the small value of the rank `source`; as JSON, like `gather`."""
        return values.broadcast(value, source, self.names, self.device, self.wait)

    def leave_together(self) -> None:
        """All ranks: wait until every rank has left its last collective.

        gloo may never wake a rank whose peer closes its connections during a send. So each rank
        posts its end. In a static world rank 0 hosts the posts, so it leaves last.
        """
        self.all_reduce(torch.zeros(1))
        end = time.monotonic() + PART_S
        # an error means that rank 0 has seen all posts, and has left
        with contextlib.suppress(td.DistError):
            self.post("parted", self._formed)
            while not self._all_parted() and time.monotonic() < end:
                time.sleep(0.005)
        if self.rank == 0 and self.world_size > 1:
            time.sleep(0.05)

    def _all_parted(self) -> bool:
        parted = {rank for rank, formed in self.posted("parted").items() if formed == self._formed}
        if self.group and self.view:
            ended = self.group.members.ended_of(self.view)
            parted |= {rank for rank, it in enumerate(self.view.ids) if it in ended}
        return len(parted) == self.world_size

    def from_rank_0(self, work: Callable[[Tell], Any]) -> Any:
        """All ranks: the small result of `work`, done on rank 0 only; all ranks raise its error.

        One process reads the storage, and all ranks take the same decision or none. `work` takes a
        function to report its progress: the others wait while the reports change, and give up after
        FIRST_TIMEOUT_S without a change. The result travels as JSON. Raises the GptddpError of
        `work`, on all ranks; LostPeer if rank 0 is lost or silent, or the world is over.
        """
        call = f"{self._formed} {next(self._calls)}"
        box: Any = None
        if self.rank == 0:

            def post(doing: str, end: str) -> None:
                if self.group and not end:
                    self.group.check()
                self.post("rank 0", [call, doing, end])

            with ended(post):
                try:
                    box = ["ok", work(teller(post))]
                except errors.GptddpError as error:
                    # the nearest class whose only argument is the message
                    kind = next(c for c in type(error).__mro__ if "__init__" not in vars(c))
                    box = [kind.__name__, str(error)]
        else:

            def look() -> tuple[str, str]:
                if self.group:
                    self.group.check()
                seen = self.posted("rank 0", of=[0]).get(0)
                if isinstance(seen, list) and len(seen) == 3 and seen[0] == call:
                    return str(seen[1]), str(seen[2])
                return "", ""

            said = Said(f"[rank {self.rank}] waiting for {self.names[0]}", ranks().local_rank == 0)
            wait_for_end(look, self.names[0], FIRST_TIMEOUT_S, said)
        return self._opened(self.broadcast_value(box, source=0))

    def _opened(self, box: Any) -> Any:
        """The value from rank 0; raises the error from rank 0."""
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
        """Set how long a collective waits for a silent peer before it fails: a minute at least."""
        seconds = max(TIMEOUT_S, seconds)
        pulse.allow(seconds)
        if self.group:
            self.group.set_timeout(seconds)
        else:
            td.set_timeout(timedelta(seconds=seconds))

    @property
    def names(self) -> list[str]:
        """The ranks' names for messages, by rank."""
        return [f"rank {i} ({pod})" if pod else f"rank {i}" for i, pod in enumerate(self.pods)]


@contextlib.contextmanager
def connect(device: str | None) -> Iterator[World]:
    """Join the process group, in torch's order: device, then group; leave it on every path."""
    pulse.allow(FIRST_TIMEOUT_S)
    rank, local_rank, world_size, local_world_size = ranks()
    where = device_of(device, local_rank)
    threads = cpu_quota() // cpu_sharers(local_world_size)
    torch.set_num_threads(max(1, min(threads, slurm_cpus(local_world_size) or threads)))
    path = environment.members()
    here = environment.pod() if path else environment.pod_name()
    world = World(
        rank=rank,
        world_size=world_size,
        device=where,
        nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        restarts=restarts(),
        address=os.environ.get("POD_ADDRESS", ""),
        job=job(),
        life="",
        pods=(here,) * world_size,
    )
    if path:
        world.group = Group(Members(path, here), where, FIRST_TIMEOUT_S)
        world.alone()
    else:
        # a process without the variables of a rank is alone
        alone = world_size == 1 and "MASTER_ADDR" not in os.environ
        store = td.HashStore() if alone else None  # type: ignore[attr-defined]
        initialise(where, FIRST_TIMEOUT_S, rank=rank, world_size=world_size, store=store)
        met = world.gather([here, uuid.uuid4().hex])  # all ranks
        world.pods = tuple(errors.visible(pod) for pod, _ in met)
        world.life = slurm_life() or met[0][1]
    try:
        yield world
    finally:
        # Its destructor joins gloo's threads with the GIL held (torch 2.15). A thread that still
        # needs the GIL, to free the tensor of the last collective, would block this one for ever.
        _kept[:] = [td.group.WORLD, world.group]
        td.destroy_process_group()
