"""The request to stop, as the training loop sees it."""

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

    A rank that does not reach the next step exits alone: at once while it has no state to lose,
    otherwise at the end of the grace period. Without a grace period a second SIGTERM ends it, as a
    second Ctrl-C does.
    """

    def __init__(self) -> None:
        self.holds = False  # this rank has a state that would be lost
        # Takes the place where the main thread hangs; returns the exit code. The life sets it.
        self.hung: Callable[[str], int] = lambda where: LifeLost.exit_code
        # Takes this rank's seconds without progress, in a thread. The life sets it.
        self.silent: Callable[[float], None] = lambda seconds: None
        grace_s = environment.grace_s()
        self.limit_s = None if grace_s is None else limit_s(grace_s, WORKER_S)
        again = [signal.SIGINT] if grace_s is not None else [signal.SIGINT, signal.SIGTERM]
        # torchrun forwards the signals that the terminal has sent to all its processes already.
        super().__init__(self._over, self._tell, () if is_launched() else again)

    def _over(self, waited_s: float) -> bool:
        return not self.holds or (self.limit_s is not None and waited_s > self.limit_s)

    def _tell(self) -> None:
        """Say how to end at once; in a separate thread, because a full pipe may block it."""
        if self.holds and self.number in self.hurried:
            name = signal.Signals(self.number).name
            text = f"{name}: training stops after this step; a second signal stops it at once"
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
