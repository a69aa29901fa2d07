"""The line of a finished step in the log: every rank makes the same one, as rank 0 may be lost."""

import time
from collections.abc import Mapping
from typing import Any

from gptddp.config import Config
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.run.progress import Progress
from gptddp.training.agree import Agreed
from gptddp.training.clock import RankSeconds


def of_step(
    c: Config,
    world: World,
    spent: RankSeconds,
    batch: Batch,
    agreed: Agreed,
    progress: Progress,
    step_s: float,
    numbers: Mapping[str, float | None],
) -> dict[str, Any]:
    """`progress`: after the step; `step_s`: of this rank; `numbers`: loss, grad_norm and lr."""
    line: dict[str, Any] = {
        "step": progress.step,
        **numbers,
        "tokens": progress.tokens,
        "tok_s": agreed.targets / (step_s + batch.wait_s),
        "data_wait_s": batch.wait_s,
        "batch_fp": f"{agreed.fp:016x}",
        "chain_fp": f"{progress.chain_fp:016x}",
        "world_size": world.world_size,
        "time": time.time(),
    }
    if c.max_time:  # without it the rate is a function of step and tokens
        line["train_s"] = agreed.train_s
    if spent.is_due:
        line |= {"phases": spent.told(), "since_s": round(spent.since_s, 3)}
    return line
