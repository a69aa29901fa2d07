"""The wish to stop, as the training loop sees it."""

import signal
from collections.abc import Callable

from gptddp.distributed import environment
from gptddp.distributed.environment import is_launched
from gptddp.distributed.watchdog import Watchdog
from gptddp.errors import LifeLost
from gptddp.grace import WORKER_S, limit_s

_WAY_OUT_S = 1.0  # for the ranks to part


class StopFlag(Watchdog):
    """A signal sets a flag and nothing else; the ranks agree on it at the next step.

    A rank that does not get there leaves alone: at once while it has nothing to lose, and else
    when the grace period comes to its end, if somebody has set one.
    """

    def __init__(self) -> None:
        self.holds = False  # is there a state that would be lost?
        # What is done where the main thread hangs, here; the exit code. The life sets it.
        self.hung: Callable[[str], int] = lambda where: LifeLost.exit_code
        # Told in a thread for how many seconds this rank has not come further. The life sets it.
        self.silent: Callable[[float], None] = lambda seconds: None
        grace_s = environment.grace_s()
        self.limit_s = None if grace_s is None else limit_s(grace_s, WORKER_S)
        # torchrun passes on what the terminal has sent to all of its processes.
        super().__init__(self._over, hurried=not is_launched())

    def _over(self, waited_s: float) -> bool:
        return not self.holds or (self.limit_s is not None and waited_s > self.limit_s)

    @property
    def asked(self) -> bool:
        return bool(self.number)

    @property
    def pod_leaves(self) -> bool:
        """Is this pod to end, in a time that is known? Not this world of ranks alone.

        A launcher stops its workers too for pods that come or go, and then goes on.
        """
        return self.asked and self.limit_s is not None and environment.pod_leaves()

    def must_hurry(self) -> bool:
        """Is there no time left but for the way out?"""
        return self.limit_s is not None and self.waited_s > self.limit_s - _WAY_OUT_S

    @property
    def cause(self) -> str:
        name = signal.Signals(self.number).name if self.number else "another rank's signal"
        return f"stopped by {name}"

    @property
    def exit_code(self) -> int:
        return 128 + (self.number or signal.SIGTERM)
