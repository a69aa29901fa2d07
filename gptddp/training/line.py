"""The line of a step in the log: every rank makes the same one, as rank 0 may be lost."""

import time
from collections.abc import Mapping
from typing import Any

from gptddp.data.loader import Batch
from gptddp.training.agree import Agreed
from gptddp.training.parts import LifeParts


def line_of(
    life: LifeParts,
    batch: Batch,
    agreed: Agreed,
    step_s: float,
    numbers: Mapping[str, float | None],
) -> dict[str, Any]:
    """Of the step that is just finished; `step_s`: without the wait for its rows."""
    now, spent = life.progress, life.spent
    line: dict[str, Any] = {
        "step": now.step,
        **numbers,
        "tokens": now.tokens,
        "tok_s": agreed.targets / (step_s + batch.wait_s),
        "data_wait_s": batch.wait_s,
        "batch_fp": f"{agreed.fp:016x}",
        "chain_fp": f"{now.chain_fp:016x}",
        "world_size": life.world.world_size,
        "time": time.time(),
    }
    if life.config.max_time:  # without it the rate is a function of step and tokens
        line["train_s"] = agreed.train_s
    if spent.is_due:
        line |= {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3)}
    return line
