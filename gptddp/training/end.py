"""The end of a life: all ranks wait, ten minutes at most, for the last state to be on disk."""

import errno
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gptddp import live
from gptddp.distributed.connect import World
from gptddp.run.lines import RETRY_S
from gptddp.run.progress import Progress
from gptddp.training.recorder import Recorder
from gptddp.training.stop import StopFlag

WAIT_S = 600.0
TELL_S = 5.0  # then the wait is reported
_MEET_S = 1.0  # between two meetings of the ranks
_READ_S = 0.2  # between two meetings, while waiting for readers of the last numbers


class Ending(threading.Thread):
    """Rank 0 only: save the last state, then record how this life ended.

    A thread, because the disk may hang. It retries until it succeeds (`done`) or no try remains.
    Each recorder has one: it continues if a peer is lost meanwhile.
    """

    def __init__(
        self, recorder: Recorder, tensors: Mapping[str, Tensor], progress: Progress, cause: str
    ) -> None:
        super().__init__(name="ending", daemon=True)
        self.done = False
        self.recorder, self._tensors = recorder, tensors
        self._progress, self._cause = progress, cause
        self._give_up = threading.Event()

    def wait(self, seconds: float, last_try: bool) -> None:
        """Wait this long at most; `last_try`: allow no later attempt. Raises Superseded."""
        if last_try:
            self._give_up.set()
        self.join(seconds)
        self.recorder.saves.watch()

    def run(self) -> None:
        recorder, now = self.recorder, self._progress
        where, error = "no step was done", None
        if now.step > recorder.origin.step or recorder.origin.source == "memory":
            state = self._tensors, now, recorder.of_step(now)
            error = self._insist(lambda: recorder.saves.save_last(*state))
            where = error or f"checkpoint {recorder.saves.writer.parent} is saved"
        if error is None or self._cause == "stopped":
            error = self._record(where) or error
            recorder.lease.release()
        self.done = error is None

    def _record(self, where: str) -> str | None:
        """Record the end, and the results of a finished run; return the disk's error, if any."""
        recorder, now = self.recorder, self._progress
        stop: dict[str, Any] = {"step": now.step, "cause": self._cause, **recorder.of_step(now)}
        stop |= {"tokens": now.tokens, "train_s": now.train_s}
        if self._cause != "stopped":
            stop["results"] = recorder.results(now)
        recorder.events.emit("stop", **stop, since_s=round(recorder.spent.since_s, 3))
        error = self._insist(recorder.log.sync)  # syncs the ledger first
        if error is None and self._cause != "stopped":
            recorder.copy_finished(stop)
        ended = {"step": now.step, "cause": self._cause, "where": where}
        recorder.events.emit("ended", **ended, results=stop.get("results"))
        return error

    def _insist(self, work: Callable[[], None]) -> str | None:
        """Retry `work` until it succeeds; return the error if no try remains."""
        while True:
            try:
                work()
                return None
            except OSError as error:
                if self._give_up.wait(RETRY_S):
                    return str(error)
            except Exception as error:  # a retry cannot help
                return str(error)


def save_last(
    ending: Ending | None, world: World, asked: Callable[[], bool], step: int, stopped: bool
) -> bool:
    """All ranks: wait for the last checkpoint and the records; False if a stop ended the wait.

    The ranks meet every second, so no collective times out while rank 0 waits for the disk. A stop
    lets the attempt in flight finish and allows no further one. Raises OSError after ten minutes.
    """
    began, reported = time.monotonic(), False
    while True:
        if ending:
            ending.wait(_MEET_S, last_try=stopped)
        waited_s = time.monotonic() - began
        busy = ending is not None and ending.is_alive() and waited_s < WAIT_S
        flags = [busy, ending is not None and not ending.done, asked()]
        waits, unsaved, stops = world.all_reduce(torch.tensor(flags, dtype=torch.int64)).tolist()
        stopped = stopped or stops > 0
        if not unsaved:
            return True
        if ending and not reported and waits and waited_s > TELL_S:
            reported = True
            about = {"limit_s": WAIT_S, "stopped": stopped}
            ending.recorder.events.emit("waiting", step=step, **about)
        if not waits and stopped:
            return False
        if not waits:
            trouble = ending.recorder.saves.trouble if ending else "see rank 0's log"
            raise OSError(errno.EIO, f"the last checkpoint cannot be written: {trouble}")


def wait_for_readers(recorder: Recorder | None, world: World, stop: StopFlag) -> None:
    """All ranks: wait until Prometheus and a tracker have the last numbers, or a rank must stop.

    They wait together: once the first pod exits, the operator deletes the others.
    """
    if recorder:
        live.phase("waiting until Prometheus or the tracker has the last numbers")
        recorder.last_numbers()
    while True:
        flags = [recorder is not None and recorder.awaits_readers, stop.asked]
        waits, stops = world.all_reduce(torch.tensor(flags, dtype=torch.int64)).tolist()
        if stops or not waits:
            return
        time.sleep(_READ_S)
