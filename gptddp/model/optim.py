"""The optimizer of a run: AdamW, and Muon for the matrices if the run's `optimizer` uses it."""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gptddp.config import Config
from gptddp.distributed.connect import World
from gptddp.model.gpt import GPT
from gptddp.model.muon import Muon
from gptddp.model.recipes import RECIPES, Adam, role
from gptddp.model.schedule import left_at, lr_at
from gptddp.run.progress import Progress


class Optimizer:
    """AdamW for some parameters and Muon for the others, if any, as one optimizer.

    Call `prepare`, then `step`. Only `step` changes the state, and it has no collective, so a step
    is done completely or not at all.
    """

    def __init__(self, adamw: torch.optim.AdamW, muon: Muon | None) -> None:
        self._adamw, self._muon = adamw, muon
        self.param_groups: list[dict[str, Any]] = [*adamw.param_groups]
        self.param_groups += [muon.group] if muon else []
        self.state: Mapping[Any, dict[str, Tensor]] = ChainMap(
            muon.state if muon else {},
            adamw.state,  # last: it returns an empty dict for any key
        )

    def set_lr(self, c: Config, progress: Progress) -> float:
        """Set each group's rate for the next step; return the rate for the log.

        It is the same on all ranks, because `progress` is: the ranks have agreed on its train_s,
        see training/agree.py.
        """
        done = progress.step, c, progress.tokens, progress.train_s
        lr = lr_at(*done)
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["rate"]
        if self._muon:
            self._muon.schedule(lr, progress.step, c.weight_decay, left_at(*done))
        return lr

    def prepare(self) -> None:
        """All ranks: exchange the data of a step. The gradients must stay until `step`."""
        if self._muon:
            self._muon.prepare()

    def step(self) -> None:
        """Update parameters and state."""
        self._adamw.step()
        if self._muon:
            self._muon.step()

    def zero_grad(self) -> None:
        """Fill every gradient with zeros, in place."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.zero_()


def build(model: GPT, c: Config, world: World | None = None) -> Optimizer:
    """Build the optimizer `c.optimizer`; every parameter is in one group.

    Its moments exist from the start, all zeros, so that a checkpoint of any step, 0 included, has
    the same tensors and is restored by copying into them. `world`: None for a single process.
    """
    recipe, named = RECIPES[str(c.optimizer)], dict(model.named_parameters())
    named = {name: p for name, p in named.items() if p.requires_grad}
    tied = not any(name.startswith("head.") for name in named)
    roles = {name: role(name, p.dim(), tied) for name, p in named.items()}
    matrices = {n: p for n, p in named.items() if recipe.muon and roles[n] == "matrix"}
    kinds: dict[Adam, list[nn.Parameter]] = {}
    for name, p in named.items():
        if name not in matrices:
            kind = recipe.adam.get(roles[name], recipe.adam["head"])
            kinds.setdefault(kind, []).append(p)
    adamw = _adamw(kinds, c)
    muon = None
    if recipe.muon and matrices:
        stacked = {name: model.stacked(name) for name in matrices}
        muon = Muon(matrices, stacked, recipe.muon, c, world)
    return Optimizer(adamw, muon)


def _adamw(kinds: Mapping[Adam, list[nn.Parameter]], c: Config) -> torch.optim.AdamW:
    """AdamW, fused, with a group for each kind."""
    groups: list[dict[str, Any]] = [
        {
            "params": params,
            "rate": kind.rate * ((768 / c.n_embd) ** 0.5 if kind.by_width else 1.0),
            "betas": kind.betas or c.betas,
            "eps": kind.eps,
            "weight_decay": c.weight_decay if kind.decays else 0.0,
        }
        for kind, params in kinds.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, fused=True)
    for p in (p for group in groups for p in group["params"]):
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of model and optimizer, not copied, by its name in a checkpoint."""
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        for key, value in optimizer.state[p].items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors
