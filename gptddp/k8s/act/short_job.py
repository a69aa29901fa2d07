"""Creates the short batch Jobs of `prepare` and `sample`, and watches them to their end."""

import time
from collections.abc import Callable
from dataclasses import replace

from gptddp.errors import ConfigError
from gptddp.k8s.act import lifecycle, needs
from gptddp.k8s.act.failure import AGAIN, says
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.exit_codes import ClusterError, JobFailed, TimedOut, described
from gptddp.k8s.objects import Object, condition, container_statuses, event_time, holds, is_ours
from gptddp.k8s.observe import facts, pod_causes
from gptddp.k8s.observe.watcher import Say, transient
from gptddp.k8s.render.manifest import SPEC_HASH

RUNNING, COMPLETE, FAILED = "Running", "Complete", "Failed"
_POLL_S = 1.0
_QUIET_S = 60.0  # a connection without a log line for this time may be dead: reconnect
_NO_IMAGE = ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
Write = Callable[[str], None]


def state(job: Object) -> str:
    """`Complete`, `Failed`, or until then `Running`."""
    return next((kind for kind in (COMPLETE, FAILED) if holds(job, kind)), RUNNING)


# -- prepare -------------------------------------------------------------------------------------


def submit(cluster: Cluster, job: Object, say: Say) -> bool:
    """Create the Job unless the same one runs or is done. Returns whether this call created it.

    Deletes another Job of its name that has ended. Raises ConfigError if its pod needs a missing
    object, or while another Job of its name runs; ClusterError.
    """
    with says(
        "no new Job was created", unknown=f"it is not known whether a new Job was created; {AGAIN}"
    ):
        needs.check(needs.lacks(cluster, job["spec"]["template"]["spec"], 1), say)
        if not _make_room(cluster, job, say):
            return False
        _wait_gone(cluster, job["metadata"]["name"])
        cluster.create(job)
    return True


def _make_room(cluster: Cluster, job: Object, say: Say) -> bool:
    """Delete a Job of the name that has ended; False if the same Job runs or is done."""
    name = job["metadata"]["name"]
    live = cluster.get("Job", name)
    if live is None or "deletionTimestamp" in live["metadata"]:
        return True
    if not is_ours(live, name):
        raise ConfigError(f"the Job {name} exists, not created by gptddp-k8s: use another --name")
    now, hashes = state(live), [it["metadata"].get("annotations", {}) for it in (live, job)]
    if now != FAILED and hashes[0].get(SPEC_HASH) == hashes[1][SPEC_HASH]:
        return False
    if now == RUNNING:
        raise ConfigError(
            f"the Job {name} is running with other settings; wait for its end, end it with "
            f"`gptddp-k8s delete {name}{cluster.flags}`, or use another --name"
        )
    if now == FAILED:
        say(f"the last Job {name} failed: {reason(cluster, name)}; it is replaced")
    cluster.delete("Job", name)
    return True


def _wait_gone(cluster: Cluster, name: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while cluster.get("Job", name) or pods(cluster, name):
        if time.monotonic() > end:
            raise ClusterError(
                f"the Job {name} or its pods are still being deleted: {lifecycle.UNREACHABLE}"
            )
        time.sleep(_POLL_S)


# -- sample --------------------------------------------------------------------------------------


def sample(
    cluster: Cluster, name: str, job: Object, say: Say, write: Write, timeout_s: float
) -> None:
    """Create the Job, write its text, and delete it in any case.

    Raises JobFailed with the program's last message, TimedOut, ConfigError for a missing claim.
    """
    needs.check(needs.lacks(cluster, job["spec"]["template"]["spec"], 1), say)
    created = cluster.create(job)["metadata"]["name"]
    try:
        ended = watch(cluster, created, say, write=write, timeout_s=timeout_s)
        if ended == FAILED:
            fix = f"`gptddp-k8s status {name}{cluster.flags}` shows the job's progress"
            if cluster.get(JOB, name) is None:
                fix = f"{cluster.not_found(name)}; --runs names the run of a deleted job"
            raise JobFailed(f"{reason(cluster, created)}; {fix}")
        say(last_words(cluster, created))  # the step and the seed
    finally:
        try:
            cluster.delete("Job", created)
        except ClusterError as error:  # keep the text, or the error that explains its absence
            command = f"kubectl delete job {created}{cluster.kubectl}"
            say(f"warning: the Job {created} remains, and `{command}` deletes it: {error}")


# -- to their end --------------------------------------------------------------------------------


def pods(cluster: Cluster, name: str) -> list[Object]:
    """The pods of a Job, oldest first."""
    found = cluster.find("Pod", f"batch.kubernetes.io/job-name={name}")
    return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))


