"""What a configuration may hold, and is seldom meant: a line each, with what would be better."""

from gptddp.config import Config


def advice(c: Config, workers: int) -> list[str]:
    """One line for each thing that is allowed and wasteful, in a closed configuration."""
    notes = _warm_up(c), _final_lr(c), _old_schedule(c), _lanes(c, workers)
    return [line for line in notes if line]


def _warm_up(c: Config) -> str:
    """How long a run of a budget of time takes is not known before."""
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


def _final_lr(c: Config) -> str:
    """A part of the peak, and not a rate."""
    if c.final_lr <= 1:
        return ""
    return (
        f"final_lr {c.final_lr} is a part of the peak, and more than 1: the learning rate rises to "
        f"{c.lr * c.final_lr:.1e} at the end; use at most 1, such as 0.1"
    )


def _old_schedule(c: Config) -> str:
    """Who gives a budget expects that the rate comes to its end with it, as in any other run."""
    if not c.as_0_1 or not (c.max_tokens or c.max_time):
        return ""
    budgets = " and ".join(name for name in ("max_tokens", "max_time") if getattr(c, name))
    return (
        f"version 0.1.0 has begun this run, so its learning rate follows steps {c.steps} alone: "
        f"{budgets} may end it before, with the rate that it has then"
    )


def _lanes(c: Config, workers: int) -> str:
    """A step takes as long as the worker with the most lanes needs: how much the others wait."""
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
