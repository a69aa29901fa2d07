"""The wish to stop, as the training loop sees it."""

import logging
import signal
import threading
from collections.abc import Callable

from gptddp.distributed import environment
from gptddp.distributed.environment import is_launched
from gptddp.distributed.watchdog import Watchdog
from gptddp.errors import LifeLost
from gptddp.grace import WORKER_S, limit_s

log = logging.getLogger(__name__)


class StopFlag(Watchdog):
    """A signal sets a flag and nothing else; the ranks agree on it at the next step.

    A rank that does not get there leaves alone: at once while it has nothing to lose, and else
    when the grace period comes to its end, if somebody has set one. Where nobody has, a second
    SIGTERM ends it, as a second Ctrl-C does.
    """

    def __init__(self) -> None:
        self.holds = False  # is there a state that would be lost?
        # What is done where the main thread hangs, here; the exit code. The life sets it.
        self.hung: Callable[[str], int] = lambda where: LifeLost.exit_code
        # Told in a thread for how many seconds this rank has not come further. The life sets it.
        self.silent: Callable[[float], None] = lambda seconds: None
        grace_s = environment.grace_s()
        self.limit_s = None if grace_s is None else limit_s(grace_s, WORKER_S)
        again = [signal.SIGINT] if grace_s is not None else [signal.SIGINT, signal.SIGTERM]
        # torchrun passes on what the terminal has sent to all of its processes.
        super().__init__(self._over, self._tell, () if is_launched() else again)

    def _over(self, waited_s: float) -> bool:
        return not self.holds or (self.limit_s is not None and waited_s > self.limit_s)

    def _tell(self) -> None:
        """Say how to end at once, in a thread of its own: a pipe that is full may block it."""
        if self.holds and self.number in self.hurried:
            name = signal.Signals(self.number).name
            text = f"{name}: it ends after this step; a second one ends it at once"
            threading.Thread(target=log.warning, args=(text,), name="stop", daemon=True).start()

    @property
    def asked(self) -> bool:
        return bool(self.number)

    @property
    def cause(self) -> str:
        name = signal.Signals(self.number).name if self.number else "another rank's signal"
        return f"stopped by {name}"

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or signal.SIGTERM)
