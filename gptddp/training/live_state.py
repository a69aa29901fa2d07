"""The live state of this rank, and the snapshot that it leaves of it if the life ends early."""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptddp.checkpoint import snapshot
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress

_LINES = 4096  # of the log: more than are logged between two checkpoints


log = logging.getLogger(__name__)


class LiveState:
    """The tensors and the progress of this rank: whole, or about to change.

    Only while they are whole can a snapshot of them be left, and nothing else leaves one.
    """

    def __init__(self, path: Path | None, origin: Origin) -> None:
        """`path`: of the snapshot; None where no memory outlives this process."""
        self.path, self.origin = path, origin
        self.lines: deque[dict[str, Any]] = deque(maxlen=_LINES)
        self._whole: tuple[Mapping[str, torch.Tensor], Progress] | None = None
        self._lock = threading.Lock()  # the watchdog leaves it too

    def mark_whole(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """From now on it is the state of the last finished step, on this rank as on all others."""
        self._whole = tensors, progress

    def mark_changing(self) -> None:
        """It is about to change: until it is whole again there is nothing to leave."""
        with self._lock:  # a snapshot that the watchdog is leaving is finished first
            self._whole = None

    def leave_snapshot(self, cause: str) -> None:
        """Write the state of the last finished step; a memory that is full is a warning."""
        fault = {"cause": cause, "time": time.time()}
        with self._lock:
            whole, self._whole = self._whole, None
            if self.path is None or whole is None or whole[1].step == 0:
                return
            tensors, progress = whole
            try:
                snapshot.write(
                    self.path,
                    tensors,
                    run_id=self.origin.run_id,
                    generation=self.origin.generation,
                    meta=progress.to_meta(),
                    lines=list(self.lines),
                    fault=fault,
                )
            except OSError as error:
                log.warning("the state of step %d is not left in memory: %s", progress.step, error)

    def remove_snapshot(self) -> None:
        """The state is on the storage: nothing that was left is to be taken up again."""
        if self.path is not None:
            snapshot.remove(self.path)
