"""Asking the same of a cluster again and again, while its API server comes and goes."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe import facts
from gptddp.k8s.observe.facts import Facts

Say = Callable[[str], None]  # tells the user one line
_Answer = TypeVar("_Answer")

POLL_S = 1.0


class Watcher(Generic[_Answer]):
    """Says once that the API server is away, and once that it is back."""

    def __init__(self, ask: Callable[[], _Answer], say: Say) -> None:
        self._ask, self._say = ask, say
        self._answered = False

    def poll(self, end: float | None = None) -> _Answer:
        """The answer of now; waits for an API server that was there.

        Raises TimeoutError at `end` (of time.monotonic), ClusterError for what will not pass, and
        at the first poll for a server that cannot be reached: it may be the wrong one.
        """
        failures = 0
        while True:
            try:
                found = self._ask()
            except ClusterError as error:
                if not transient(error) or not (self._answered or error.status):
                    raise
                failures += 1
                if failures == 2:  # one alone may be a connection that had gone stale
                    self._say(f"the API server does not answer, trying on: {error}")
            else:
                self._answered = True
                if failures > 1:
                    self._say("the API server answers again")
                return found
            if end is not None and time.monotonic() >= end:
                raise TimeoutError
            time.sleep(POLL_S)


def of_job(cluster: Cluster, name: str, say: Say) -> Watcher[Facts | None]:
    """Watches a job: None if there is none of this name."""
    return Watcher(lambda: facts.fetch(cluster, name), lambda text: say(f"{name}: {text}"))


def transient(error: ClusterError) -> bool:
    """Can the same request succeed a little later?"""
    return error.status in (0, 408, 429) or error.status >= 500
