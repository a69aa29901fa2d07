"""A job in a queue of Kueue: what must be there before it is created, and taking it out and in.

Kueue owns the suspension of such a job: what somebody else sets, it sets back. Whether it may run
at all is `spec.active` of its Workload.
"""

import contextlib
import copy

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import (
    PRIORITY,
    QUEUE,
    Object,
    condition,
    queue_name,
    replica_specs,
    suspended,
)
from gptddp.k8s.observe.queue import Queue, fetch, workload_of
from gptddp.k8s.observe.watcher import Say

# What Kueue adds to a template while a job is admitted: where its quota is, and whose it is.
_TEMPLATE = (
    ("metadata", "annotations"),
    ("metadata", "labels"),
    ("spec", "nodeSelector"),
    ("spec", "tolerations"),
    ("spec", "schedulingGates"),
)
_ADMITTED = (
    "metadata.annotations.kueue.x-k8s.io/",
    "metadata.labels.kueue.x-k8s.io/",
    "spec.nodeSelector",
    "spec.tolerations",
    "spec.schedulingGates",
)


def check(cluster: Cluster, job: Object, answer: Object, say: Say) -> None:
    """Raise ConfigError where Kueue would never start a job, or not hold it at all.

    `answer`: the job as a dry run of the server gave it back. What this user may not see is left
    to Kueue; a queue that is stopped may be started again, and is a warning.
    """
    name = queue_name(job)
    if not name:
        return
    queue = _seen(cluster, "LocalQueue", name)
    if queue == {}:
        there = _names(cluster, "LocalQueue", name)
        raise ConfigError(
            f"no LocalQueue {name} (--queue) in the namespace {cluster.namespace}: {there}"
        )
    if answer is not job and not suspended(answer):
        raise ConfigError(
            f"--queue {name}: Kueue does not hold PyTorchJobs here: the job would start at once,"
            " outside of the queue; its administrator can add kubeflow.org/pytorchjob to"
            " integrations.frameworks of its configuration, or leave out --queue"
        )
    priority = (job["metadata"].get("labels") or {}).get(PRIORITY)
    if priority and _seen(cluster, "WorkloadPriorityClass", priority) == {}:
        there = _names(cluster, "WorkloadPriorityClass", priority)
        raise ConfigError(f"no WorkloadPriorityClass {priority} (--priority): {there}")
    if queue and (trouble := closed(queue)):
        say(f"warning: {trouble}: the job waits until that is mended")


def closed(queue: Object) -> str:
    """Why a LocalQueue lets no job start; empty for one that does, as far as it says."""
    name, of = queue["metadata"]["name"], queue["spec"].get("clusterQueue")
    policy = queue["spec"].get("stopPolicy") or "None"
    if policy != "None":
        return f"the queue {name} is stopped (spec.stopPolicy: {policy})"
    active = condition(queue, "Active") or {}
    if active.get("status") != "False":
        return ""
    if active.get("reason") == "ClusterQueueDoesNotExist":
        return f"there is no ClusterQueue {of}, which the queue {name} names (spec.clusterQueue)"
    return f"the ClusterQueue {of} of the queue {name} takes no jobs"


def _seen(cluster: Cluster, kind: str, name: str) -> Object | None:
    """An object of Kueue; {} if it is not there, None if that may not be seen."""
    try:
        return cluster.get(kind, name) or {}
    except ClusterError as error:
        if error.status == 404:  # the kind itself
            raise ConfigError(
                f"--queue: the cluster has no Kueue, of which {QUEUE} is a label: leave it out,"
                " or use another --context"
            ) from None
        if error.status != 403:
            raise
        return None


def _names(cluster: Cluster, kind: str, meant: str) -> str:
    """The names of a kind that may have been meant."""
    near = cluster.near(kind, meant)
    return f"there are {', '.join(near)}" if near else "there is none; its administrator makes one"


def set_by_kueue(path: str) -> bool:
    """May a field of a job be there because Kueue has admitted it, and put pods on nodes?"""
    _, in_template, field = path.partition(".Worker.template.")
    return bool(in_template) and field.startswith(_ADMITTED)


def as_submitted(cluster: Cluster, job: Object) -> Object:
    """A copy of the job without what Kueue has put into its templates when it admitted it.

    Its Workload has them as they were; for who may not see it, the flavor's nodes stay.
    """
    job, workload = copy.deepcopy(job), None
    with contextlib.suppress(ClusterError):
        workload = workload_of(cluster, job) if queue_name(job) else None
    before = {
        it["name"]: it["template"] for it in ((workload or {}).get("spec", {})).get("podSets", [])
    }
    for role, replica in replica_specs(job).items():
        template = replica["template"]
        was = before.get(role.lower()) or _without_kueues(template)
        for part, field in _TEMPLATE:
            template.setdefault(part, {}).pop(field, None)
            if value := (was.get(part) or {}).get(field):
                template[part][field] = value
    return job


def _without_kueues(template: Object) -> Object:
    """A template without the keys and gates that are Kueue's own by their names."""
    meta, spec = template.get("metadata") or {}, template["spec"]
    own = {
        field: {k: v for k, v in (meta.get(field) or {}).items() if not _set_by_kueue(k)}
        for field in ("annotations", "labels")
    }
    gates = [it for it in spec.get("schedulingGates") or [] if not _set_by_kueue(it["name"])]
    return {"metadata": own, "spec": {**spec, "schedulingGates": gates}}


def _set_by_kueue(key: str) -> bool:
    """A user sets those of a pod set, as for its topology."""
    return key.startswith("kueue.x-k8s.io/") and not key.startswith("kueue.x-k8s.io/podset-")


def of(cluster: Cluster, job: Object) -> Queue | None:
    """The queue that a job waits in or was admitted from; None where no Kueue has taken it.

    Raises ClusterError where that may not be seen: what is set on the job itself, Kueue sets back.
    """
    queue = fetch(cluster, job)
    if queue and queue.unseen:
        raise ClusterError(
            f"the job is in the queue {queue.name} of Kueue, which decides when it runs, and its"
            f" Workload may not be read: {queue.unseen}",
            403,
        )
    return queue if queue and queue.workload else None


def check_scale(job: Object, queue: Queue, replicas: int, at: str) -> None:
    """Raise ConfigError for a job that runs: Kueue would stop it."""
    if not suspended(job):
        name = job["metadata"]["name"]
        raise ConfigError(
            f"--replicas {replicas}: Kueue stops a job whose number of pods changes, and queues it"
            f" anew. If that is meant: `gptddp-k8s suspend {name}{at}`, and then this command: the"
            f" job waits in the queue {queue.name} for room for that many, and goes on from its"
            " checkpoint"
        )


def set_active(cluster: Cluster, queue: Queue, active: bool) -> None:
    """Take a job out of its queue, whether it runs or waits, or put it in again.

    Raises ClusterError, with what else there is to do for who may not.
    """
    assert queue.workload
    name = queue.workload["metadata"]["name"]
    try:
        cluster.patch("Workload", name, {"spec": {"active": active}})
    except ClusterError as error:
        if error.status == 403:
            patch = f'{{"spec": {{"active": {str(active).lower()}}}}}'
            by_hand = (
                f"`kubectl patch workload {name} -n {cluster.namespace} --type merge -p '{patch}'`"
                " by somebody who may does it. You can delete the job, whose pods commit a"
                " checkpoint, and submit it again: it is queued anew, and its run goes on"
            )
            error.args = (f"{error}; {by_hand}",)
        raise
