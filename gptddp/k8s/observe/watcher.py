"""Polls a cluster through outages of its API server."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe import facts
from gptddp.k8s.observe.facts import Facts

Say = Callable[[str], None]  # shows the user one line
_Answer = TypeVar("_Answer")

POLL_S = 1.0


class Watcher(Generic[_Answer]):
    """Reports once that the API server is away, and once that it is back."""

    def __init__(self, ask: Callable[[], _Answer], say: Say) -> None:
        self._ask, self._say = ask, say
        self._answered = False

    def poll(self, end: float | None = None) -> _Answer:
        """The current answer; waits for an API server that has answered before.

        Raises TimeoutError at `end` (of time.monotonic), and ClusterError for an error that is not
        transient, or if the first poll cannot reach the server: it may be the wrong one.
        """
        failures = 0
        while True:
            try:
                found = self._ask()
            except ClusterError as error:
                if not transient(error) or not (self._answered or error.status):
                    raise
                failures += 1
                if failures == 2:  # a single failure may be a stale connection
                    self._say(f"the API server does not answer, retrying: {error}")
            else:
                self._answered = True
                if failures > 1:
                    self._say("the API server answers again")
                return found
            if end is not None and time.monotonic() >= end:
                raise TimeoutError
            time.sleep(POLL_S)


def of_job(cluster: Cluster, name: str, say: Say) -> Watcher[Facts | None]:
    """Polls a job: None if there is no job of this name."""
    return Watcher(lambda: facts.fetch(cluster, name), lambda text: say(f"{name}: {text}"))


def transient(error: ClusterError) -> bool:
    """Can the same request succeed later?"""
    return error.status in (0, 408, 429) or error.status >= 500
