"""Batch Jobs on a cluster: submitted once, watched to their end, with the reason of a failure."""

import time
from collections.abc import Callable
from typing import Any

from gptddp.errors import ClusterError, ConfigError, JobFailed, TimedOut
from gptddp.k8s.act import lifecycle, needs
from gptddp.k8s.act.failure import AGAIN, says
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object, condition, holds
from gptddp.k8s.observe import job_causes, pod_causes
from gptddp.k8s.observe.endings import how_it_ended
from gptddp.k8s.observe.facts import Facts, events_about
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render.difference import NONE, compare
from gptddp.k8s.render.manifest import SPEC_HASH

RUNNING, COMPLETE, FAILED = "Running", "Complete", "Failed"
_POLL_S = 1.0
_QUIET_S = 60.0  # a log without a line for so long is asked for again: the connection may be dead


def state(job: Object) -> str:
    """`Running` until it is `Complete` or `Failed`."""
    return next((kind for kind in (COMPLETE, FAILED) if holds(job, kind)), RUNNING)


def done(job: Object) -> bool:
    return state(job) == COMPLETE


def submit(cluster: Cluster, job: Object, say: Say) -> bool:
    """Create the Job, unless the same one runs or is done; did this call create it?

    Another one that has ended is deleted first. Raises ConfigError for a missing claim, and while
    another of its name runs; ClusterError.
    """
    with says(
        "no new Job was created", unknown=f"whether a new Job was created is not known; {AGAIN}"
    ):
        pod_spec = job["spec"]["template"]["spec"]
        needs.check(cluster, pod_spec, 1, say)
        if not _make_room(cluster, job, say):
            return False
        _wait_gone(cluster, job["metadata"]["name"])
        cluster.create(job)
    return True


def _make_room(cluster: Cluster, job: Object, say: Say) -> bool:
    """Delete another Job of the name that has ended; False if the same one runs or is done."""
    name = job["metadata"]["name"]
    live = cluster.get("Job", name)
    if live is not None and "deletionTimestamp" not in live["metadata"]:
        if not lifecycle.is_ours(live, name):
            raise ConfigError(f"a Job {name} exists, and not from gptddp-k8s: use another --name")
        same = live["metadata"].get("annotations", {}).get(SPEC_HASH) == _hash(job)
        now = state(live)
        if same and now != FAILED:
            return False
        if now == RUNNING:
            # A Job is full of what the server adds: only what is wanted, and the whole command.
            lines = "\n".join(
                f"  {it}" for it in compare(live, job) if ".command[" in it.path or it.new != NONE
            )
            raise ConfigError(
                f"the Job {name} is running with other settings; wait for its end, end it with "
                f"`gptddp-k8s delete {name}{cluster.flags}`, or use another --name:\n{lines}"
            )
        if now == FAILED:
            say(f"the last Job {name} failed: {reason(cluster, name)}; it is replaced")
        cluster.delete("Job", name)
    return True


def _hash(job: Object) -> Any:
    return job["metadata"]["annotations"][SPEC_HASH]


