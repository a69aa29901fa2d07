"""The sum of a step's gradients over its slots and all ranks: exact, or fast.

A sum of floats depends on its order, and so on the number of ranks. An exact one rounds each slot's
gradient to a grid, whose spacing is a power of two, and adds whole numbers: below 2**53 float64 has
all of them, so neither the order nor who has which slot changes a bit. It is float64 and not int64
because that carries Inf and NaN, and is six times as fast on a CPU. The division by the number of
targets comes after the sum. Demmel and Nguyen 2015, "Parallel reproducible summation", round to a
grid in the same way.

The grid of a tensor follows from its largest gradient in the step before. So grids are state, like
the moments of the optimizer: in checkpoints and fingerprints. Where a slot's gradient is
too large for its grid, or so small that bits would be lost, all ranks do the step again, on the
grid that fits it. The first step of a run is always done twice.
"""

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as td
import xxhash
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config
from gptddp.distributed.connect import World

_WHOLE = 53  # float64 has all whole numbers below 2**53
_ROOM = 6  # a gradient may become 2**6 times as large in a step
_LEAST = 32  # bits that the largest gradient of a tensor keeps: so one of 1/256 has a float32's
_RANGE = 100  # of exponents: a gradient on a grid stays a float32
_CHUNK = 1 << 17  # numbers that are worked on at a time: they stay in the cache


