"""Muon for the matrices of the blocks: each rank computes some updates, all ranks apply all.

Jordan et al. 2024: an update is the nearest orthogonal matrix to the gradient's momentum. Its
products cost more than all other work of an optimizer, so the ranks divide the matrices among them.
The momentum is on every rank, like AdamW's moments: every rank has the complete state.

A step has two halves. `prepare`, with the only collective, changes only its own buffers: if a peer
is lost in the middle of it, the state of the last step is intact. `step` then applies the updates,
on each rank separately.

torch.optim.Muon (torch 2.15) is not used: each rank would compute all updates, and a matrix is
changed before the update of the next is known; always in bf16, with one triple of coefficients for
all iterations, and without the variance reduction and the cautious decay of `autoresearch`.
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

# Coefficients of x -> a x + b x^3 + c x^5, applied in turn to each singular value: Polar Express
# (Amsel et al. 2025) with five steps. Each polynomial is optimal for the interval that the one
# before it produces. The fixed coefficients of Jordan et al. 2024 produce 0.7 to 1.2.
COEFFICIENTS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
_ROOM = 1.02  # margin: rounding must not lift the largest singular value over 1
# In fp32 the squares of numbers below 1e-23 are 0, and so is their norm. Momentum becomes so small
# in 1000 steps without gradients: divided by that norm it would be NaN two iterations later.
_SMALLEST = 1e-15


@dataclass
class Matrix:
    """One matrix: a parameter, or those rows of a parameter that form a matrix."""

    parameter: nn.Parameter
    rows: slice
    momentum: Tensor  # (rows, columns), of the parameter's dtype
    variance: Tensor | None  # (rows, 1); (1, columns) for a matrix that is wider than high
    place: slice = field(default_factory=lambda: slice(0))  # of its update in all ranks' updates
    rank: int = 0  # the rank that computes its update

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad[self.rows]


class Muon:
    """The optimizer of the matrices, with their state.

    `stacked`: by name, the heights of the matrices that are stacked in a parameter: queries, keys
    and values are orthogonalised separately. `world`: None for a single process. Updates are sent
    as bf16, and rounded to it in any world: an error of 0.4 % of a number, where the iterations
    have 14 %.
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
        self._shares = (0, 0)  # rank and world size for which the matrices are assigned

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
        """Assign the matrices to the ranks of this world, and make the buffers for updates."""
        part = _lay_out(self._matrices, world_size)
        self._mine = [it for it in self._matrices if it.rank == rank]
        device = self._matrices[0].momentum.device
        self._updates = torch.zeros(world_size * part, dtype=torch.bfloat16, device=device)
        self._made = torch.zeros(part, dtype=torch.bfloat16, device=device)
        self._from, self._shares = rank * part, (rank, world_size)

    def schedule(self, lr: float, step: int, weight_decay: float, remaining: float) -> None:
        """Set rate, momentum and decay of step `step` (from 0); remaining: of the run, 1 to 0."""
        begin, end, steps = self._recipe.momentum
        part = min(1.0, step / steps)
        self.group["lr"] = lr
        self.group["momentum"] = (1 - part) * begin + part * end
        self.group["weight_decay"] = weight_decay * (remaining if self._recipe.decay_ends else 1.0)

    @torch.no_grad()
    def prepare(self) -> None:
        """All ranks: compute each update on one rank and gather all; no state changes."""
        shares = (self._world.rank, self._world.world_size) if self._world else (0, 1)
        if shares != self._shares:  # at the start, and in a new world
            self._share_out(*shares)
        beta = self.group["momentum"]
        for it in self._mine:
            momentum = it.momentum.lerp(it.gradient, 1 - beta)
            ahead = it.gradient.lerp(momentum, beta)  # Nesterov momentum
            place = slice(it.place.start - self._from, it.place.stop - self._from)
            self._made[place] = orthogonal(ahead, self._dtype).reshape(-1)
            pulse.beat()
        if self._world is None or shares[1] == 1:
            self._updates.copy_(self._made)
        else:
            self._world.gather_parts(self._made, self._updates)  # all ranks

    @torch.no_grad()
    def step(self) -> None:
        """Apply the updates that `prepare` computed from these gradients."""
        for it in self._matrices:
            it.momentum.lerp_(it.gradient, 1 - self.group["momentum"])
            update = self._updates[it.place].view(it.momentum.shape).to(it.momentum.dtype)
            if it.variance is not None:
                update = self._evened(update, it.variance)
            self._take(update, it.parameter.detach()[it.rows])

    def _evened(self, update: Tensor, variance: Tensor) -> Tensor:
        """NorMuon: divide each neuron's update by its running root mean square, keep the norm.

        A neuron is a row, or a column if there are fewer rows than columns.
        """
        assert self._recipe.variance_beta is not None
        along = 1 if variance.size(1) == 1 else 0
        square = update.square().mean(along, keepdim=True)
        variance.lerp_(square, 1 - self._recipe.variance_beta)
        even = update * variance.clamp_min(1e-10).rsqrt()
        return even.mul_(update.norm() / even.norm().clamp_min(1e-10))

    def _take(self, update: Tensor, weight: Tensor) -> None:
        """Apply the update to a matrix."""
        rows, columns = weight.shape
        lr, decay = self.group["lr"], self.group["weight_decay"]
        # An orthogonal matrix has the root mean square 1 / sqrt(its larger side).
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
    """Assign each matrix a rank and its update a place; return the length of a rank's part.

    All parts have the same length, because one collective gathers them; shorter ones are padded.
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
    """The rank of each task: the most costly first, each to the rank with the least load so far.

    Graham 1969: the largest load is at most 4/3 of the optimum.
    """
    load, owner = [0] * world_size, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = load.index(min(load))
        load[owner[i]] += costs[i]
    return owner


# -- the nearest orthogonal matrix by Newton-Schulz iterations, which need only matrix products ----


def orthogonal(g: Tensor, dtype: torch.dtype) -> Tensor:
    """Approximate U V^T of g = U S V^T: g (rows, columns) float -> the same shape in `dtype`.

    Singular values of at least 1/1000 of the Frobenius norm become 0.86 to 1.14; smaller ones stay
    smaller. Zeros stay zeros; below a norm of 1e-15 of g, the norm of the update falls with it. A
    processor with bf16 is faster in it than in fp32 (AMD Zen 5: 1.5 and 2.3 ms for 512 x 128 on one
    thread), with the same error (0.0888 and 0.0887 of the norm of U V^T). The bits depend only on
    shape, values, dtype and threads.
    """
    wide = g.size(0) <= g.size(1)
    x: Tensor = (g / (g.norm() * _ROOM).clamp_min(_SMALLEST)).to(dtype)
    x = x if wide else x.t().contiguous()  # so that gram has the smaller side
    for a, b, c in COEFFICIENTS:
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.t()


def cost(rows: int, columns: int) -> int:
    """Multiplications of one iteration."""
    small, large = sorted((rows, columns))
    return small * small * (2 * large + small)
