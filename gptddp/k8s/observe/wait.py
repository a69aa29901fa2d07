"""Waiting for a job's end: what changes goes to stderr, how it ended is the exit code."""

import time
from collections.abc import Callable

from gptddp.k8s.cli.command import note
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.observe import why
from gptddp.k8s.observe.facts import Facts, ready, replicas
from gptddp.k8s.observe.watcher import EVERY_S, Watcher

DONE, JOB_FAILED, GONE, IS_SUSPENDED, TIMED_OUT = 0, 100, 102, 103, 124


def until_done(cluster: Cluster, name: str, timeout_s: float | None = None) -> int:
    """Wait until the job has ended: 0 Succeeded, 100 Failed, 102 gone, 103 suspended, 124 time up.

    Prints each change of state, and why the job does not run, to stderr. Goes on through times
    without an API server. Raises NotFoundError (102) for a job that is not there at the first look,
    and ClusterError for what will not pass.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    watcher, teller, uid = Watcher(cluster, name), Teller(name), None
    while True:
        try:
            facts = watcher.look(end)
        except TimeoutError:
            return teller.timed_out(timeout_s)
        if facts is None and uid is None:
            raise cluster.not_found(name)
        state = teller.tell(facts)
        if facts is None:
            return GONE
        found = str(facts.job["metadata"].get("uid", "?"))
        if uid not in (None, found):
            note(f"{name}: gone; another job has taken its name")
            return GONE
        uid = found
        codes = {why.SUCCEEDED: DONE, why.FAILED: JOB_FAILED, why.SUSPENDED: IS_SUSPENDED}
        if state in codes:
            return codes[state]
        if end is not None and time.monotonic() >= end:
            return teller.timed_out(timeout_s)
        time.sleep(EVERY_S if end is None else max(0.0, min(EVERY_S, end - time.monotonic())))


class Teller:
    """Says what has changed since the last look."""

    def __init__(self, name: str, say: Callable[[str], None] = note) -> None:
        self.name, self.say, self.state = name, say, ""
        self._seen = self._said = ""

    def tell(self, facts: Facts | None) -> str:
        """Report a look; returns the job's state, empty if it is gone."""
        if facts is None:
            if self.state != "gone":
                self.say(f"{self.name}: gone")
            self.state = "gone"
            return ""
        state, reason = why.state(facts.job), why.why(facts)
        if state != self.state:
            pods = f", {sum(map(ready, facts.pods))} of {replicas(facts.job)} pods ready"
            final = state in (*why.FINAL, why.SUSPENDED)
            told = f": {reason}" if final and reason else ""
            self.say(f"{self.name}: {state}{told if final else pods}")
        # What shows only once was on its way to be put right, as a pod that is being started.
        elif state not in why.FINAL and reason == self._seen and reason not in ("", self._said):
            self.say(f"{self.name}: {reason}")
            self._said = reason
        self.state, self._seen = state, reason
        return state

    def timed_out(self, timeout_s: float | None) -> int:
        told = f": {self._seen}" if self._seen else ""
        self.say(f"{self.name}: still {self.state or 'unknown'} after {timeout_s:g} s{told}")
        return TIMED_OUT
