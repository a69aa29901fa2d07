"""What this rank leaves in memory if a peer is lost."""

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptddp.checkpoint.snapshot import log, remove, write
from gptddp.run.life import Life
from gptddp.run.progress import Progress

_LINES = 4096  # of the log: more than are logged between two checkpoints


class Memory:
    """What this rank leaves if a peer is lost."""

    def __init__(self, path: Path | None, life: Life) -> None:
        self.path, self.life = path, life
        self.lines: deque[dict[str, Any]] = deque(maxlen=_LINES)
        self._held: tuple[Mapping[str, torch.Tensor], Progress] | None = None
        self._lock = threading.Lock()  # the watchdog leaves it too

    def hold(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """The live state is whole from now on, on this rank as on all others."""
        self._held = tensors, progress

    def release(self) -> None:
        """The live state is about to change: until it is held again there is nothing to leave."""
        self._held = None

    def leave(self, cause: str) -> None:
        """Write the state of the last finished step; a memory that is full is a warning."""
        fault = {"cause": cause, "time": time.time()}
        with self._lock:
            held, self._held = self._held, None
            if self.path is None or held is None or held[1].step == 0:
                return
            tensors, progress = held
            try:
                write(
                    self.path, tensors, run_id=self.life.run_id, generation=self.life.generation,
                    meta=progress.to_meta(), lines=list(self.lines), fault=fault,
                )  # fmt: skip
            except OSError as error:
                log.warning("the state of step %d is not left in memory: %s", progress.step, error)

    def clear(self) -> None:
        """The state is on the storage: nothing that was left is to be taken up again."""
        if self.path is not None:
            remove(self.path)
