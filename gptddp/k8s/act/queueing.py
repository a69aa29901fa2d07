"""A job in a queue of Kueue: what must be there before it is created, and its Workload.

Kueue owns the suspension of such a job: what somebody else sets, it sets back. Whether it may run
at all is `spec.active` of its Workload.
"""

from functools import partial

from gptddp.errors import ConfigError
from gptddp.k8s.cluster import Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import PRIORITY, QUEUE, Object, queue_name
from gptddp.k8s.observe.queue import NO_KUEUE, workload_of

_NAMED = (("LocalQueue", QUEUE, "--queue"), ("WorkloadPriorityClass", PRIORITY, "--priority"))


def check(cluster: Cluster, job: Object) -> None:
    """Raise ConfigError for a queue or a priority that is not there: the job would wait for ever.

    What this user may not see is left to Kueue, as all else that its Workload says itself.
    """
    for kind, label, flag in _NAMED:
        if not (name := (job["metadata"].get("labels") or {}).get(label)):
            continue
        try:
            missing = if_allowed(partial(cluster.get, kind, name), {}) is None
        except ClusterError as error:
            if error.status != 404:  # of the kind itself
                raise
            raise ConfigError(
                f"{flag} {name}: {NO_KUEUE}: leave it out, or use another --context"
            ) from None
        if missing:
            near = cluster.near(kind, name)
            there = (
                f"there are {', '.join(near)}" if near else "an administrator of Kueue makes one"
            )
            raise ConfigError(f"{flag} {name}: there is no {kind} of this name here; {there}")


def workload(cluster: Cluster, job: Object) -> Object | None:
    """The Workload by which Kueue decides whether a job of a queue runs; None where there is none.

    Raises ClusterError where that may not be seen.
    """
    try:
        return workload_of(cluster, job) if queue_name(job) else None
    except ClusterError as error:
        if error.status != 404:  # no Kueue
            raise
        return None
