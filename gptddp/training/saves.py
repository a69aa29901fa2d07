"""Rank 0's checkpoints: when one is due, what became of each, and trouble with the storage."""

import math
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
from gptddp.run import summary
from gptddp.run.history import Ledger, RunLog
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.run.recovery import unsaved_s
from gptddp.run.summary import Summary
from gptddp.training.events import Events

BEGIN_S = 15.0  # for a late save to begin: a launcher that can takes one or two


class Saves:
    """Rank 0 only. No failure of the storage stops the training, and none is kept quiet."""

    def __init__(
        self, origin: Origin, lease: Lease, log: RunLog, ledger: Ledger, events: Events
    ) -> None:
        c = origin.config
        self.trouble: str | None = None  # with the storage, as told
        # A committed checkpoint never knows more steps than the log.
        self.writer = Writer(
            Path(c.run_dir),
            origin.generation,
            run_id=origin.run_id,
            config=to_saved(c),
            parent=origin.parent,
            keep=c.keep,
            keep_every=c.keep_every,
            before_commit=log.sync,  # and the ledger before it
            fence=lease.check,
        )
        self._origin, self._lease, self._events = origin, lease, events
        self._books = (self.writer, ledger, log)
        self._every_s = c.checkpoint_every
        self._patience_s = min(60.0, max(1.0, 2 * c.checkpoint_every))
        self._saved_at = time.monotonic()
        self._delegated = origin.late is not None  # to a late save
        self._late_seen = False  # in progress
        self._looking: threading.Thread | None = None
        self._saving: dict[int, Mapping[str, Any]] = {}  # what the ledger is to have of them
        self._watching = threading.Lock()

    def begin(self, tensors: Mapping[str, Tensor], recorded: Summary) -> None:
        """Before the first step; `recorded`: of the run so far."""
        # Lives that are short must not put it off for ever. A late save stands for this life's, if
        # it begins.
        if self._origin.source == "memory":
            if not self._tell_newest(recorded) and recorded.began_time is not None:
                self._events.emit("newest", step=None, since=recorded.began_time)
            most_s = math.inf if self._origin.late is None else max(self._every_s - BEGIN_S, 0.0)
            self._saved_at -= min(unsaved_s(recorded), most_s)
        self.writer.prepare(tensors)  # its buffer now, so that no step has to wait for it

    def _tell_newest(self, recorded: Summary) -> bool:
        """Into the metrics: the newest checkpoint, whoever has saved it; is there one?"""
        if not recorded.commits or recorded.saved_time is None:
            return False
        _, step = max(map(store.order, recorded.commits))
        self._events.emit("newest", step=step, since=recorded.saved_time)
        return True

    @property
    def is_due(self) -> bool:
        """Is it time for a checkpoint, and is none being written, here or by a launcher?"""
        due = time.monotonic() - self._saved_at >= self._every_s
        return due and not self.writer.busy and not self._delegated

    def delegate(self, late: bool) -> None:
        """While a late save is in progress it does what is due; then the ledger says what is."""
        self._delegated = late
        if late:
            self._saved_at = time.monotonic()
        elif self._late_seen:
            self.look_in_ledger()
        self._late_seen = late

    def look_in_ledger(self) -> None:
        """In a thread, as the disk may hang: what have launchers saved, and is another due?"""
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(
                target=self._look, args=(self._saved_at,), name="saved", daemon=True
            )
            self._looking.start()

    def _look(self, saved_at: float) -> None:
        with suppress(OSError):  # then it is due after a whole interval
            recorded = summary.read(self._origin.config.run_dir)
            self._tell_newest(recorded)
            if self._saved_at == saved_at:
                self._saved_at -= unsaved_s(recorded)

    def save(
        self, tensors: Mapping[str, Tensor], progress: Progress, known: Mapping[str, Any]
    ) -> None:
        """Stage a copy and let the writer's thread commit it; the caller goes on at once."""
        self._saved_at = time.monotonic()
        self._saving[progress.step] = known
        self.writer.submit(progress.step, tensors, progress.to_meta())

    def save_last(
        self,
        tensors: Mapping[str, Tensor],
        progress: Progress,
        known: Mapping[str, Any],
        read_back: bool,
    ) -> None:
        """Save this step unless it is saved, and wait for it. Raises what kept it from the disk.

        A stop has no time to have it read back: what it saves counts as verified later.
        """
        self.writer.read_back = read_back
        self.writer.wait()
        if not self.writer.has(progress.step):
            self.save(tensors, progress, known)
            self.writer.wait()
        self.watch()
        if self.writer.failure:
            raise self.writer.failure

    def watch(self) -> None:
        """Record the saves that have ended, and tell once when the storage fails or works again.

        Raises Superseded where this life has been found to be over.
        """
        with self._watching:
            while saved := self.writer.poll():
                known = self._saving.pop(saved.step, {})
                if saved.error:
                    self._events.emit("checkpoint", step=saved.step, error=saved.error)
                else:
                    self._events.emit("checkpoint", **saved.committed(), **known)
            troubles = (it.trouble(self._patience_s) for it in self._books)
            trouble = next(filter(None, troubles), None)
            if bool(trouble) != bool(self.trouble):
                self._events.emit("storage", fails=bool(trouble), trouble=trouble)
            self.trouble = trouble
        if self._lease.lost or isinstance(self.writer.failure, Superseded):
            raise Superseded(self._lease.lost or str(self.writer.failure))
