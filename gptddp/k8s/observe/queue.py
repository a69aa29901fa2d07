"""The state of a job in Kueue: the Workload that stands for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object, condition, holds, queue_name, suspended

NO_KUEUE = "the cluster has no Kueue of version 0.15 or newer"  # whose API is v1beta2
_JOB_UID = "kueue.x-k8s.io/job-uid"


@dataclass(frozen=True)
class Queue:
    """A job's queue as far as this user may see it; `workload` is None if not known.

    `unseen`: the server's error if the Workload cannot be read.
    """

    name: str
    kueue: bool = True  # is there a Kueue on the cluster at all?
    workload: Object | None = None
    unseen: str = ""

    @property
    def held(self) -> bool:
        """Was the job taken out of the queue, by `suspend` or by Kueue after too many tries?"""
        return self.workload is not None and self.workload["spec"].get("active") is False

    @property
    def admitted(self) -> bool:
        """Does the job have its quota, and is it not about to lose it?"""
        has = self.workload is not None and holds(self.workload, "QuotaReserved")
        return has and not holds(self.workload or {}, "Evicted")

    @property
    def given_up(self) -> str:
        """Why Kueue has given up starting the job; else empty."""
        finished = condition(self.workload or {}, "Finished") or {}
        return str(finished.get("message")) if finished.get("reason") == "FailedToStart" else ""

    @property
    def gone(self) -> bool:
        """Will no queue start the job: was it taken out, or does the cluster have no Kueue?"""
        return self.held or bool(self.given_up) or not self.kueue


def fetch(cluster: Cluster, job: Object) -> Queue | None:
    """The queue of a job; None for a job that Kueue does not manage."""
    if not queue_name(job) and not suspended(job):
        return None
    try:
        return _queue_of(job, workload_of(cluster, job))
    except ClusterError as error:
        return _unread(job, error)


def of_jobs(cluster: Cluster, jobs: Sequence[Object], everywhere: bool = False) -> dict[str, Queue]:
    """The queues of the suspended jobs among these, by uid."""
    waiting = {str(job["metadata"].get("uid")): job for job in jobs if suspended(job)}
    if not waiting:
        return {}
    try:
        workloads = cluster.find("Workload", _JOB_UID, everywhere=everywhere)
    except ClusterError as error:
        queues = {uid: _unread(job, error) for uid, job in waiting.items()}
    else:
        by_uid = {it["metadata"]["labels"][_JOB_UID]: it for it in sorted(workloads, key=_created)}
        queues = {uid: _queue_of(job, by_uid.get(uid)) for uid, job in waiting.items()}
    return {uid: queue for uid, queue in queues.items() if queue}


def workload_of(cluster: Cluster, job: Object) -> Object | None:
    """The newest Workload of a job. Raises ClusterError."""
    found = cluster.find("Workload", f"{_JOB_UID}={job['metadata'].get('uid', '')}")
    return max(found, key=_created, default=None)


def _created(workload: Object) -> str:
    return str(workload["metadata"].get("creationTimestamp"))


def _queue_of(job: Object, workload: Object | None) -> Queue | None:
    """The queue of a job. If Kueue manages all jobs, a job without a queue has a Workload too."""
    name = queue_name(job)
    if workload and not name and workload["spec"].get("queueName"):
        return None  # the label was removed from a job in a queue: Kueue ignores the job
    return Queue(name, workload=workload) if name or workload else None


def _unread(job: Object, error: ClusterError) -> Queue | None:
    """The queue of a job whose Workload cannot be read; 404: the cluster does not know the kind."""
    name, kueue = queue_name(job), error.status != 404
    return Queue(name, kueue, unseen=str(error) if kueue else "") if name else None
