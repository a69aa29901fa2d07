"""The lines that rank 0 prints, by its own code, for `status` and `top` to read."""

import contextlib
import logging
from types import SimpleNamespace

from gptddp.config import Config
from gptddp.training.console import Console

ORIGIN = SimpleNamespace(config=Config(steps=400, log_every=10, max_time=0.0, max_tokens=0))


@contextlib.contextmanager
def heard():
    """The lines that rank 0 prints within it."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gptddp.training.console")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def done(step: int, loss=2.0, **fields) -> dict:
    """The event of a step of one second."""
    line = {"step": step, "loss": loss, "lr": 1e-3, "tok_s": 44e3, "tokens": 100 * step}
    line |= {"world_size": 4, "data_wait_s": 0.0}
    about = {
        "event": "step",
        "line": line,
        "step_s": 1.0,
        "train_s": 0.0,
        "owned": None,
        "slow": {},
    }
    return about | fields


def of_a_life():
    """The lines of a life, up to a step that stalls."""
    console = Console(ORIGIN)
    with heard() as lines:
        cause = "rank 2 (demo-worker-2) has not answered for 60 s in agree (agree.py:58)"
        cause = f"after step 99: {cause}"
        console({"event": "end", "generation": 1, "step": 99, "cause": cause})
        lines.append("life 2: from memory, step 99 of 400")
        for step in (100, 110, 120):
            slow = {"rank 3 (demo-worker-3)": 2.13} if step > 100 else {}
            owned = {"training": 974.0, "detection": 26.0}
            console(done(step, loss=5.0 - step / 40, slow=slow, owned=owned))
        where = "rank 3 (demo-worker-3) gives no sign of life"
        console({"event": "stall", "step": 121, "seconds": 12.4, "where": where})
    return lines
