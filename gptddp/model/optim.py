"""AdamW over two parameter groups, and the learning rate: a pure function of what is done."""

import math

import torch
from torch import Tensor, nn

from gptddp.budget import last_step
from gptddp.config import Config
from gptddp.run.progress import Progress


def build(model: nn.Module, c: Config) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019), fused; only matrices and embeddings decay.

    Its moments exist from the start, all zeros, so that a checkpoint of any step, 0 included, has
    the same tensors and is restored by copying into them.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": c.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=c.lr, betas=c.betas, fused=True)
    for p in params:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def lr_at(step: int, c: Config, tokens: int = 0, train_s: float = 0.0) -> float:
    """Learning rate of step `step` (from 0): linear warm-up, then a cosine to final_lr * lr.

    The warm-up is counted in steps. The cosine ends where the run does: with `steps`, or before,
    as the targets and the seconds that the steps so far have used let expect. It is at its end when
    a budget is used up, and never rises, as neither a step nor what is done can take it back.
    """
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    by_steps_alone = c.as_0_1  # a run of version 0.1.0 goes on as it was begun
    end = c.steps if by_steps_alone else last_step(c, step, tokens, train_s)
    part = min(1.0, (step - c.warmup_steps) / max(1, end - c.warmup_steps))
    return c.lr * (c.final_lr + (1 - c.final_lr) * 0.5 * (1 + math.cos(math.pi * part)))


def set_lr(optimizer: torch.optim.Optimizer, c: Config, progress: Progress) -> float:
    """Give every group of the optimizer the learning rate of the next step, and return it.

    The same on all ranks, as `progress` is: its train_s has been agreed on, see training/agree.py.
    """
    lr = lr_at(progress.step, c, progress.tokens, progress.train_s)
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of model and optimizer by the name that a checkpoint gives it: no copies."""
    tensors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        tensors[f"model.{name}"] = p.detach()
        for key, value in optimizer.state[p].items():
            tensors[f"optim.{name}.{key}"] = value
    return tensors
