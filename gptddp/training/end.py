"""The end of a life: no rank leaves before the last state is safe, however long the disk takes."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gptddp.distributed.connect import World
from gptddp.run.progress import Progress
from gptddp.training.memory import Memory
from gptddp.training.recorder import Recorder

WAIT_S = 600.0
TELL_S = 5.0  # then the wait is told, and the state is left in memory too

log = logging.getLogger(__name__)


def save_last(
    recorder: Recorder | None, memory: Memory, world: World, asked: Callable[[], bool],
    tensors: dict[str, Tensor], progress: Progress, cause: str,
) -> bool:  # fmt: skip
    """All ranks: wait for the last checkpoint and the books; False if a stop has ended the wait.

    The ranks meet every second, so no collective times out while rank 0 waits for the disk. A stop
    lets the attempt in flight finish and allows no other. Raises OSError after ten minutes: the
    next life tries again, with the state from memory where it could be left.
    """
    work: Any = (tensors, progress, cause)
    thread = threading.Thread(target=recorder.end, args=work, daemon=True) if recorder else None
    if thread:
        thread.start()
    began, told, stopped = time.monotonic(), False, cause == "stopped"
    while True:
        if recorder and thread:
            if stopped:
                recorder.give_up.set()
            thread.join(1.0)
            recorder.watch()
        waited_s = time.monotonic() - began
        busy = thread is not None and thread.is_alive() and waited_s < WAIT_S
        flags = [busy, recorder is not None and not recorder.ended, asked()]
        waits, unsaved, stops = world.all_reduce(torch.tensor(flags, dtype=torch.int64)).tolist()
        stopped = stopped or stops > 0
        if not unsaved:
            return True
        if not told and (not waits or waited_s > TELL_S):
            told = True
            memory.leave(f"the storage has not taken step {progress.step}, the last of its life")
            if waits and recorder:
                log.warning(
                    "step %d was the last; waiting for the storage, at most %.0f minutes%s",
                    progress.step, WAIT_S / 60, ", or until the end of the grace period" * stopped,
                )  # fmt: skip
        if not waits and stopped:
            return False
        if not waits:
            why = recorder.trouble if recorder else "rank 0 says why"
            raise OSError(errno.EIO, f"the last checkpoint cannot be written: {why}")
