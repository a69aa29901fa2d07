"""What each `optimizer` does with each kind of parameter: the constants, in one table.

The user's `lr`, `betas` and `weight_decay` are those of a run; a recipe multiplies the rate, by the
role of a parameter, and says which parameters decay.

- `adamw`: Loshchilov & Hutter 2019, for all parameters; matrices and embeddings decay.
- `muon`: Jordan et al. 2024 ("Muon: An optimizer for hidden layers in neural networks") for the
  matrices of the blocks, AdamW for the rest. An update has the root mean square of one of AdamW's
  (Liu et al. 2025, "Muon is scalable for LLM training"), so one `lr` and one `weight_decay` serve
  both.
- `autoresearch`: the recipe of karpathy/autoresearch (228791f). `lr` is the rate of the matrices;
  the rates of the others follow it, in the proportions of its table. Variance reduction: Li et al.
  2025, "NorMuon". Cautious weight decay: Chen et al. 2025, "Cautious weight decay".
"""

from dataclasses import dataclass, field

ROLES = ("matrix", "embedding", "head", "resid", "x0", "vector")


@dataclass(frozen=True)
class Adam:
    """AdamW for the parameters of a role."""

    rate: float = 1.0  # times `lr`
    by_width: bool = False  # and times sqrt(768 / n_embd)
    betas: tuple[float, float] | None = None  # None: the run's
    eps: float = 1e-8
    decays: bool = True


@dataclass(frozen=True)
class Muon:
    """Muon for the matrices of the blocks."""

    like_adamw: bool = True  # an update's root mean square is 0.2; else sqrt(rows / columns) counts
    momentum: tuple[float, float, int] = (0.95, 0.95, 1)  # from, to, in so many steps
    variance_beta: float | None = None  # of the running mean square of each neuron's update
    cautious: bool = False  # a number decays only where its update makes it smaller, too
    decay_ends: bool = False  # the decay goes down to 0, in a line over the run


@dataclass(frozen=True)
class Recipe:
    """What is done with each role; a role that is not named is treated as `head`."""

    adam: dict[str, Adam] = field(default_factory=dict)
    muon: Muon | None = None


_PLAIN = {role: Adam() for role in ROLES} | {
    role: Adam(decays=False) for role in ("vector", "resid", "x0")
}
# Of autoresearch's table: 0.04 for matrices, 0.6 and 0.004 for embeddings and head.
_MATRIX = 0.04
RECIPES = {
    "adamw": Recipe(_PLAIN),
    "muon": Recipe(_PLAIN, Muon()),
    "autoresearch": Recipe(
        {
            "embedding": Adam(0.6 / _MATRIX, by_width=True, eps=1e-10, decays=False),
            "head": Adam(0.004 / _MATRIX, by_width=True, eps=1e-10, decays=False),
            "resid": Adam(0.005 / _MATRIX, eps=1e-10, decays=False),
            "x0": Adam(0.5 / _MATRIX, betas=(0.96, 0.95), eps=1e-10, decays=False),
        },
        Muon(
            like_adamw=False,
            momentum=(0.85, 0.95, 300),
            variance_beta=0.95,
            cautious=True,
            decay_ends=True,
        ),
    ),
}


def role(name: str, dim: int, tied: bool) -> str:
    """What a parameter is, by its name and its number of dimensions.

    The token embeddings are the head where the model has no other (`tied`). Learned positions are
    treated like a head: their rows have no norm after them that would bear another rate.
    """
    first = name.split(".")[0]
    if first == "blocks" and dim == 2:
        return "matrix"
    if dim < 2:
        return {"resid_lambdas": "resid", "x0_lambdas": "x0"}.get(first, "vector")
    return "embedding" if first in ("wte", "value_embeds") and not tied else "head"
