"""The completed fraction of a run, by the budget that is closest to its end.

A run ends when one of its budgets is used up: `steps`, `max_tokens` or `max_time`. The schedule of
the learning rate follows the completed fraction.
"""

import math

from gptddp.config import Config

BUDGETS = ("steps", "max_tokens", "max_time")


def used_up(c: Config, step: int, tokens: int, train_s: float = 0.0) -> str:
    """The budget that is used up after this many steps, targets and seconds; "": none."""
    if step >= c.steps:
        return "steps"
    if c.max_tokens and tokens >= c.max_tokens:
        return "max_tokens"
    if c.max_time and train_s >= c.max_time:
        return "max_time"
    return ""


def last_step(c: Config, step: int, tokens: int = 0, train_s: float = 0.0) -> float:
    """The expected last step at the present pace, not rounded.

    `step / last_step` is the completed fraction: the largest of step / steps, tokens / max_tokens
    and train_s / max_time.
    """
    ends = [float(c.steps)]
    if c.max_tokens and tokens:
        ends.append(step * c.max_tokens / tokens)
    if c.max_time and train_s:
        ends.append(step * c.max_time / train_s)
    return min(ends)


def whole_last_step(c: Config, step: int, tokens: int = 0, train_s: float = 0.0) -> int:
    """`last_step`, rounded up to a step at which the run can end."""
    return max(step, math.ceil(last_step(c, step, tokens, train_s)))


def shown(c: Config, step: int, tokens: int = 0, train_s: float = 0.0) -> str:
    """`12/400`; `12/~85` if another budget is expected to end the run before `steps`."""
    end = last_step(c, step, tokens, train_s)
    return f"{step}/{'~' * (end < c.steps)}{whole_last_step(c, step, tokens, train_s)}"