def watch(
    cluster: Cluster,
    name: str,
    say: Say,
    *,
    write: Write | None = None,
    timeout_s: float | None = None,
) -> str:
    """Wait until a Job ends, reporting why it does not start; `write` gets its pods' lines.

    Raises TimedOut, and JobFailed for a Job that was deleted or whose image is missing.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    said, log = "", _NewestPodLog(cluster, write)
    while True:
        job, found = cluster.get("Job", name), pods(cluster, name)
        if job is None:
            raise JobFailed(f"the Job {name} was deleted before it ended")
        whole = log.read(found, end)
        if (now := state(job)) != RUNNING and whole:
            return now
        cause = _why_not(cluster, job, found[-1:]) if now == RUNNING else ""
        if cause and cause != said:
            say(f"{name}: {cause}")
            said = cause
        if end is not None and time.monotonic() > end:
            why = said.rpartition("; see `")[0] or said or "it runs"  # `see` names a deleted pod
            raise TimedOut(f"the Job {name} is not done after {timeout_s:g} s: {why}")
        time.sleep(_POLL_S)


class _NewestPodLog:
    """The log of a Job's newest pod, line by line, each once."""

    def __init__(self, cluster: Cluster, write: Write | None) -> None:
        self._cluster, self._write = cluster, write
        self._written: dict[str, int] = {}  # pod's name: lines

    def read(self, found: list[Object], end: float | None) -> bool:
        """Follow the newest pod's log to its end, or until `end`; True if all of it was read."""
        if self._write is None or not found or found[-1]["status"].get("phase") == "Pending":
            return True
        name = found[-1]["metadata"]["name"]
        written = self._written.get(name, 0)
        quiet_s = _QUIET_S if end is None else max(1.0, min(_QUIET_S, end - time.monotonic()))
        try:
            for count, line in enumerate(self._cluster.log(name, follow=True, quiet_s=quiet_s), 1):
                if count > written:
                    self._written[name] = count
                    self._write(line.partition(" ")[2])
                if end is not None and time.monotonic() > end:
                    break
        except ClusterError as error:  # cut off or silent: the next call skips written lines
            if not transient(error) and error.status not in (400, 404):
                raise
            return not transient(error)
        return True


def _why_not(cluster: Cluster, job: Object, newest: list[Object]) -> str:
    """Why the Job has no running pod, as `status` says it; raises JobFailed without an image."""
    if newest and newest[0]["status"].get("phase") != "Pending":
        return ""
    known = facts.of_short_job(cluster, job, newest)
    if not newest:  # a refusal by quota, Pod Security etc. is reported only in an event
        warnings = [event for event in known.about(job) if event.get("type") == "Warning"]
        return str(max(warnings, key=event_time, default={}).get("message", ""))
    cause = next(pod_causes.pods(known), None)
    if cause is None:
        return ""
    states = [status.get("state") or {} for status in container_statuses(newest[0])]
    if any((it.get("waiting") or {}).get("reason") in _NO_IMAGE for it in states):
        raise JobFailed(replace(cause, command="").sentence)
    return cause.sentence


def last_words(cluster: Cluster, name: str) -> str:
    """The termination message of the newest ended pod of a Job."""
    return str(_end(cluster, name).get("message") or "").strip().removeprefix("Error: ")


def reason(cluster: Cluster, name: str) -> str:
    """Why a Job failed: its program's last message, how it ended, or the Job's condition."""
    if words := last_words(cluster, name):
        return words
    if ended := _end(cluster, name):
        more = "; give it more, --memory" if ended.get("reason") == "OOMKilled" else ""
        code = described(int(ended.get("exitCode", 0)))
        return f"its program ended with exit code {code}, {ended.get('reason')}{more}"
    failed = condition(cluster.get("Job", name) or {}, FAILED) or {}
    return str(failed.get("message") or "no reason given")


def _end(cluster: Cluster, name: str) -> Object:
    """How the container of the newest ended pod of a Job ended; {} if no pod has ended."""
    for pod in reversed(pods(cluster, name)):
        for status in container_statuses(pod):
            if ended := (status.get("state") or {}).get("terminated"):
                return dict(ended)
    return {}
