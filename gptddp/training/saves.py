"""Rank 0's checkpoints: when one is due, how each save ended, and trouble with the storage."""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from gptddp.checkpoint import store
from gptddp.checkpoint.writer import Writer
from gptddp.errors import Superseded
from gptddp.flags import to_saved
from gptddp.run.history import Ledger, RunLog
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.run.recovery import unsaved_s
from gptddp.run.summary import Summary
from gptddp.training.events import Events


class Saves:
    """Rank 0 only. A failure of the storage never stops the training, and is always reported."""

    def __init__(
        self, origin: Origin, lease: Lease, log: RunLog, ledger: Ledger, events: Events
    ) -> None:
        c = origin.config
        self.trouble: str | None = None  # with the storage, as reported
        # A committed checkpoint is never ahead of the log.
        self.writer = Writer(
            Path(c.run_dir),
            origin.generation,
            run_id=origin.run_id,
            config=to_saved(c),
            parent=origin.parent,
            keep=c.keep,
            keep_every=c.keep_every,
            before_commit=self._before_commit,
            left=self._left,
        )
        self._origin, self._lease, self._events = origin, lease, events
        self._ledger, self._log = ledger, log
        self._every_s = c.checkpoint_every
        self._patience_s = min(60.0, max(1.0, 2 * c.checkpoint_every))
        self._saved_at = time.monotonic()
        self._watching = threading.Lock()

    def begin(self, tensors: Mapping[str, Tensor], recorded: Summary) -> None:
        """Prepare before the first step; `recorded`: the summary of the run so far."""
        if self._origin.source == "memory":  # short-lived rank 0s must not put off a save
            step = max((store.order(name)[1] for name in recorded.commits), default=None)
            since = recorded.began_time if step is None else recorded.saved_time
            self._events.emit("newest", step=step, since=since)
            self._saved_at -= unsaved_s(recorded)
        with suppress(OSError):  # the first save reports it
            self.writer.prepare(tensors)  # now, so that no step has to wait for it

    def is_due(self, within_s: float) -> bool:
        """Is a save due, at most `within_s` after the last, and is no save running?"""
        age_s = time.monotonic() - self._saved_at
        return age_s >= min(self._every_s, within_s) and not self.writer.busy

    def save(
        self, tensors: Mapping[str, Tensor], progress: Progress, known: Mapping[str, Any]
    ) -> None:
        """Stage a copy and let the saver commit it; the caller continues at once."""
        self._saved_at = time.monotonic()
        self.writer.submit(progress.step, tensors, progress.to_meta(), known)

    def _before_commit(self) -> None:
        self._log.sync()  # syncs the ledger first
        self._lease.check()

    def _left(self) -> dict[str, Any]:
        """Data for the saver, which may have to finish a save alone; see `Writer`."""
        events, lines = self._ledger.pending(), self._log.pending()
        return {"lease": self._lease.me, "events": events, "lines": lines}

    def save_last(
        self,
        tensors: Mapping[str, Tensor],
        progress: Progress,
        known: Mapping[str, Any],
    ) -> None:
        """Save this step unless it is saved, and wait for it. Raises the error of the save."""
        self.writer.wait()
        if not self.writer.has(progress.step):
            self.save(tensors, progress, known)
            self.writer.wait()
        self.watch()
        if self.writer.failure:
            raise self.writer.failure

    def watch(self) -> None:
        """Record finished saves; report once when the storage fails or works again.

        Raises Superseded if another life has replaced this one.
        """
        with self._watching:
            while saved := self.writer.poll():
                self._events.emit("checkpoint", **saved)
            records = self.writer, self._ledger, self._log
            trouble = next(filter(None, (it.trouble(self._patience_s) for it in records)), None)
            if bool(trouble) != bool(self.trouble):
                self._events.emit("storage", fails=bool(trouble), trouble=trouble)
            self.trouble = trouble
        if self._lease.lost or isinstance(self.writer.failure, Superseded):
            raise Superseded(self._lease.lost or str(self.writer.failure))
