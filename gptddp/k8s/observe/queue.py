"""What Kueue knows of a job: its Workload, the queue that it waits in, and its place there."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import PRIORITY, Object, condition, holds, queue_name, suspended

_JOB_UID = "kueue.x-k8s.io/job-uid"


@dataclass(frozen=True)
class Queue:
    """A job's queue as far as this user may see it; what is not known is None.

    `ahead` counts the jobs before it, of all queues that share its quota. `unseen`: the server's
    words, where the Workload may not be read.
    """

    name: str
    kueue: bool = True  # is there a Kueue on the cluster at all?
    workload: Object | None = None
    local_queue: Object | None = None
    cluster_queue: Object | None = None
    ahead: int | None = None
    priority_missing: str = ""  # a WorkloadPriorityClass that the job names
    unseen: str = ""

    @property
    def held(self) -> bool:
        """Has it been taken out of the queue: by `suspend`, or by Kueue after too many tries?"""
        return self.workload is not None and self.workload["spec"].get("active") is False

    @property
    def admitted(self) -> bool:
        """Has it its quota, and is it not about to lose it?"""
        has = self.workload is not None and holds(self.workload, "QuotaReserved")
        return has and not holds(self.workload or {}, "Evicted")

    @property
    def given_up(self) -> str:
        """Why Kueue could not start it, though it was its turn, and tries no more; else empty."""
        finished = condition(self.workload or {}, "Finished") or {}
        return str(finished.get("message")) if finished.get("reason") == "FailedToStart" else ""

    @property
    def gone(self) -> bool:
        """Will no queue start it: is it out of its own, or the cluster without a Kueue?"""
        return self.held or bool(self.given_up) or not self.kueue

    @property
    def cluster_queue_name(self) -> str:
        """The ClusterQueue behind it; empty where that is not known."""
        admission = ((self.workload or {}).get("status") or {}).get("admission") or {}
        of_queue = ((self.local_queue or {}).get("spec") or {}).get("clusterQueue")
        return str(admission.get("clusterQueue") or of_queue or "")


def fetch(cluster: Cluster, job: Object) -> Queue | None:
    """What is known of the queue of a job; None for a job that is not Kueue's.

    Kueue may have taken a job that names no queue: then it is suspended. Raises ClusterError.
    """
    name = queue_name(job)
    if not name and not suspended(job):
        return None
    try:
        workload = workload_of(cluster, job)
    except ClusterError as error:
        if error.status not in (403, 404):
            raise
        unseen = str(error) if error.status == 403 else ""
        return Queue(name, kueue=error.status != 404, unseen=unseen) if name else None
    if workload is None or _is_left(job, workload):
        return Queue(name, priority_missing=_missing_priority(cluster, job)) if name else None
    found = Queue(name, workload=workload)
    return found if found.admitted else replace(found, **_waiting(cluster, name, workload))


def _is_left(job: Object, workload: Object) -> bool:
    """Was the label removed from a job in a queue? Kueue looks no more at either of them."""
    return not queue_name(job) and bool(workload["spec"].get("queueName"))


def workload_of(cluster: Cluster, job: Object) -> Object | None:
    """The Workload that stands for a job in Kueue: the newest. Raises ClusterError."""
    found = cluster.find("Workload", f"{_JOB_UID}={job['metadata'].get('uid', '')}")
    return max(found, key=lambda w: str(w["metadata"].get("creationTimestamp")), default=None)


def of_jobs(cluster: Cluster, jobs: Sequence[Object], everywhere: bool = False) -> dict[str, Queue]:
    """The queues of those of these jobs that are suspended, by uid, as far as may be seen."""
    waiting = [job for job in jobs if suspended(job)]
    if not waiting:
        return {}
    try:
        found = cluster.find("Workload", _JOB_UID, everywhere=everywhere)
    except ClusterError as error:
        kueue = error.status != 404
        named = [job for job in waiting if queue_name(job)]
        return {str(job["metadata"].get("uid")): Queue(queue_name(job), kueue) for job in named}
    newest = sorted(found, key=lambda w: str(w["metadata"].get("creationTimestamp")))
    of = {w["metadata"]["labels"][_JOB_UID]: w for w in newest}
    pairs = [(str(job["metadata"].get("uid")), job) for job in waiting]
    return {
        uid: Queue(queue_name(job), workload=of[uid])
        for uid, job in pairs
        if uid in of and not _is_left(job, of[uid])
    }


def _waiting(cluster: Cluster, name: str, workload: Object) -> dict[str, Any]:
    """What is known of a queue in which a Workload waits; of none by name, nothing."""
    known: dict[str, Any] = {}
    if not name:
        return known
    with contextlib.suppress(ClusterError):  # what may not be seen, the Workload tells in words
        known["local_queue"] = cluster.get("LocalQueue", name) or {}
    if of := ((known.get("local_queue") or {}).get("spec") or {}).get("clusterQueue"):
        with contextlib.suppress(ClusterError):
            known["cluster_queue"] = cluster.get("ClusterQueue", of) or {}
        known |= _place(cluster, name, workload["metadata"]["name"])
    return known


def _place(cluster: Cluster, name: str, own: str) -> dict[str, Any]:
    """A Workload's place, of which Kueue itself is asked; its answer may fail while it works."""
    try:
        pending = cluster.get("PendingWorkloads", name, "pendingworkloads") or {}
    except ClusterError:
        return {}
    places = {it["metadata"]["name"]: it for it in pending.get("items") or []}
    return {"ahead": int(places[own]["positionInClusterQueue"])} if own in places else {}


def _missing_priority(cluster: Cluster, job: Object) -> str:
    """The WorkloadPriorityClass that a job names and that is not there."""
    name = (job["metadata"].get("labels") or {}).get(PRIORITY, "")
    with contextlib.suppress(ClusterError):
        if name and cluster.get("WorkloadPriorityClass", name) is None:
            return str(name)
    return ""
