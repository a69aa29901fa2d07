"""The trainer with short timeouts and slow steps, and with faults that files order.

A file `<pod>.<fault>` in the run directory causes that fault within a step, and is removed. A
number in it chooses the step. With a `+` after the number the file stays, for all later steps too.
"""

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from gptddp import train
from gptddp.distributed import connect, pulse
from gptddp.distributed.process import run
from gptddp.files import write_atomic
from gptddp.flags import from_args
from gptddp.training import life, quarantine

connect.TIMEOUT_S, connect.FIRST_TIMEOUT_S = 2.0, 20.0
pulse.MARGIN_S = float(os.environ.get("HANG_MARGIN_S", pulse.MARGIN_S))
life.CHECK_EVERY = 10
connect.cpu_quota = lambda: 1  # as for several workers of plain torchrun on two CPUs
STEP_S = 0.05
POD = os.environ["POD_NAME"]
RUN = Path(from_args(sys.argv[1:]).run_dir)


def sleep(ddp: Any) -> None:
    """A hang in Python that gives up the GIL."""
    time.sleep(600)


def spin(ddp: Any) -> NoReturn:
    """A loop in Python whose thread does not give up the GIL."""
    sys.setswitchinterval(1e6)
    while True:
        pass


def stick(ddp: Any) -> None:
    """A hang in C, with the GIL."""
    sum(itertools.repeat(0))


def flip(ddp: Any) -> None:
    """Flip a bit of one parameter; not the lowest, as the next step might round it away."""
    next(ddp.parameters()).data.view(torch.int32).view(-1)[5] ^= 1 << 20


def rot(ddp: Any) -> None:
    """Flip a bit of one number of the optimizer's state."""
    optimizer = train_state["optimizer"]
    state = optimizer.state[next(ddp.parameters())]
    state["exp_avg"].view(torch.int32).view(-1)[5] ^= 1 << 20


def nan(ddp: Any) -> None:
    """Make this rank's gradient of one parameter NaN, before it is averaged."""
    handle = next(ddp.parameters()).register_hook(lambda grad: grad * torch.nan)
    handles.append(handle)


handles: list[Any] = []
train_state: dict[str, Any] = {}


def ordered(fault: str, step: int) -> bool:
    try:
        at = (RUN / f"{POD}.{fault}").read_text()
    except FileNotFoundError:
        return False
    due = not at or step == int(at.strip("+")) or (at[-1] == "+" and step >= int(at[:-1]))
    if due and not at.endswith("+"):
        (RUN / f"{POD}.{fault}").unlink()
    return due


def forward_backward(ddp: Any, batch: Any, targets: int, step: int, *rest: Any) -> Any:
    time.sleep(STEP_S)
    for fault in (sleep, spin, stick, flip, rot, nan):
        if ordered(fault.__name__, step + 1):
            fault(ddp)
    nats = real(ddp, batch, targets, step, *rest)
    while handles:
        handles.pop().remove()
    return nats


def next_batch(*args: Any) -> Any:
    if ordered("starve", pulse.step()):
        time.sleep(600)
    return real_next_batch(*args)


def build(*args: Any) -> Any:
    train_state["optimizer"] = real_build(*args)
    return train_state["optimizer"]


real, real_build = train.forward_backward, train.optim.build
train.forward_backward, train.optim.build = forward_backward, build
real_next_batch, quarantine.next_batch = quarantine.next_batch, next_batch

if __name__ == "__main__":
    write_atomic(RUN / f"{POD}.pid", str(os.getpid()).encode())
    run(train.main)