def _wait_gone(cluster: Cluster, name: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while cluster.get("Job", name) or pods(cluster, name):
        if time.monotonic() > end:
            raise ClusterError(
                f"the Job {name} or its pods are still being deleted: {lifecycle.UNREACHABLE}"
            )
        time.sleep(_POLL_S)


def pods(cluster: Cluster, name: str) -> list[Object]:
    """The pods of a Job, oldest first."""
    found = cluster.find("Pod", f"batch.kubernetes.io/job-name={name}")
    return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def watch(
    cluster: Cluster,
    name: str,
    say: Say,
    *,
    write: Callable[[str], None] | None = None,
    timeout_s: float | None = None,
) -> str:
    """Wait until a Job has ended, saying why it does not start; `write` gets its pods' lines.

    Raises TimedOut, and JobFailed for a Job that was deleted or whose image is missing.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    told, log = "", _NewestPodLog(cluster, write)
    while True:
        job = cluster.get("Job", name)
        found = pods(cluster, name)
        if job is None:
            raise JobFailed(f"the Job {name} was deleted before it ended")
        log.read(found, end)
        if (now := state(job)) != RUNNING:
            return now
        cause = _pod_cause(cluster, job, found[-1]) if found else _refusal(cluster, job)
        if cause and cause != told:
            say(f"{name}: {cause}")
            told = cause
        if end is not None and time.monotonic() > end:
            raise TimedOut(f"the Job {name} is not done after {timeout_s:g} s: {told or 'it runs'}")
        time.sleep(_POLL_S)


class _NewestPodLog:
    """The log of a Job's newest pod, line by line, each once."""

    def __init__(self, cluster: Cluster, write: Callable[[str], None] | None) -> None:
        self._cluster, self._write = cluster, write
        self._written: dict[str, int] = {}  # pod's name: lines

    def read(self, found: list[Object], end: float | None) -> None:
        """Follow the newest pod's log until its end or that time, once its container has begun."""
        if self._write is None or not found or found[-1]["status"].get("phase") == "Pending":
            return
        name = found[-1]["metadata"]["name"]
        written = self._written.get(name, 0)
        quiet_s = _QUIET_S if end is None else max(1.0, min(_QUIET_S, end - time.monotonic()))
        try:
            for count, line in enumerate(self._cluster.log(name, follow=True, quiet_s=quiet_s), 1):
                if count > written:
                    self._written[name] = count
                    self._write(line.partition(" ")[2])
                if end is not None and time.monotonic() > end:
                    return
        except ClusterError:
            pass  # broken off, or silent: the next call skips what was written


def _pod_cause(cluster: Cluster, job: Object, pod: Object) -> str:
    """Why a pod does not start; raises JobFailed for an image that is not there."""
    events, _ = events_about(cluster, [pod["metadata"]["name"]])
    facts = Facts(job, [pod], events, flags=cluster.flags)
    for cause in (*pod_causes.pods(facts), *job_causes.starting(facts, False)):
        if cause.id.startswith("image") and cause.text.split(": ")[1] != "ErrImagePull":
            raise JobFailed(cause.text)
        return f"its pod does not start: {cause.sentence.partition(': ')[2]}"
    return ""


def _refusal(cluster: Cluster, job: Object) -> str:
    """Why a Job has no pod: a refusal by quota, Pod Security and the like is in events only."""
    events, unseen = events_about(cluster, [job["metadata"]["name"]])
    if unseen:
        return f"it has no pod yet; for what is not to be seen: {unseen}"
    facts = Facts(job, events=events, flags=cluster.flags)
    for event in reversed(facts.about(job, "FailedCreate")):
        return job_causes.refusal(facts, str(event.get("message", ""))).sentence
    return ""


def last_words(cluster: Cluster, name: str) -> str:
    """The status message that the newest ended pod of a Job has left."""
    for pod in reversed(pods(cluster, name)):
        for container in pod["status"].get("containerStatuses") or []:
            if ended := container["state"].get("terminated"):
                return str(ended.get("message") or "").strip().removeprefix("Error: ")
    return ""


def reason(cluster: Cluster, name: str) -> str:
    """Why a Job failed: what its program said last, or else the Job's condition."""
    failed = condition(cluster.get("Job", name) or {}, FAILED)
    message = str(failed.get("message")) if failed else ""
    return last_words(cluster, name) or _end(cluster, name) or message or "no reason given"


def _end(cluster: Cluster, name: str) -> str:
    """How the newest ended pod of a Job has ended, where its program left no word."""
    for pod in reversed(pods(cluster, name)):
        for container in pod["status"].get("containerStatuses") or []:
            if ended := (container.get("state") or {}).get("terminated"):
                return f"its program {how_it_ended(pod, container['name'], ended)}"
    return ""
