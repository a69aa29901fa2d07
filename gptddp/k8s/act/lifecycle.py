"""What is done to a job that is on a cluster: delete, scale, suspend, resume.

Each function returns what it did, in kubectl's words, and gives `say` what else there is to know.
"""

import calendar
import time
from collections.abc import Iterator, Sequence

from gptddp.errors import ClusterError, ConfigError, GptddpError, NotFoundError
from gptddp.k8s.act import queueing
from gptddp.k8s.act.failure import AGAIN, says
from gptddp.k8s.cluster import JOB, Cluster, resource
from gptddp.k8s.objects import (
    QUEUE,
    Object,
    argument,
    claim_at,
    replica_count,
    suspended,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.observe import why
from gptddp.k8s.observe.queue import Queue
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.observe.why import state
from gptddp.k8s.render import companions
from gptddp.k8s.render.manifest import RUNS

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
    pod_spec = worker_pod_spec(job)
    claim = claim_at(pod_spec, RUNS)
    folder = argument(pod_spec, "--run-dir").removeprefix(f"{RUNS}/") or job["metadata"]["name"]
    return f"{folder} in the claim {claim}" if claim else ""


# -- delete --------------------------------------------------------------------------------------


def delete(cluster: Cluster, name: str, job: Object | None, say: Say) -> Iterator[str]:
    """Delete the job and all that is ours under its name; yields each thing that has gone.

    What this user may not delete is said, and left: nothing of it runs, or holds up another job of
    the name. Raises NotFoundError if there was nothing else, ConfigError for a job of somebody
    else, ClusterError. A call that was killed, or failed, is completed by the next one.
    """
    if job is not None and not is_ours(job, name):
        raise ConfigError(
            f"the PyTorchJob {name} was not made by gptddp-k8s; if it is yours, "
            f"`kubectl delete pytorchjob {name} -n {cluster.namespace}`"
        )
    with says("nothing was deleted"):
        # Listed first: the garbage collector takes them as soon as the job is gone.
        found = [(JOB, job)] if job else []
        for kind in (*reversed(companions.KINDS), "ConfigMap", "Secret", "Job"):
            found += [(kind, it) for it in _found(cluster, kind, name, say)]
    left = []
    for at, (kind, it) in enumerate(found):
        rest = _resources(found[at:])
        with says(f"not deleted, as far as is known: {rest}; {AGAIN}"):
            deleted = _delete_one(cluster, kind, it)
        if deleted:
            yield resource(kind, it["metadata"]["name"])
        else:
            left.append((kind, it))
    stays = [(kind, it) for kind, it in left if not (job and _goes_with(it, job))]
    told = f"no right to delete {_resources(stays)}: {by_hand(cluster, stays)}" if stays else ""
    if len(left) < len(found) or remains(cluster, name):
        if told:
            say(f"{told}. Nothing of it runs, and a new job of this name uses it again")
        return
    error = cluster.not_found(name)
    raise NotFoundError(f"{error}\n  {told}") if told else error


def _delete_one(cluster: Cluster, kind: str, it: Object) -> bool:
    """Delete it; False where this user may not, and it may stay."""
    try:
        cluster.delete(kind, str(it["metadata"]["name"]))
    except ClusterError as error:
        if error.status == 403 and kind not in (JOB, "Job"):
            return False
        raise
    return True


def _goes_with(it: Object, job: Object) -> bool:
    """Will the garbage collector delete it after the job?"""
    owners = it["metadata"].get("ownerReferences") or []
    return [owner["uid"] for owner in owners] == [job["metadata"].get("uid")]


def by_hand(cluster: Cluster, things: Sequence[tuple[str, Object]]) -> str:
    """What somebody with more rights can type to delete these objects, each with its kind."""
    command = f"kubectl delete {_resources(things)} -n {cluster.namespace}"
    return f"`{command}` by somebody who may removes it"


def _resources(things: Sequence[tuple[str, Object]]) -> str:
    return " ".join(resource(kind, it["metadata"]["name"]) for kind, it in things)


def _found(cluster: Cluster, kind: str, name: str, say: Say) -> list[Object]:
    try:
        return cluster.find(kind, ours(name))
    except ClusterError as error:
        if error.status != 403:
            raise
        live, unseen = _by_name(cluster, kind, name)
        # Who may not see these could not make them, and those of a job go with the job.
        if kind == "Job" or (unseen and kind not in ("Secret", "ConfigMap")):
            say(f"warning: whether there is a {kind} beside the job cannot be seen: {error}")
        return [live] if live is not None and is_ours(live, name) else []


def _by_name(cluster: Cluster, kind: str, name: str) -> tuple[Object | None, bool]:
    """What is not to be listed may be read, and most has the job's name; and whether it may not."""
    try:
        return cluster.get(kind, name), False
    except ClusterError as error:
        if error.status != 403:
            raise
        return None, True


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
    with says("nothing was changed", errors=GptddpError):
        queue = queueing.of(cluster, job)
        if queue:
            queueing.check_scale(job, queue, replicas, at)
    change = {"pytorchReplicaSpecs": {"Worker": {"replicas": replicas}}}
    _change(cluster, name, change)
    if queue:
        again = " again" if queue.held else ""
        say(f"the job waits in the queue {queue.name}{again}, for room for its pods")
    elif suspended(job):
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
    with says("nothing was changed", errors=GptddpError):
        queue = queueing.of(cluster, job)
    if queue:
        return _set_held(cluster, job, queue, wanted, say)
    if suspended(job) == wanted:
        say(f"the job is {'suspended already' if wanted else 'not suspended'}")
        return f"{resource(JOB, name)} unchanged"
    _change(cluster, name, {"runPolicy": {"suspend": wanted}})
    if wanted:
        say(
            f"its pods get SIGTERM and have {grace_s(job)} s to commit a checkpoint; "
            f"`gptddp-k8s resume {name}{cluster.flags}` goes on from it"
        )
    return f"{resource(JOB, name)} {'suspended' if wanted else 'resumed'}"


def _set_held(cluster: Cluster, job: Object, queue: Queue, wanted: bool, say: Say) -> str:
    """Take a job of Kueue's out of its queue, or put it in again."""
    name, at = job["metadata"]["name"], cluster.flags
    runs = not suspended(job)
    if queue.held == wanted:
        if not wanted and queue.given_up:
            raise ConfigError(
                f"Kueue could not start the job {name}, and tries no more: {queue.given_up};"
                f" `gptddp-k8s delete {name}{at}` it, and submit it anew: its run goes on"
            )
        if not wanted and not runs and not queue.name:
            raise ConfigError(
                f"the job {name} names no queue, and Kueue starts no job without one here; `kubectl"
                f" label pytorchjob {name} {QUEUE}=NAME -n {cluster.namespace}` puts it into one"
            )
        if not wanted and not runs:
            raise ConfigError(
                f"the job {name} is not suspended: it waits in the queue {queue.name}, and Kueue"
                " starts it when there is room; what starts it now, Kueue would stop at once;"
                f" `gptddp-k8s status {name}{at}` says what it waits for"
            )
        say(f"the job is {'suspended already' if wanted else 'not suspended'}")
        return f"{resource(JOB, name)} unchanged"
    with says(_UNCHANGED, _UNKNOWN):
        queueing.set_active(cluster, queue, not wanted)
    if not wanted:
        say(f"it waits in the queue {queue.name} again; Kueue starts it when there is room")
        return f"{resource(JOB, name)} resumed"
    if runs:
        say(f"its pods get SIGTERM and have {grace_s(job)} s to commit a checkpoint")
    say(
        f"it was taken out of the queue {queue.name}: `gptddp-k8s resume {name}{at}` puts it in"
        f" again{', and it goes on from its checkpoint' if runs else ''}"
    )
    return f"{resource(JOB, name)} suspended"


_UNCHANGED, _UNKNOWN = (
    "the job was not changed",
    f"whether the job was changed is not known; {AGAIN}",
)


def _change(cluster: Cluster, name: str, spec: Object) -> None:
    with says(_UNCHANGED, _UNKNOWN):
        cluster.patch(JOB, name, {"spec": spec})


def _unfinished(cluster: Cluster, name: str, verb: str) -> Object:
    with says("nothing was changed"):
        job = cluster.job(name)
    if finished(job):
        raise ConfigError(
            f"the job {name} has {state(job).lower()}: there is nothing to {verb}; to run it"
            f" again, `gptddp-k8s delete {name}{cluster.flags}` and submit it"
        )
    return job
