"""What rank 0 writes of a life, by the code that writes it: what `status` and `top` read."""

import contextlib
import logging
from types import SimpleNamespace

from gptddp.config import Config
from gptddp.run.progress import Progress
from gptddp.training.console import Console
from gptddp.training.stalls import Stall

ORIGIN = SimpleNamespace(config=Config(steps=400, log_every=10, max_time=0.0, max_tokens=0))


@contextlib.contextmanager
def heard():
    """The lines that rank 0 writes meanwhile."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gptddp.training.console")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def of_a_life():
    """Up to a step that does not move."""
    console = Console(ORIGIN)
    with heard() as lines:
        cause = "rank 2 (demo-worker-2) has not answered for 60 s in agree (agree.py:58)"
        console.fault(1, 99, f"after step 99: {cause}")
        lines.append("life 2: from memory, step 99 of 400")
        for step in (100, 110, 120):
            line = {"step": step, "loss": 5.0 - step / 40, "lr": 1e-3, "tok_s": 44e3}
            slow = [("rank 3 (demo-worker-3)", 2.13)] if step > 100 else []
            line |= {"world_size": 4, "data_wait_s": 0.0}
            console.step(line, Progress(step, 100 * step), 1.0, 0.974, slow)
        console.stalled(Stall(121, 12.4, [3], "rank 3 (demo-worker-3) gives no sign of life"))
    return lines
