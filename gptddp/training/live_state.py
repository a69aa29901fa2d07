"""Each rank's copy of the unsaved records, so that the loss of rank 0 loses nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from gptddp.run.lines import Line
from gptddp.run.origin import Origin

MOST_LINES = 65536  # of the log: about 75 MB in this process


class LiveState:
    """Whether the state of this rank is whole, and the records that are not yet on disk.

    These are lines of rank 0's log and events of its ledger, of this life and of lives before it.
    Every rank keeps them, because rank 0 may be lost with its queue.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.is_whole = False  # this rank has the whole state of the last finished step
        self.is_changing = False  # half of a step is done: no state to resume from
        self.lines: dict[int, Line] = {}  # by step, in order; not known to be on disk
        self.events: Sequence[Mapping[str, Any]] = []  # of the ledger; not known to be on disk
        self._events_step = 0  # the step after which the last event was recorded

    def take_over(self, lines: Mapping[int, Line], events: Sequence[Mapping[str, Any]]) -> None:
        """Take the records of another rank, before the state is whole."""
        self.lines, self.events = dict(lines), events

    def begun(self, events: Sequence[Mapping[str, Any]], step: int) -> None:
        """Keep the first events of a rank 0 that began its records around `step`."""
        self.events, self._events_step = events, step

    def keep_event(self, event: Mapping[str, Any], step: int) -> None:
        """Keep a ledger event of rank 0, after `step`, that this rank knows too."""
        self.events, self._events_step = [*self.events, event], step

    def keep(self, line: Line) -> None:
        """Keep the line of a step until it is on disk. Beyond MOST_LINES the oldest is dropped."""
        if not self.origin.generation:  # an audit writes no log
            return
        self.lines[line["step"]] = line
        if len(self.lines) > MOST_LINES:  # rank 0 has reported that the storage fails
            del self.lines[next(iter(self.lines))]

    def kept(self) -> tuple[list[Line], list[Mapping[str, Any]]]:
        """Lines and events, for a joining rank."""
        return [*self.lines.values()], [*self.events]

    def forget(self, step: int) -> None:
        """Drop the lines up to this step, which are on disk, and the events before it."""
        while self.lines and (first := next(iter(self.lines))) <= step:
            del self.lines[first]
        if step > self._events_step:
            self.events = []
