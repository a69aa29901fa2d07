"""What every rank keeps of the live state, so that the loss of rank 0 loses nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from gptddp.run.lines import Line
from gptddp.run.origin import Origin

MOST_LINES = 65536  # of the log: about 75 MB in this process


class LiveState:
    """The state of this rank: whole, or about to change.

    With it goes what rank 0's log and ledger have of this life, and of those before it, that is not
    yet on the disk: every rank keeps it, as rank 0 may be lost with its queue.
    """

    def __init__(self, origin: Origin) -> None:
        self.origin = origin
        self.is_whole = False  # that of the last finished step, on this rank as on all others?
        self.is_changing = False  # half of a step is done: then there is nothing to go on from
        self.lines: dict[int, Line] = {}  # by step, in order: not known to be on the disk
        self.events: Sequence[Mapping[str, Any]] = []  # of the ledger, likewise
        self._events_step = 0  # after which the last of them was recorded

    def take_over(self, lines: Mapping[int, Line], events: Sequence[Mapping[str, Any]]) -> None:
        """What lives before this one have handed on: before the state is whole."""
        self.lines, self.events = dict(lines), events

    def begun(self, events: Sequence[Mapping[str, Any]], step: int) -> None:
        """Rank 0 has begun its records around `step`, and has not these events on its disk."""
        self.events, self._events_step = events, step

    def keep_event(self, event: Mapping[str, Any], step: int) -> None:
        """What rank 0 records in the ledger after `step`, where this rank knows it as well."""
        self.events, self._events_step = [*self.events, event], step

    def keep(self, line: Line) -> None:
        """The line of a step, until it is on the disk. Of too many the first are dropped."""
        if not self.origin.generation:  # an audit writes no log
            return
        self.lines[line["step"]] = line
        if len(self.lines) > MOST_LINES:  # rank 0 has told that the storage fails
            del self.lines[next(iter(self.lines))]

    def kept(self) -> tuple[list[Line], list[Mapping[str, Any]]]:
        """Lines and events, for a rank that comes."""
        return [*self.lines.values()], [*self.events]

    def forget(self, step: int) -> None:
        """The log is on the disk up to this step, and with it the events before it."""
        while self.lines and (first := next(iter(self.lines))) <= step:
            del self.lines[first]
        if step > self._events_step:
            self.events = []
