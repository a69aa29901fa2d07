"""What is done to a job that is on a cluster: delete, scale, suspend, resume.

Each function returns what it did, in kubectl's words, and gives `say` what else there is to know.
"""

import calendar
import time
from collections.abc import Sequence

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.cluster import JOB, Cluster, resource
from gptddp.k8s.objects import (
    Object,
    replica_count,
    suspended,
    volume_claims,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.observe import why
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.observe.why import state
from gptddp.k8s.render import companions

MANAGED = "app.kubernetes.io/managed-by=gptddp-k8s"
_POLL_S = 1.0
_OVERDUE_S = 10.0


def ours(name: str) -> str:
    """The label selector of everything that belongs to the job of this name."""
    return f"app.kubernetes.io/instance={name},{MANAGED}"


def is_ours(live: Object, name: str) -> bool:
    labels = live["metadata"].get("labels") or {}
    return all(labels.get(k) == v for k, v in (pair.split("=") for pair in ours(name).split(",")))


def finished(job: Object) -> bool:
    """Has the job succeeded or failed?"""
    return state(job) in why.FINAL


def grace_s(job: Object) -> int:
    """The pods' termination grace period."""
    return int(worker_pod_spec(job).get("terminationGracePeriodSeconds", 30))


def run_location(job: Object) -> str:
    """Where the run is: `NAME in the claim CLAIM`; empty for a job without such a volume."""
    claim = dict(volume_claims(worker_pod_spec(job))).get("runs")
    return f"{job['metadata']['name']} in the claim {claim}" if claim else ""


# -- delete --------------------------------------------------------------------------------------


def delete(cluster: Cluster, name: str) -> list[str]:
    """Delete the job and all that is ours under its name; returns what there was.

    Raises NotFoundError if that is nothing. A call that was killed is completed by the next one.
    """
    job = cluster.get(JOB, name)
    if job is not None and not is_ours(job, name):
        raise ConfigError(
            f"the PyTorchJob {name} was not made by gptddp-k8s; if it is yours, "
            f"`kubectl delete pytorchjob {name} -n {cluster.namespace}`"
        )
    # Listed first: the garbage collector takes them as soon as the job is gone.
    found = [
        (kind, str(it["metadata"]["name"]))
        for kind in ("Job", *reversed(companions.KINDS), "Secret")
        for it in _found(cluster, kind, name)
    ]
    gone = [*([(JOB, name)] if job else []), *found]
    for it in gone:
        cluster.delete(*it)
    if not gone and not remains(cluster, name):
        raise cluster.not_found(name)
    return [resource(*it) for it in gone]


def _found(cluster: Cluster, kind: str, name: str) -> list[Object]:
    try:
        return cluster.find(kind, ours(name))
    except ClusterError as error:
        if kind == "Secret" and error.status == 403:
            return []  # who may not see it could not make it; one of a job goes with the job
        raise


def remains(cluster: Cluster, name: str, short_jobs: bool = True) -> list[Object]:
    """Pods and services under a job's name; with the pods of its short Jobs, such as `sample`."""
    by_operator = f"{companions.JOB_NAME}={name}"
    pods = cluster.find("Pod", by_operator) + (
        cluster.find("Pod", ours(name)) if short_jobs else []
    )
    found = {pod["metadata"]["name"]: pod for pod in pods}
    for service in cluster.find("Service", by_operator):
        found.setdefault(service["metadata"]["name"], service)
    return list(found.values())


def wait_gone(
    cluster: Cluster, name: str, say: Say, *, limit_s: float | None = None, short_jobs: bool = True
) -> bool:
    """Wait until nothing remains of a deleted job, telling what still does; False at the limit."""
    end, told, warned = time.monotonic() + (limit_s or 0), 0, False
    while left := remains(cluster, name, short_jobs):
        if limit_s is not None and time.monotonic() > end:
            return False
        if len(left) != told:
            say(f"waiting for {names(left)} to end{_CHECKPOINT if any(map(_trains, left)) else ''}")
            told = len(left)
        stuck = [pod for pod in left if _overdue(pod)]
        if stuck and not warned:
            say(f"{names(stuck)} should have ended by now: {UNREACHABLE}")
            warned = True
        time.sleep(_POLL_S)
    return True


def _trains(pod: Object) -> bool:
    labels = pod["metadata"].get("labels") or {}
    return companions.JOB_NAME in labels and (pod.get("status") or {}).get("phase") == "Running"


_CHECKPOINT = "; a pod commits a checkpoint first"
UNREACHABLE = (
    "the node may be down; when it is certain that it no longer runs,"
    " `kubectl delete pod POD --force` gives the pod up"
)


def names(objects: Sequence[Object], most: int = 3) -> str:
    """`a, b, c and 2 more`."""
    first = [o["metadata"]["name"] for o in objects[:most]]
    return ", ".join(first) + (f" and {len(objects) - most} more" if len(objects) > most else "")


def _overdue(pod: Object) -> bool:
    """Its time to end, the grace period included, is over by far."""
    due = pod["metadata"].get("deletionTimestamp")
    if not due or "nodeName" not in pod["spec"]:
        return False
    return time.time() > calendar.timegm(time.strptime(due, "%Y-%m-%dT%H:%M:%SZ")) + _OVERDUE_S


# -- scale, suspend, resume ----------------------------------------------------------------------


def scale(cluster: Cluster, name: str, replicas: int, say: Say) -> str:
    """Set the number of pods of a job between its minimum and maximum."""
    job = _unfinished(cluster, name, "scale")
    policy, at = job["spec"].get("elasticPolicy") or {}, cluster.flags
    old = replica_count(worker_spec(job))
    low, high = int(policy.get("minReplicas", old)), int(policy.get("maxReplicas", old))
    if replicas < 1:
        raise ConfigError(
            f"--replicas {replicas}: a job without pods would count as succeeded; "
            f"`gptddp-k8s suspend {name}{at}` stops it, and `resume` lets it go on"
        )
    if not low <= replicas <= high:
        above = replicas > high
        bound = f"above the job's maximum, {high}" if above else f"below the job's minimum, {low}"
        raise ConfigError(
            f"--replicas {replicas} is {bound}, which its pods were started with;"
            f" `gptddp-k8s delete {name}{at}` and submit it with --{'max' if above else 'min'} "
            f"{replicas}: the run goes on from its newest checkpoint"
        )
    if replicas == old:
        say(f"the job has {old} replicas already")
        return f"{resource(JOB, name)} unchanged"
    change = {"pytorchReplicaSpecs": {"Worker": {"replicas": replicas}}}
    cluster.patch(JOB, name, {"spec": change})
    if state(job) == "Suspended":
        say(f"the job is suspended: it will have them after `gptddp-k8s resume {name}{at}`")
    return f"{resource(JOB, name)} scaled: {old} -> {replicas}"


def suspend(cluster: Cluster, name: str, say: Say) -> str:
    """Stop a job so that `resume` lets it go on."""
    return _set_suspend(cluster, name, True, say)


def resume(cluster: Cluster, name: str, say: Say) -> str:
    """Let a suspended job go on, from its newest checkpoint."""
    return _set_suspend(cluster, name, False, say)


def _set_suspend(cluster: Cluster, name: str, wanted: bool, say: Say) -> str:
    job = _unfinished(cluster, name, "suspend" if wanted else "resume")
    if suspended(job) == wanted:
        say(f"the job is {'suspended already' if wanted else 'not suspended'}")
        return f"{resource(JOB, name)} unchanged"
    cluster.patch(JOB, name, {"spec": {"runPolicy": {"suspend": wanted}}})
    if wanted:
        say(
            f"its pods get SIGTERM and have {grace_s(job)} s to commit a checkpoint; "
            f"`gptddp-k8s resume {name}{cluster.flags}` goes on from it"
        )
    return f"{resource(JOB, name)} {'suspended' if wanted else 'resumed'}"


def _unfinished(cluster: Cluster, name: str, verb: str) -> Object:
    job = cluster.job(name)
    if finished(job):
        raise ConfigError(
            f"the job {name} has {state(job).lower()}: there is nothing to {verb}; to run it"
            f" again, `gptddp-k8s delete {name}{cluster.flags}` and submit it"
        )
    return job
