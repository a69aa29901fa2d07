"""A step that does not move: the rank that the others wait for says where it is.

Every rank's pulse is listened to by a thread of its own (distributed/pulse.py). Where a rank has
not come further for much longer than its steps take, and waits in no collective, that thread says
where the main thread is. A rank that cannot is stopped, cut off, or holds the GIL: its launcher,
or those of the others, tell of it. It costs the loop nothing.
"""

import logging
import statistics
import threading
from collections import deque

from gptddp.distributed import pulse
from gptddp.distributed.environment import ranks

RECENT = 64  # steps whose median says how long one takes
LEAST_S, MARGIN_S = 10.0, 30.0  # without progress: a stall; later than a step takes, at most
FIRST_S = 45.0  # the same, before the first step is done
AGAIN_S = 20.0  # between two words of one stall

log = logging.getLogger(__name__)


class Stalls:
    """How long the steps of this rank take. `silent` runs in the pulse's thread."""

    def __init__(self) -> None:
        self.over = False  # no step follows: what does may take its time
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._late_s = self._next_s = FIRST_S  # without progress: too long, until it is said

    def stepped(self, step_s: float) -> float:
        """One more step, of so many seconds; the median of the last ones."""
        self._recent.append(step_s)
        usual_s = statistics.median(self._recent)
        self._late_s = max(LEAST_S, min(4 * usual_s, usual_s + MARGIN_S))
        return usual_s

    def silent(self, seconds: float) -> None:
        """This rank has not come further for so long."""
        if seconds < self._late_s:
            self._next_s = self._late_s
        step = pulse.step()  # 0: the life has not begun
        if self.over or seconds < self._next_s or not step:
            return
        if not pulse.in_collective(pulse.main_frames()):
            self._next_s = seconds + AGAIN_S
            where = ranks().rank, step, seconds, pulse.main_stack()
            args = ("[rank %d] step %d has not moved for %.0f s: it %s", *where)
            # a pipe that is full may block it
            threading.Thread(target=log.warning, args=args, name="stall", daemon=True).start()
