"""The sum of a step's gradients over its slots and all ranks: exact, or fast.

A sum of floats depends on its order, and so on the number of ranks. An exact sum rounds each slot's
gradient to a grid, whose spacing is a power of two, and adds whole numbers: float64 represents all
of them below 2**53, so neither the order nor the assignment of slots to ranks changes a bit. It is
float64 instead of int64 because float64 carries Inf and NaN, and is six times as fast on a CPU. The
division by the number of targets comes after the sum. Demmel and Nguyen 2015, "Parallel
reproducible summation", round to a grid in the same way.

The grid of a tensor follows from its largest gradient in the previous step. So grids are state, in
checkpoints and fingerprints, like the moments of the optimizer. If a slot's gradient is too large
for its grid, or so small that bits would be lost, all ranks do the step again, on a grid that fits.
The first step of a run is always done twice.
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
_LEAST = 32  # bits of a tensor's largest gradient; one 256 times smaller has 24, as float32
_RANGE = 100  # largest exponent: a gradient on a grid stays a float32
_CHUNK = 1 << 17  # numbers to process at a time: they stay in the cache


class _Sums:
    """The common part: the hook through which DDP passes its buckets, one by one, for reduction.

    The hook returns to DDP at once, and `finish` waits for the reductions and raises their errors:
    DDP itself would wait in C++ without a limit. After the loss of a peer the backward pass must be
    complete, so that the step can be started again, with other peers or alone.
    """

    def __init__(self, ddp: DDP, world: World) -> None:
        self._world = world
        self._params = [p for p in ddp.parameters() if p.requires_grad]
        self._number = {p: i for i, p in enumerate(self._params)}
        self._buckets: list[tuple[int, ...]] = []  # of the last pass: the numbers of the tensors
        self._begun: list[tuple[Any, Any]] = []  # this pass's reductions, and futures of `take`
        self._failed: Exception | None = None  # the error of a reduction that did not start
        self.wait_s = 0.0  # of this step: from this rank's last gradient to the sum over all ranks
        self._issued = 0.0
        ddp.register_comm_hook(None, self._reduce)

    def layout(self) -> int:
        """A 64-bit hash of DDP's buckets in the last pass: only equal ones may be summed."""
        return xxhash.xxh3_64_intdigest(repr(self._buckets).encode())

    def _reduce(
        self,
        _: None,
        bucket: td.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """All ranks: a bucket of the last slot is complete; start its sum over the ranks."""
        numbers = tuple(self._number[p] for p in bucket.parameters())
        if bucket.index() == 0:
            self._buckets.clear()
            self._begun, self._failed = [], None
        self._buckets.append(numbers)
        buffer: Tensor = bucket.buffer()
        grads: list[Tensor] = bucket.gradients()

        def take(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            done.wait()  # raises the error of the collective
            self._take(numbers, grads)
            return buffer

        try:
            work = td.all_reduce(self._addend(numbers, buffer), async_op=True)
            self._begun.append((work, work.get_future().then(take)))
        except RuntimeError as error:  # an earlier collective of the group failed
            self._failed = error
        self._issued = time.monotonic()
        for_ddp: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        for_ddp.set_result(buffer)
        return for_ddp

    def _addend(self, numbers: tuple[int, ...], buffer: Tensor) -> Tensor:
        """The tensor of a bucket to sum over the ranks, in place; `buffer`: its gradients."""
        raise NotImplementedError

    def _take(self, numbers: tuple[int, ...], grads: list[Tensor]) -> None:
        """Turn the sum over the ranks into gradients."""

    def _all_reduce(self, values: Tensor) -> Tensor:
        """All ranks: wait for the sums of the gradients, then compute the last sum of the step."""
        for work, taken in self._begun:
            try:
                self._world.wait(work)
                taken.wait()
            except RuntimeError as error:
                self._failed = self._failed or error
        self._begun = []
        if self._failed is not None:  # no reduction writes into a gradient any more
            raise self._failed
        return self._world.all_reduce(values)


class FastSums(_Sums):
    """DDP's usual reduction, in float32: the bits depend on the library and the ranks' lanes."""

    def __init__(self, ddp: DDP, slots: int, world: World) -> None:
        super().__init__(ddp, world)
        self._nats = torch.zeros(slots, dtype=torch.float64, device=self._params[0].device)

    def _addend(self, numbers: tuple[int, ...], buffer: Tensor) -> Tensor:
        return buffer.div_(self._world.world_size)  # as DDP does without a hook

    def tensors(self) -> dict[str, Tensor]:
        """The state for checkpoints: none."""
        return {}

    def begin(self, targets: int) -> float:
        """The factor of every loss: it cancels the division by the world size."""
        self.wait_s = 0.0
        self._nats.zero_()
        return self._world.world_size / targets

    def took(self, slot: int, nats: Tensor) -> None:
        """Add the loss of a micro-batch, in nats, before its backward pass."""
        self._nats[slot] += nats.detach()

    def close(self, slot: int) -> None:
        """Finish a slot that is not this rank's last one."""

    def finish(self) -> float:
        """All ranks: the nats of the whole step."""
        nats = math.fsum(self._all_reduce(self._nats).tolist())
        self.wait_s = time.monotonic() - self._issued
        return nats

    def stepped(self) -> None:
        """Call this after a step has changed the model."""


class ExactSums(_Sums):
    """Whole numbers on grids, in float64: the same bits for any number of ranks, up to `slots`.

    The buckets of the last slot, together with the sums of the earlier slots, are reduced while its
    backward pass continues. It sends twice the bytes of float32, and needs 8 bytes of memory per
    parameter.
    """

    def __init__(self, ddp: DDP, slots: int, world: World) -> None:
        super().__init__(ddp, world)
        n, device = len(self._params), self._params[0].device
        self._totals = [
            torch.zeros(p.numel(), dtype=torch.float64, device=device) for p in self._params
        ]
        # The joined totals of each bucket's tensors; `_totals` has views of their parts.
        self._flat: dict[tuple[int, ...], Tensor] = {}
        # The spacing of a tensor's grid is 2**-exponent; 0 before the first step.
        self._exponents = torch.zeros(n, dtype=torch.int32, device=device)
        # For each slot, nats and the largest gradient of each tensor; zeros for other ranks' slots.
        self._slots = torch.zeros(slots, 1 + n, dtype=torch.float64, device=device)
        self._bits = _WHOLE - 1 - math.ceil(math.log2(slots))  # of a slot's largest number
        self._least = min(_LEAST, self._bits - 2 * _ROOM)  # fewer if there are very many slots
        self._exponent = self._next = [0] * n
        self._slot, self._targets, self._is_first = 0, 1, True  # is it this rank's first slot?

    def tensors(self) -> dict[str, Tensor]:
        """The state for checkpoints: int32 (parameter tensors), not a copy."""
        return {"sums.exponents": self._exponents}

    def begin(self, targets: int) -> float:
        """Start a step with this many targets on all ranks; returns 1, the factor of every loss."""
        self._targets, self.wait_s = targets, 0.0
        self._start(self._exponents.tolist())
        return 1.0

    def _start(self, exponents: Sequence[int]) -> None:
        self._exponent = list(exponents)
        self._slots.zero_()
        self._is_first = True

    def took(self, slot: int, nats: Tensor) -> None:
        """Add the loss of a micro-batch, in nats, before its backward pass."""
        self._slot = slot
        self._slots[slot, 0] += nats.detach()

    def close(self, slot: int) -> None:
        """Finish a slot that is not this rank's last one: add its gradients."""
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
                # only the rounding is inexact: the factor is a power of two
                whole = part.mul_(2.0 ** self._exponent[i]).round_()
                total.copy_(whole) if self._is_first else total.add_(whole)
                part.zero_()
        most = torch.maximum(-torch.stack(lows), torch.stack(highs)).double()
        index = torch.tensor(tensors, device=most.device)
        self._slots[self._slot, 1:].scatter_reduce_(0, index, most, "amax")  # NaN if any is NaN

    def _addend(self, numbers: tuple[int, ...], buffer: Tensor) -> Tensor:
        self._add(numbers)
        return self._side_by_side(numbers)

    def _take(self, numbers: tuple[int, ...], grads: list[Tensor]) -> None:
        for i, grad in zip(numbers, grads, strict=True):
            divisor = 2.0 ** self._exponent[i] * self._targets
            for part, total in _chunks(grad, self._totals[i]):
                part.copy_(total.div_(divisor))

    def _side_by_side(self, numbers: tuple[int, ...]) -> Tensor:
        """The totals of a bucket's tensors, joined. DDP rebuilds its buckets once."""
        if numbers not in self._flat:
            for other in [it for it in self._flat if set(it) & set(numbers)]:
                del self._flat[other]
            flat = self._flat[numbers] = torch.cat([self._totals[i] for i in numbers])
            parts = torch.split(flat, [len(self._totals[i]) for i in numbers])
            for i, part in zip(numbers, parts, strict=True):
                self._totals[i] = part
        return self._flat[numbers]

    def finish(self) -> float | None:
        """All ranks: the nats of the whole step; None if a grid did not fit: repeat the step."""
        slots = self._all_reduce(self._slots)
        self.wait_s += time.monotonic() - self._issued
        largest = slots[:, 1:].amax(0).tolist()  # NaN if any is NaN
        self._next = [self._fitting(*it) for it in zip(largest, self._exponent, strict=True)]
        if all(map(math.isfinite, largest)) and not self._fits(largest):
            self._start(self._next)
            for parameter in self._params:  # discard the sum on the old grid
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
        """The exponent for the largest gradient `most`; `exponent` if that is 0 or not finite."""
        if not most or not math.isfinite(most):
            return exponent
        return max(-_RANGE, min(_RANGE, self._bits - _ROOM - math.frexp(most)[1]))

    def stepped(self) -> None:
        """After a step has changed the model: keep its grids for the next step."""
        self._exponents.copy_(torch.tensor(self._next, dtype=torch.int32))


def _chunks(grad: Tensor, total: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Both tensors, flat, in parts that stay in the cache while they are processed."""
    flat = grad.view(-1)
    if len(flat) <= _CHUNK:
        return [(flat, total)]
    return zip(torch.split(flat, _CHUNK), torch.split(total, _CHUNK), strict=True)


Sums = FastSums | ExactSums


def build(ddp: DDP, c: Config, world: World) -> Sums:
    """Build the sums that the run's `reduce` selects."""
    return (ExactSums if c.reduce == "exact" else FastSums)(ddp, c.lanes, world)