class _Sums:
    """What both have: the hook by which DDP hands over its buckets, one by one, to be reduced.

    `finish` waits for the reductions, and has their errors, not the backward pass: DDP waits in C++
    without a limit, and a loss must find it at the end of its pass: the step is begun again as any
    other, with other peers or alone.
    """

    def __init__(self, ddp: DDP, world: World) -> None:
        self._world = world
        self._params = [p for p in ddp.parameters() if p.requires_grad]
        self._number = {p: i for i, p in enumerate(self._params)}
        self._buckets: list[tuple[int, ...]] = []  # of the last pass: the numbers of the tensors
        self._begun: list[tuple[Any, Any]] = []  # reductions of this pass, and what is done after
        self._failed: Exception | None = None  # to begin one
        self.wait_s = 0.0  # of this step: from this rank's last gradient to the sum over all ranks
        self._issued = 0.0
        ddp.register_comm_hook(None, self._reduce)

    def layout(self) -> int:
        """A 64-bit hash of DDP's buckets in the last pass: only ranks with the same may add up."""
        return xxhash.xxh3_64_intdigest(repr(self._buckets).encode())

    def _reduce(
        self,
        _: None,
        bucket: td.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """All ranks: these gradients of the last slot are whole; their sum over ranks begins."""
        numbers = tuple(self._number[p] for p in bucket.parameters())
        if bucket.index() == 0:
            self._buckets.clear()
            self._begun, self._failed = [], None
        self._buckets.append(numbers)
        buffer: Tensor = bucket.buffer()
        grads: list[Tensor] = bucket.gradients()

        def take(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            done.wait()  # raises what the collective has raised
            self._take(numbers, grads)
            return buffer

        try:
            work = td.all_reduce(self._addend(numbers, buffer), async_op=True)
            self._begun.append((work, work.get_future().then(take)))
        except RuntimeError as error:  # a group of which another collective has failed
            self._failed = error
        self._issued = time.monotonic()
        for_ddp: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        for_ddp.set_result(buffer)
        return for_ddp

    def _addend(self, numbers: tuple[int, ...], buffer: Tensor) -> Tensor:
        """What is added up over the ranks, in place, of a bucket; `buffer`: its gradients."""
        raise NotImplementedError

    def _take(self, numbers: tuple[int, ...], grads: list[Tensor]) -> None:
        """The sum over the ranks is there: make gradients of it."""

    def _all_reduce(self, values: Tensor) -> Tensor:
        """All ranks: the last sum of the step, behind those of the gradients."""
        for work, taken in self._begun:
            try:
                self._world.wait(work)
                taken.wait()
            except RuntimeError as error:
                self._failed = self._failed or error
        self._begun = []
        if self._failed is not None:  # and none of them still writes into a gradient
            raise self._failed
        return self._world.all_reduce(values)


class FastSums(_Sums):
    """DDP's own reduction, in float32: the bits depend on the world size, and on the library."""

    def __init__(self, ddp: DDP, slots: int, world: World) -> None:
        super().__init__(ddp, world)
        self._nats = torch.zeros(slots, dtype=torch.float64, device=self._params[0].device)

    def _addend(self, numbers: tuple[int, ...], buffer: Tensor) -> Tensor:
        return buffer.div_(self._world.world_size)  # as DDP does it by itself

    def tensors(self) -> dict[str, Tensor]:
        """State that a run keeps: none."""
        return {}

    def begin(self, targets: int) -> float:
        """What every loss is multiplied by: the sum over ranks is divided by their number."""
        self.wait_s = 0.0
        self._nats.zero_()
        return self._world.world_size / targets

    def took(self, slot: int, nats: Tensor) -> None:
        """A micro-batch of the slot is about to go backward; nats: its loss."""
        self._nats[slot] += nats.detach()

    def close(self, slot: int) -> None:
        """The slot is done, and it is not this rank's last one."""

    def finish(self) -> float:
        """All ranks: the nats of the whole step."""
        nats = math.fsum(self._all_reduce(self._nats).tolist())
        self.wait_s = time.monotonic() - self._issued
        return nats

    def settle(self) -> None:
        """The step has changed the model."""


class ExactSums(_Sums):
    """Whole numbers on grids, in float64: the same bits for any number of ranks, up to `slots`.

    A communication hook of DDP: the last slot's buckets are reduced, together with the sums of the
    slots before it, while its backward pass goes on. Twice the bytes of float32 on the wire; 8
    bytes a parameter in memory.
    """

    def __init__(self, ddp: DDP, slots: int, world: World) -> None:
        super().__init__(ddp, world)
        n, device = len(self._params), self._params[0].device
        self._totals = [
            torch.zeros(p.numel(), dtype=torch.float64, device=device) for p in self._params
        ]
        # The totals of each bucket's tensors, side by side, of which `_totals` has the parts.
        self._flat: dict[tuple[int, ...], Tensor] = {}
        # The spacing of a tensor's grid is 2**-exponent; 0 before the first step.
        self._exponents = torch.zeros(n, dtype=torch.int32, device=device)
        # For each slot its nats and the largest gradient of each tensor; another rank's has zeros.
        self._slots = torch.zeros(slots, 1 + n, dtype=torch.float64, device=device)
        self._bits = _WHOLE - 1 - math.ceil(math.log2(slots))  # of a slot's largest number
        self._least = min(_LEAST, self._bits - 2 * _ROOM)  # of very many slots it has fewer
        self._exponent = self._next = [0] * n
        self._slot, self._targets, self._is_first = 0, 1, True  # first: of this rank, in the step

    def tensors(self) -> dict[str, Tensor]:
        """State that a run keeps: int32 (parameter tensors), the live tensor."""
        return {"sums.exponents": self._exponents}

    def begin(self, targets: int) -> float:
        """A step of so many targets over all ranks; what every loss is multiplied by: nothing."""
        self._targets, self.wait_s = targets, 0.0
        self._start(self._exponents.tolist())
        return 1.0

    def _start(self, exponents: Sequence[int]) -> None:
        self._exponent = list(exponents)
        self._slots.zero_()
        self._is_first = True

    def took(self, slot: int, nats: Tensor) -> None:
        """A micro-batch of the slot is about to go backward; nats: its loss."""
        self._slot = slot
        self._slots[slot, 0] += nats.detach()

    def close(self, slot: int) -> None:
        """The slot is done, and it is not this rank's last one: add its gradients."""
        self._add(range(len(self._params)))
        self._is_first = False

    def _add(self, numbers: Sequence[int]) -> None:
        tensors, lows, highs = [], [], []
        for i in numbers:
            grad = self._params[i].grad
            assert grad is not None
            for part, total in _chunks(grad, self._totals[i]):
                low, high = torch.aminmax(part)
                tensors.append(i)
                lows.append(low)
                highs.append(high)
                # exact in float32, but for the rounding: the factor is a power of two
                whole = part.mul_(2.0 ** self._exponent[i]).round_()
                total.copy_(whole) if self._is_first else total.add_(whole)
                part.zero_()
        most = torch.maximum(-torch.stack(lows), torch.stack(highs)).double()
        index = torch.tensor(tensors, device=most.device)
        self._slots[self._slot, 1:].scatter_reduce_(0, index, most, "amax")  # NaN if there is one

    def _addend(self, numbers: tuple[int, ...], buffer: Tensor) -> Tensor:
        self._add(numbers)
        return self._side_by_side(numbers)

    def _take(self, numbers: tuple[int, ...], grads: list[Tensor]) -> None:
        for i, grad in zip(numbers, grads, strict=True):
            divisor = 2.0 ** self._exponent[i] * self._targets
            for part, total in _chunks(grad, self._totals[i]):
                part.copy_(total.div_(divisor))

    def _side_by_side(self, numbers: tuple[int, ...]) -> Tensor:
        """The totals of a bucket's tensors, in one; DDP makes its buckets anew after a step."""
        if numbers not in self._flat:
            for other in [it for it in self._flat if set(it) & set(numbers)]:
                del self._flat[other]
            flat = self._flat[numbers] = torch.cat([self._totals[i] for i in numbers])
            parts = torch.split(flat, [len(self._totals[i]) for i in numbers])
            for i, part in zip(numbers, parts, strict=True):
                self._totals[i] = part
        return self._flat[numbers]

    def finish(self) -> float | None:
        """All ranks: the nats of the whole step; None if a grid did not fit: do it again."""
        slots = self._all_reduce(self._slots)
        self.wait_s += time.monotonic() - self._issued
        largest = slots[:, 1:].amax(0).tolist()  # NaN if there is one
        self._next = [self._fitting(*it) for it in zip(largest, self._exponent, strict=True)]
        if all(map(math.isfinite, largest)) and not self._fits(largest):
            self._start(self._next)
            for parameter in self._params:  # they have the sum on the other grid
                if parameter.grad is not None:
                    parameter.grad.zero_()
            return None
        return math.fsum(slots[:, 0].tolist())

    def _fits(self, largest: Sequence[float]) -> bool:
        grids = zip(largest, self._exponent, self._next, strict=True)
        return all(
            exponent == best or 2**self._least <= most * 2.0**exponent <= 2**self._bits
            for most, exponent, best in grids
        )

    def _fitting(self, most: float, exponent: int) -> int:
        """The exponent for a tensor whose largest gradient is `most`; its own where none is."""
        if not most or not math.isfinite(most):
            return exponent
        return max(-_RANGE, min(_RANGE, self._bits - _ROOM - math.frexp(most)[1]))

    def settle(self) -> None:
        """The step has changed the model: its grids are those of the next."""
        self._exponents.copy_(torch.tensor(self._next, dtype=torch.int32))


def _chunks(grad: Tensor, total: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Both, flat, in parts of which each stays in the cache while it is worked on."""
    flat = grad.view(-1)
    if len(flat) <= _CHUNK:
        return [(flat, total)]
    return zip(torch.split(flat, _CHUNK), torch.split(total, _CHUNK), strict=True)


Sums = FastSums | ExactSums


def build(ddp: DDP, c: Config, world: World) -> Sums:
    """The sums that the run's `reduce` says."""
    return (ExactSums if c.reduce == "exact" else FastSums)(ddp, c.lanes, world)
