"""The learning rate, a pure function of the completed fraction of the run: equal on all ranks."""

import math

from gptddp.budget import last_step
from gptddp.config import Config


def lr_at(step: int, c: Config, tokens: int = 0, train_s: float = 0.0) -> float:
    """Learning rate of step `step` (from 0): linear warm-up, then down to final_lr * lr.

    The warm-up is counted in steps. The schedule ends with the run: at `steps`, or earlier, as
    extrapolated from the targets and seconds used so far. It reaches its end when a budget is used
    up. After the warm-up it never rises, because the completed fraction never falls.
    """
    if step < c.warmup_steps:
        return c.lr * (step + 1) / c.warmup_steps
    end = last_step(c, step, tokens, train_s)
    part = min(1.0, (step - c.warmup_steps) / max(1, end - c.warmup_steps))
    if c.schedule == "cosine":  # Loshchilov & Hutter 2017, without restarts
        factor = 0.5 * (1 + math.cos(math.pi * part))
    elif c.schedule == "linear":
        factor = 1 - part
    else:  # wsd (Hu et al. 2024, "MiniCPM"): the peak, then linear in the last part of the run
        factor = min(1.0, max(0.0, 1 - step / max(1, end)) / c.warmdown) if c.warmdown else 1.0
    return c.lr * (c.final_lr + (1 - c.final_lr) * factor)


def left_at(step: int, c: Config, tokens: int = 0, train_s: float = 0.0) -> float:
    """The remaining fraction of the run before step `step`, from 1 to 0."""
    return max(0.0, 1 - step / max(1.0, last_step(c, step, tokens, train_s)))
