"""The weights that a model begins with: drawn in the order of its modules, by torch's generator."""

import math

import torch
from torch import nn

from gptddp.config import Config


def as_gpt2(model: nn.Module, c: Config) -> None:
    """N(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer): Radford et al. 2019, 2.3."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.n_layer))


@torch.no_grad()
def as_autoresearch(model: nn.Module, c: Config) -> None:
    """As github.com/karpathy/autoresearch does: each block is the identity at first.

    Uniform with a standard deviation of 1/sqrt(width); residual projections and gates are 0, and
    the output is almost 0, so that the first loss is that of a guess.
    """
    bound = math.sqrt(3 / c.n_embd)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "proj.weight", "gate.weight")):
            nn.init.zeros_(parameter)
        elif name in ("resid_lambdas", "x0_lambdas"):
            nn.init.constant_(parameter, 1.0 if name == "resid_lambdas" else 0.1)
        elif name in ("wte.weight", "head.weight"):
            nn.init.normal_(parameter, std=1.0 if name == "wte.weight" else 0.001)
        elif parameter.dim() == 2:
            nn.init.uniform_(parameter, -bound, bound)
