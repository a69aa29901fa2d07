"""A late save in progress, as a life sees it: its launcher's work, handed newer states."""

from contextlib import suppress

from gptddp.checkpoint import late
from gptddp.distributed import environment
from gptddp.training.live_state import LiveState


class LateSave:
    """What a launcher saves beside this life (see checkpoint/late.py), for one of its ranks.

    As long as it lasts, rank 0 leaves what is due to it: two would share the volume, and the next
    fault would end rank 0's. Where another save follows, a rank of that pod hands over the newest
    state, which all ranks have compared: a snapshot left by the life before is older by as much as
    that save has taken.
    """

    def __init__(self, live: LiveState) -> None:
        verdict, first = environment.verdict(), environment.ranks().local_rank == 0
        self._folder = verdict.parent if verdict and first and live.origin.late else None
        self._live = live
        self._copied = 0  # the step of a state that is not yet handed over
        self.in_progress = False  # one that the life leaves its own saves to
        self.wants_state = False

    def look(self) -> None:
        """Before a step: is this rank's launcher saving, and does it want a newer state?

        The life has begun with a late save: so no file is looked at where there is none.
        """
        if self._folder is not None:
            there = late.in_progress(self._folder) is not None
            self.in_progress = there and late.relieves(self._folder)
            self.wants_state = False
            with suppress(OSError):  # it ends after a while
                self.wants_state = there and not self._copied and late.wants_state(self._folder)

    def copy(self, step: int) -> None:
        """After this step, of which all ranks have the same state: leave it for the launcher."""
        if self.wants_state:
            self._live.copy()
            self._copied = step

    def hand_over(self, logged: int) -> None:
        """When the log is on the disk up to that step: only rank 0 writes the log of its life."""
        if self._copied and logged >= self._copied and self._folder is not None:
            late.hand_over(self._folder)
            self._copied = 0
