"""The live state of this rank, and the snapshot that it leaves of it if the life ends early."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gptddp.checkpoint import snapshot
from gptddp.run.lines import Line
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.run.recovery import UNKNOWN
from gptddp.training.clock import RankSeconds

MOST_LINES = 65536  # of the log: about 25 MB in a snapshot, and three times that in this process

log = logging.getLogger(__name__)


class LiveState:
    """The tensors and the progress of this rank: whole, or about to change.

    Only while they are whole can a snapshot of them be left, and nothing else leaves one. With them
    goes what rank 0's log and ledger have of this life, and of those before it, that is not yet on
    the disk: every rank keeps it, as rank 0 may be lost with its queue.
    """

    def __init__(self, path: Path | None, origin: Origin, spent: RankSeconds) -> None:
        """`path`: of the snapshot; None where no memory outlives this process."""
        self.path, self.origin, self.spent = path, origin, spent
        self.lines: dict[int, Line] = {}  # by step, in order: not known to be on the disk
        self.events: Sequence[Mapping[str, Any]] = []  # of the ledger, likewise
        self.identity: Mapping[str, Any] = {}  # the life's id, and its pods by rank
        self._events_step = 0  # after which the last of them was recorded
        self._pending: Callable[[], list[dict[str, Any]]] | None = None
        self._overflowed = False
        self._whole: tuple[Mapping[str, torch.Tensor], Progress] | None = None
        self._lock = threading.Lock()  # the watchdog leaves it too

    def take_over(self, lines: Mapping[int, Line], events: Sequence[Mapping[str, Any]]) -> None:
        """What lives before this one have handed on: before the state is whole."""
        self.lines, self.events = dict(lines), events

    def begun(
        self,
        events: Sequence[Mapping[str, Any]],
        pending: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        """Rank 0 has recorded how this life begins, and these events are not yet on its disk.

        `pending`: on rank 0, what its ledger has not yet there, at any time.
        """
        self.events, self._events_step, self._pending = events, self.origin.step, pending

    def keep_event(self, event: Mapping[str, Any], step: int) -> None:
        """What rank 0 records in the ledger after `step`, where this rank knows it as well."""
        self.events, self._events_step = [*self.events, event], step

    def keep(self, line: Line) -> None:
        """The line of a step, until it is on the disk. Of too many the first are dropped."""
        if self.path is None:
            return
        self.lines[line["step"]] = line
        if len(self.lines) > MOST_LINES:
            first = next(iter(self.lines))
            del self.lines[first]
            if self._pending and not self._overflowed:  # rank 0 says it, once a life
                log.error(
                    "the disk has not taken the log for %d steps: if rank 0 is lost now, the log "
                    "will lack steps from %d on; mend the volume of the run",
                    MOST_LINES,
                    first,
                )
            self._overflowed = True

    def forget(self, step: int) -> None:
        """The log is on the disk up to this step, and with it the events before it."""
        with self._lock:  # a snapshot that the watchdog is leaving is finished first
            while self.lines and (first := next(iter(self.lines))) <= step:
                del self.lines[first]
        if step > self._events_step:
            self.events = []

    def mark_whole(self, tensors: Mapping[str, torch.Tensor], progress: Progress) -> None:
        """From now on it is the state of the last finished step, on this rank as on all others."""
        self._whole = tensors, progress

    def mark_changing(self) -> None:
        """It is about to change: until it is whole again there is nothing to leave."""
        with self._lock:  # a snapshot that the watchdog is leaving is finished first
            self._whole = None

    def leave_snapshot(self, cause: str, closed: str = "") -> None:
        """Write the state of the last finished step, once; a memory that is full is a warning.

        `closed`: where a connection was closed, if it is not known which rank was lost.
        """
        with self._lock:
            whole, self._whole = self._whole, None
            self._write(whole, cause, {**self.identity, "closed": closed} if closed else {})

    def copy(self) -> None:
        """The same for a late save, while this life goes on.

        Should none of its ranks leave another, it is as if this one had been left without a word.
        """
        with self._lock:
            self._write(self._whole, UNKNOWN)

    def _write(
        self,
        whole: tuple[Mapping[str, torch.Tensor], Progress] | None,
        cause: str,
        closed: Mapping[str, Any] | None = None,
    ) -> None:
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
                lines=[dict(line) for line in self.lines.values()],
                events=self._pending() if self._pending else self.events,
                fault={
                    "cause": cause,
                    "time": time.time(),
                    "generation": self.origin.generation,
                    "phases": self.spent.by_phase(),
                    "since_s": round(self.spent.since_s, 3),
                    **(closed or {}),
                },
            )
        except OSError as error:
            log.warning("the state of step %d is not left in memory: %s", progress.step, error)

    def remove_snapshot(self) -> None:
        """The state is on the storage: nothing that was left is to be taken up again."""
        if self.path is not None:
            snapshot.remove(self.path)
