"""Warnings for settings that are allowed but rarely intended, each with a better value."""

from gptddp.config import Config


def advice(c: Config, workers: int) -> list[str]:
    """One line for each wasteful setting of a complete configuration."""
    return [line for line in (_warm_up(c), _lanes(c, workers)) if line]


def _warm_up(c: Config) -> str:
    """Is the warm-up longer than the run? With `max_time` the number of steps is unknown."""
    steps, budget, more = c.steps, f"steps {c.steps}", "--steps"
    full = c.batch * c.seq_len  # the most targets of a step
    if c.max_tokens and (of_tokens := -(-c.max_tokens // full)) < steps:
        steps, more = of_tokens, "--max-tokens"
        budget = f"the {steps} full steps of max_tokens {c.max_tokens}"
    if c.warmup_steps <= steps:
        return ""
    return (
        f"warmup_steps {c.warmup_steps} is more than {budget}: the learning rate ends at "
        f"{c.lr * steps / c.warmup_steps:.1e} and never reaches lr {c.lr:.1e}; use a "
        f"--warmup-steps of at most {steps}, or more {more}"
    )


def _lanes(c: Config, workers: int) -> str:
    """Do some workers wait in every step for others with more lanes?"""
    if not 0 < workers <= c.lanes or c.lanes % workers == 0:  # more are refused elsewhere
        return ""
    most = -(-c.lanes // workers)
    idle = 1 - c.lanes / (workers * most)
    fewer = -(-c.lanes // most)
    more = -(-c.lanes // (most - 1))
    better = f"{fewer} are as fast, and " * (fewer < workers) + f"{more} are faster"
    return (
        f"{workers} workers share {c.lanes} lanes: some have {most}, and the others wait for them, "
        f"so {idle:.1%} of the workers' time is idle; {better}; a new run may have a multiple of "
        f"{workers} as --lanes"
    )
