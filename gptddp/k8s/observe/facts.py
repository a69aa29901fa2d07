"""The state of a job at one moment: the PyTorchJob, its pods, and the events about them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gptddp.k8s.cluster import JOB, Cluster, if_allowed
from gptddp.k8s.objects import (
    Object,
    age_s,
    condition,
    event_time,
    holds,
    is_local,
    is_ready,
    replica_count,
    replica_specs,
    role_and_index,
    seconds,
    suspended,
    volume_claims,
)
from gptddp.k8s.observe import queue
from gptddp.k8s.observe.queue import Queue
from gptddp.k8s.render.companions import JOB_NAME

_MOST_PODS = 5  # limit of pods, not ready or new, whose events are fetched
_NEW_S = 60.0  # age of a pod up to which the events of its predecessor matter
# Warnings that are no cause: a retry is delayed, or a node has more than three name servers.
_NO_REASONS = ("BackOff", "DNSConfigForming")
_NO_EVENTS = "you may not list the events of this namespace"


@dataclass(frozen=True)
class Facts:
    """A PyTorchJob, its pods by role and index, events about them, and when they were fetched.

    `flags`: options that name the cluster on a command line. `log`: the end of rank 0's log, as
    times and lines, None if not read. `rank_0`: the pod of rank 0, "" if not known. `queue`: state
    of a job of Kueue. `unseen`: why events cannot be read. `claims`: the claims of pods without a
    node, None for a missing claim.
    """

    job: Object
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    now: float = field(default_factory=time.time)
    flags: str = ""
    log: Sequence[tuple[datetime | None, str]] | None = None
    rank_0: str = ""
    queue: Queue | None = None
    unseen: str = ""
    claims: Mapping[str, Object | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def local(self) -> bool:
        """Is it a local job, without a cluster?"""
        return is_local(self.job)

    @property
    def missing(self) -> list[str]:
        """Names of the pods that the job wants and that do not exist."""
        there = {pod["metadata"]["name"] for pod in self.pods}
        wanted = [
            f"{self.name}-{role.lower()}-{index}"
            for role, spec in replica_specs(self.job).items()
            for index in range(replica_count(spec))
        ]
        return [name for name in wanted if name not in there]

    def about(self, obj: Object, *reasons: str) -> list[Object]:
        """Events about this object, not an older one of its name; all, or of these reasons."""
        meta = obj["metadata"]
        return [
            event
            for event in self.events
            if (not reasons or event.get("reason") in reasons)
            and event.get("involvedObject", {}).get("name") == meta["name"]
            and event["involvedObject"].get("uid", "") in ("", meta.get("uid", ""))
        ]

    def ever_about(self, name: str, *reasons: str) -> list[Object]:
        """Events about all pods of this name that the job has had, oldest first.

        Leaves out pods of an earlier job, and objects of other kinds of the same name.
        """
        begin = seconds(self.job["metadata"].get("creationTimestamp")) or 0.0
        return [
            event
            for event in sorted(self.events, key=event_time)
            if (not reasons or event.get("reason") in reasons)
            and event.get("involvedObject", {}).get("name") == name
            and event["involvedObject"].get("kind", "Pod") == "Pod"
            and event_time(event) >= begin
        ]

    def warning(self, pod: Object) -> Object | None:
        """The newest warning about a pod, if the pod has made no progress since."""
        begun = self.about(pod, "Scheduled", "Pulling", "Pulled", "Created", "Started")
        last = max(map(event_time, begun), default=0.0)
        warnings = [
            event
            for event in self.about(pod)
            if event.get("type") == "Warning"
            and event.get("reason") not in _NO_REASONS
            and event_time(event) > last
        ]
        return max(warnings, key=event_time, default=None)


def fetch(cluster: Cluster, name: str) -> Facts | None:
    """The job, its pods, and the events about it and some of its pods: not ready, new or missing.

    None if there is no such job. Without the right to read events, the rest. Raises ClusterError.
    """
    job = cluster.get(JOB, name)
    if job is None:
        return None
    pods = pods_of(cluster, job)
    found = Facts(job, pods, flags=cluster.flags)
    if holds(job, "Succeeded"):
        return found
    not_ready = [pod["metadata"]["name"] for pod in pods if not is_ready(pod)]
    new = [p["metadata"]["name"] for p in pods if is_ready(p) and age_s(p, found.now) < _NEW_S]
    missing = [] if suspended(job) else found.missing
    ended = holds(job, "Failed") or found.local or "deletionTimestamp" in job["metadata"]
    queued = None if ended else queue.fetch(cluster, job)
    claims = _claims(cluster, pods)
    abouts = dict.fromkeys([name, *[*not_ready, *missing, *new][:_MOST_PODS], *claims])
    events, unseen = events_about(cluster, list(abouts))
    return replace(found, events=events, queue=queued, unseen=unseen, claims=claims)


def of_short_job(cluster: Cluster, job: Object, pods: Sequence[Object]) -> Facts:
    """Like `fetch`, for a Job of `prepare` or `sample` and these pods."""
    claims = _claims(cluster, pods)
    names = [it["metadata"]["name"] for it in (job, *pods)]
    events, unseen = events_about(cluster, [*names, *claims])
    return Facts(job, pods, events, flags=cluster.flags, unseen=unseen, claims=claims)


def _claims(cluster: Cluster, pods: Sequence[Object]) -> dict[str, Object | None]:
    """The claims of pods without a node, by name; empty if the user may not read claims."""
    waiting = [p for p in pods if (condition(p, "PodScheduled") or {}).get("status") == "False"]
    names = {claim for pod in waiting for _, claim in volume_claims(pod["spec"])}
    return if_allowed(lambda: {it: cluster.get("PersistentVolumeClaim", it) for it in names}, {})


def events_about(cluster: Cluster, names: Sequence[str]) -> tuple[list[Object], str]:
    """The events about these objects, and a message if the user may not read events."""
    found = if_allowed(lambda: [event for name in names for event in cluster.events(name)], None)
    return ([], _NO_EVENTS) if found is None else (found, "")


def of_job(cluster: Cluster, name: str) -> Facts:
    """Like `fetch`; raises NotFoundError if there is no such job, and ClusterError."""
    found = fetch(cluster, name)
    if found is None:
        raise cluster.not_found(name)
    return found


def pods_of(cluster: Cluster, job: Object) -> list[Object]:
    """The job's pods by role and index, without pods of an older job of its name."""
    uid = job["metadata"].get("uid")
    pods = cluster.find("Pod", f"{JOB_NAME}={job['metadata']['name']}")
    return sorted((pod for pod in pods if owner(pod) in (None, uid)), key=role_and_index)


def owner(pod: Object) -> str | None:
    """The uid of the job that controls the pod."""
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(o["uid"]) for o in owners if o.get("controller")), None)
