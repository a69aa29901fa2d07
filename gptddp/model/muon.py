"""Muon for the matrices of the blocks: each rank makes a share of the updates, all ranks take all.

Jordan et al. 2024: an update is the nearest orthogonal matrix to the gradient's momentum. Its
products cost more than all other work of an optimizer, so the ranks share the matrices out. The
momentum is on every rank, like AdamW's moments: any rank's state is the run's.

A step has two halves. `prepare`, with the one collective, changes nothing but buffers of its own:
a peer that is lost in the middle of it leaves the step before, whole. `step` then takes the
updates, on each rank by itself.

torch.optim.Muon (torch 2.15) is not used: each rank would make all updates, and a matrix is changed
before the update of the next is known; always in bf16, with one triple of coefficients for all
iterations, and without the variance reduction and the cautious decay of `autoresearch`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gptddp.config import Config
from gptddp.distributed import pulse
from gptddp.distributed.connect import World
from gptddp.model import recipes

# Of x -> a x + b x^3 + c x^5, applied one after the other to each singular value: the Polar Express
# (Amsel et al. 2025) of five steps. Each is the best polynomial for the interval that the one
# before it leaves, where the fixed coefficients of Jordan et al. 2024 leave 0.7 to 1.2.
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_ROOM = 1.02  # the largest singular value is below 1 by it, as rounding must not lift it over 1
# In fp32 the squares of numbers below 1e-23 are 0, and so is their norm. Momentum comes there in
# 1000 steps without gradients: divided by that norm it would be huge, and NaN two iterations later.
_SMALLEST = 1e-15


@dataclass
class Matrix:
    """One matrix: a parameter, or the rows of one that are a matrix by themselves."""

    parameter: nn.Parameter
    rows: slice
    momentum: Tensor  # (rows, columns), of the parameter's dtype
    variance: Tensor | None  # (rows, 1), or (1, columns) of a matrix that is wider than high
    place: slice = field(default_factory=lambda: slice(0))  # of its update, in those of all ranks
    rank: int = 0  # that makes its update

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad[self.rows]


class Muon:
    """The matrices by name, and their state.

    `stacked`: by name, the rows of each of the matrices that a parameter has one below the other:
    queries, keys and values are orthogonal each by itself. `world`: None for a process alone. The
    updates travel as bf16, and are rounded to it in any world: 0.4 % of a number, where the
    iterations leave 14 %.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        stacked: Mapping[str, Sequence[int]],
        recipe: recipes.Muon,
        c: Config,
        world: World | None,
    ) -> None:
        self._recipe, self._world = recipe, world
        self._dtype = torch.bfloat16 if c.precision == "bf16" else torch.float32
        self.group: dict[str, Any] = {
            "params": list(params.values()),
            "lr": c.lr,
            "weight_decay": c.weight_decay,
            "momentum": recipe.momentum[0],
        }
        # All zeros from the start, like AdamW's moments; the names are those of torch.optim.Muon.
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {
            p: {"momentum_buffer": torch.zeros_like(p)} for p in params.values()
        }
        self._matrices = [it for name, p in params.items() for it in self._parts(p, stacked[name])]
        self._shares = (0, 0)  # rank and world size for which the matrices are shared out

    def _parts(self, p: nn.Parameter, heights: Sequence[int]) -> Iterator[Matrix]:
        first, state = 0, self.state[p]
        for i, height in enumerate(heights):
            rows = slice(first, first + height)
            momentum, variance = state["momentum_buffer"][rows], None
            if self._recipe.variance_beta is not None:
                shape = (height, 1) if height >= p.size(1) else (1, p.size(1))
                variance = torch.zeros(shape, dtype=p.dtype, device=p.device)
                suffix = f".{i}" if len(heights) > 1 else ""
                state[f"second_momentum_buffer{suffix}"] = variance
            yield Matrix(p, rows, momentum, variance)
            first += height

    def _share_out(self, rank: int, world_size: int) -> None:
        """Whose work each matrix is in this world, and the buffers that the updates need there."""
        part = _lay_out(self._matrices, world_size)
        self._mine = [it for it in self._matrices if it.rank == rank]
        device = self._matrices[0].momentum.device
        self._updates = torch.zeros(world_size * part, dtype=torch.bfloat16, device=device)
        self._made = torch.zeros(part, dtype=torch.bfloat16, device=device)
        self._from, self._shares = rank * part, (rank, world_size)

    def schedule(self, lr: float, step: int, weight_decay: float, remaining: float) -> None:
        """What the next step (from 0) is done with; remaining: of the run, from 1 to 0."""
        begin, end, steps = self._recipe.momentum
        part = min(1.0, step / steps)
        self.group["lr"] = lr
        self.group["momentum"] = (1 - part) * begin + part * end
        self.group["weight_decay"] = weight_decay * (remaining if self._recipe.decay_ends else 1.0)

    @torch.no_grad()
    def prepare(self) -> None:
        """All ranks: the updates of the step, made by one rank each; no state changes."""
        shares = (self._world.rank, self._world.world_size) if self._world else (0, 1)
        if shares != self._shares:  # at the start, and in another world
            self._share_out(*shares)
        beta = self.group["momentum"]
        for it in self._mine:
            momentum = it.momentum.lerp(it.gradient, 1 - beta)
            ahead = it.gradient.lerp(momentum, beta)  # Nesterov's
            place = slice(it.place.start - self._from, it.place.stop - self._from)
            self._made[place] = orthogonal(ahead, self._dtype).reshape(-1)
            pulse.beat()
        if self._world is None or shares[1] == 1:
            self._updates.copy_(self._made)
        else:
            self._world.gather_parts(self._made, self._updates)  # all ranks

    @torch.no_grad()
    def step(self) -> None:
        """Take the updates that `prepare` has left, which are those of these gradients."""
        for it in self._matrices:
            it.momentum.lerp_(it.gradient, 1 - self.group["momentum"])
            update = self._updates[it.place].view(it.momentum.shape).to(it.momentum.dtype)
            if it.variance is not None:
                update = self._evened(update, it.variance)
            self._take(update, it.parameter.detach()[it.rows])

    def _evened(self, update: Tensor, variance: Tensor) -> Tensor:
        """NorMuon: each neuron's update by its running root mean square, at the same norm in all.

        A neuron is a row, or a column where there are fewer rows than columns.
        """
        assert self._recipe.variance_beta is not None
        along = 1 if variance.size(1) == 1 else 0
        square = update.square().mean(along, keepdim=True)
        variance.lerp_(square, 1 - self._recipe.variance_beta)
        even = update * variance.clamp_min(1e-10).rsqrt()
        return even.mul_(update.norm() / even.norm().clamp_min(1e-10))

    def _take(self, update: Tensor, weight: Tensor) -> None:
        """Change a matrix by its update."""
        rows, columns = weight.shape
        lr, decay = self.group["lr"], self.group["weight_decay"]
        # The root mean square of an orthogonal matrix is 1 / sqrt(its larger side).
        scale = 0.2 * math.sqrt(max(rows, columns))
        if not self._recipe.like_adamw:
            scale = math.sqrt(max(1.0, rows / columns))
            decay *= scale
        if self._recipe.cautious:
            decayed = weight * (update * weight >= 0)
            weight.sub_(decayed, alpha=lr * decay)
        else:
            weight.mul_(1 - lr * decay)
        weight.sub_(update, alpha=lr * scale)


