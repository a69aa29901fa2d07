"""Waits for a job's end: reports changes, and returns how it ended as an exit code."""

import re
import time
from dataclasses import replace

from gptddp.k8s import exit_codes
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import is_ready, wanted_pods
from gptddp.k8s.observe import why
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.rank_0_log import with_log
from gptddp.k8s.observe.watcher import POLL_S, Say, of_job

LOG_S = 30.0  # between two reads of the log, which shows whether steps are done
_COUNTS = re.compile(r"\d+(?= (?:s|times)\b)")  # numbers that change while a reason stays the same
_CODES = {
    why.SUCCEEDED: exit_codes.SUCCEEDED,
    why.FAILED: exit_codes.FAILED,
    why.SUSPENDED: exit_codes.SUSPENDED,
}


def until_done(cluster: Cluster, name: str, say: Say, timeout_s: float | None = None) -> int:
    """Wait until the job ends: 0 Succeeded, 100 Failed, 102 gone, 103 suspended, 124 timed out.

    `say` gets each change of state, and why the job does not run. Waits out times without an API
    server. Raises NotFoundError (102) if the job does not exist at the first poll, and ClusterError
    for an error that is not transient.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    watcher, changes, uid = of_job(cluster, name, say), Changes(name, say), None
    log, log_due = None, 0.0  # the end of rank 0's log, and when to read it again
    while True:
        try:
            facts = watcher.poll(end)
        except TimeoutError:
            return changes.timed_out(timeout_s)
        if facts is None and uid is None:
            raise cluster.not_found(name)
        if facts and why.state(facts.job) == why.RUNNING and not facts.local:
            if time.monotonic() >= log_due:
                log, log_due = with_log(cluster, facts).log, time.monotonic() + LOG_S
            facts = replace(facts, log=log)
        state = changes.tell(facts)
        if facts is None:
            return exit_codes.GONE
        found = str(facts.job["metadata"].get("uid", "?"))
        if uid not in (None, found):
            say(f"{name}: gone; another job has taken its name")
            return exit_codes.GONE
        uid = found
        if state in _CODES:
            return _CODES[state]
        if end is not None and time.monotonic() >= end:
            return changes.timed_out(timeout_s)
        time.sleep(POLL_S if end is None else max(0.0, min(POLL_S, end - time.monotonic())))


class Changes:
    """Reports what has changed since the last poll."""

    def __init__(self, name: str, say: Say) -> None:
        self.name, self.say, self.state = name, say, ""
        self._last_reason = self._told_reason = ""

    def tell(self, facts: Facts | None) -> str:
        """Report what is new in these facts; returns the job's state, "" if it is gone."""
        if facts is None:
            if self.state != "gone":
                self.say(f"{self.name}: gone")
            self.state = "gone"
            return ""
        state, reason = why.state(facts.job, facts.queue), why.why(facts)
        if state != self.state:
            pods = f", {sum(map(is_ready, facts.pods))} of {wanted_pods(facts.job)} pods ready"
            podless = state in (*why.FINAL, why.SUSPENDED, why.QUEUED)
            because = f": {reason}" if podless and reason else ""
            self.say(f"{self.name}: {state}{because if podless else pods}")
            self._told_reason = reason if because else self._told_reason
        elif state not in why.FINAL and self._is_news(reason):
            self.say(f"{self.name}: {reason}")
            self._told_reason = reason
        self.state, self._last_reason = state, reason
        return state

    def _is_news(self, reason: str) -> bool:
        """A reason in only one poll is no news: the pod was being started or replaced."""
        plain, last, reported = (
            _COUNTS.sub("", it) for it in (reason, self._last_reason, self._told_reason)
        )
        return plain == last and plain not in ("", reported)

    def timed_out(self, timeout_s: float | None) -> int:
        because = f": {self._last_reason}" if self._last_reason else ""
        self.say(f"{self.name}: still {self.state or 'unknown'} after {timeout_s:g} s{because}")
        return exit_codes.TIMED_OUT
