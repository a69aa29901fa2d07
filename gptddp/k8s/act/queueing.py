"""A job in a queue of Kueue: checks before it is created, and its Workload.

Kueue owns the suspension of such a job, and reverts changes by others. `spec.active` of its
Workload decides whether it may run.
"""

from functools import partial

from gptddp.errors import ConfigError
from gptddp.k8s.cluster import Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import PRIORITY, QUEUE, Object, queue_name
from gptddp.k8s.observe.queue import NO_KUEUE, workload_of

_NAMED = (("LocalQueue", QUEUE, "--queue"), ("WorkloadPriorityClass", PRIORITY, "--priority"))


def check(cluster: Cluster, job: Object) -> None:
    """Raise ConfigError for a missing queue or priority: the job would wait for ever.

    Objects that this user may not read are not checked; the Workload reports other problems.
    """
    for kind, label, flag in _NAMED:
        if not (name := (job["metadata"].get("labels") or {}).get(label)):
            continue
        try:
            missing = if_allowed(partial(cluster.get, kind, name), {}) is None
        except ClusterError as error:
            if error.status != 404:  # 404: the kind does not exist
                raise
            raise ConfigError(
                f"{flag} {name}: {NO_KUEUE}: leave it out, or use another --context"
            ) from None
        if missing:
            near = cluster.near(kind, name)
            there = (
                f"there are {', '.join(near)}" if near else "an administrator of Kueue creates it"
            )
            raise ConfigError(f"{flag} {name}: there is no {kind} of this name here; {there}")


def workload(cluster: Cluster, job: Object) -> Object | None:
    """The Workload by which Kueue decides whether a job of a queue runs; None if there is none.

    Raises ClusterError without the right to read it.
    """
    try:
        return workload_of(cluster, job) if queue_name(job) else None
    except ClusterError as error:
        if error.status != 404:  # no Kueue
            raise
        return None