def _lay_out(matrices: Sequence[Matrix], world_size: int) -> int:
    """Give each matrix its rank, and its update a place; numbers in the part of each rank.

    The parts are equal, as one collective gathers them: shorter ones are filled up.
    """
    ranks = shared_out([cost(*it.momentum.shape) for it in matrices], world_size)
    filled = [0] * world_size
    for it, rank in zip(matrices, ranks, strict=True):
        it.rank = rank
        it.place = slice(filled[rank], filled[rank] + it.momentum.numel())
        filled[rank] = it.place.stop
    part = max(filled)
    for it in matrices:
        begin = it.rank * part
        it.place = slice(begin + it.place.start, begin + it.place.stop)
    return part


def shared_out(costs: Sequence[int], world_size: int) -> list[int]:
    """The rank of each piece of work: the most costly first, to whoever has least so far.

    Graham 1969: no rank has more than 4/3 of what the best sharing would give it.
    """
    load, owner = [0] * world_size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


# -- the nearest orthogonal matrix, by Newton-Schulz iterations: products of matrices alone --------


def orthogonal(g: Tensor, dtype: torch.dtype) -> Tensor:
    """U V^T of g = U S V^T, about: g (rows, columns) float -> the same shape in `dtype`.

    Singular values from 1/1000 of the Frobenius norm on become 0.86 to 1.14; smaller ones stay
    smaller. Zeros stay zeros, and where the norm of g falls below 1e-15, that of the update falls
    with it. In bf16 it takes half the time of fp32 on a processor that has it (AMD Zen 5: 1.5 and
    2.3 ms for 512 x 128 on one thread), and is as near (0.0888 and 0.0887 of the norm of U V^T).
    The bits depend on shape, values, dtype and threads alone.
    """
    wide = g.size(0) <= g.size(1)
    x: Tensor = (g / (g.norm() * _ROOM).clamp_min(_SMALLEST)).to(dtype)
    x = x if wide else x.t().contiguous()  # the products are then of the smaller side
    for a, b, c in COEFFICIENTS:
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.t()


def cost(rows: int, columns: int) -> int:
    """Multiplications of one iteration."""
    small, large = sorted((rows, columns))
    return small * small * (2 * large + small)
