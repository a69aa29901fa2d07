"""Fetching a job's facts again and again, while the API server comes and goes."""

import time
from collections.abc import Callable

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.observe import facts
from gptddp.k8s.observe.facts import Facts

Say = Callable[[str], None]  # tells the user one line

POLL_S = 1.0


class Watcher:
    """Polls one job; says once that the API server is away, and once that it is back."""

    def __init__(self, cluster: Cluster, name: str, say: Say) -> None:
        self.cluster, self.name, self.say = cluster, name, say
        self._answered = False

    def poll(self, end: float | None = None) -> Facts | None:
        """What there is now, None if there is no job; waits for an API server that was there.

        Raises TimeoutError at `end` (of time.monotonic), ClusterError for what will not pass, and
        at the first poll for a server that cannot be reached: it may be the wrong one.
        """
        failures = 0
        while True:
            try:
                found = facts.fetch(self.cluster, self.name)
            except ClusterError as error:
                if not transient(error) or not (self._answered or error.status):
                    raise
                failures += 1
                if failures == 2:  # one alone may be a connection that had gone stale
                    self.say(f"{self.name}: the API server does not answer, trying on: {error}")
            else:
                self._answered = True
                if failures > 1:
                    self.say(f"{self.name}: the API server answers again")
                return found
            if end is not None and time.monotonic() >= end:
                raise TimeoutError
            time.sleep(POLL_S)


def transient(error: ClusterError) -> bool:
    """Can the same request succeed a little later?"""
    return error.status in (0, 408, 429) or error.status >= 500
