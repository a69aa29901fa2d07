"""How much of a run is done: by its steps, its tokens or its time, whichever has come farthest.

A run ends with the first of its budgets that is used up: `steps`, `max_tokens` or `max_time`. The
learning rate follows how much is done, so it needs no other length than theirs.
"""

import math

from gptddp.config import Config

BUDGETS = ("steps", "max_tokens", "max_time")


def used_up(c: Config, step: int, tokens: int, train_s: float = 0.0) -> str:
    """The budget that is used up after so many steps, targets and seconds; "" where none is."""
    if step >= c.steps:
        return "steps"
    if c.max_tokens and tokens >= c.max_tokens:
        return "max_tokens"
    if c.max_time and train_s >= c.max_time:
        return "max_time"
    return ""


def last_step(c: Config, step: int, tokens: int = 0, train_s: float = 0.0) -> float:
    """The step with which the run ends if it goes on as it has so far; not a whole number.

    `step / last_step` is how much of the run is done: the largest of step / steps, tokens /
    max_tokens and train_s / max_time.
    """
    ends = [float(c.steps)]
    if c.max_tokens and tokens:
        ends.append(step * c.max_tokens / tokens)
    if c.max_time and train_s:
        ends.append(step * c.max_time / train_s)
    return min(ends)


def whole_last_step(c: Config, step: int, tokens: int = 0, train_s: float = 0.0) -> int:
    """The same, as a step that the run can end with."""
    return max(step, math.ceil(last_step(c, step, tokens, train_s)))


def shown(c: Config, step: int, tokens: int = 0, train_s: float = 0.0) -> str:
    """`12/400`; `12/~85` where another budget than that of steps is expected to end the run."""
    end = last_step(c, step, tokens, train_s)
    return f"{step}/{'~' * (end < c.steps)}{whole_last_step(c, step, tokens, train_s)}"
