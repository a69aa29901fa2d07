"""The treatment of each kind of parameter by each `optimizer`: all constants in one table.

`lr`, `betas` and `weight_decay` come from the run; a recipe scales the rate by the role of a
parameter, and selects the parameters that decay.

- `adamw`: Loshchilov & Hutter 2019, for all parameters; matrices and embeddings decay.
- `muon`: Jordan et al. 2024 ("Muon: An optimizer for hidden layers in neural networks") for the
  matrices of the blocks, AdamW for the rest. Its updates have the root mean square of AdamW's (Liu
  et al. 2025, "Muon is scalable for LLM training"), so both share one `lr` and one `weight_decay`.
- `autoresearch`: the recipe of karpathy/autoresearch (228791f). `lr` is the rate of the matrices;
  the other rates are proportional to it, as in that recipe. Variance reduction: Li et al. 2025,
  "NorMuon". Cautious weight decay: Chen et al. 2025, "Cautious weight decay".
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

    like_adamw: bool = True  # scale updates to a root mean square of 0.2; else by sqrt(rows / cols)
    momentum: tuple[float, float, int] = (0.95, 0.95, 1)  # from, to, in this many steps
    variance_beta: float | None = None  # beta of the running mean square of each neuron's update
    cautious: bool = False  # a number decays only if its update also makes it smaller
    decay_ends: bool = False  # the decay falls linearly to 0 over the run


@dataclass(frozen=True)
class Recipe:
    """The treatment of each role; a role without an entry is treated as `head`."""

    adam: dict[str, Adam] = field(default_factory=dict)
    muon: Muon | None = None


_PLAIN = {role: Adam() for role in ROLES} | {
    role: Adam(decays=False) for role in ("vector", "resid", "x0")
}
# Rates of autoresearch: 0.04 for matrices, 0.6 and 0.004 for embeddings and head.
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
    """The role of a parameter, by its name and its number of dimensions.

    If the head is `tied`, the token embeddings have its role. Learned positions are treated like a
    head: no norm follows them that would tolerate another rate.
    """
    first = name.split(".")[0]
    if first == "blocks" and dim == 2:
        return "matrix"
    if dim < 2:
        return {"resid_lambdas": "resid", "x0_lambdas": "x0"}.get(first, "vector")
    return "embedding" if first in ("wte", "value_embeds") and not tied else "head"
