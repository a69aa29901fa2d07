"""Changes a job on a cluster: delete, scale, suspend, resume.

Each function returns what it did, in kubectl's words, and passes notes to `say`. A job that
gptddp-k8s did not create is refused, with the kubectl command for it: it is not known whether its
pods commit a checkpoint, or at which sizes it can train.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial

from gptddp.errors import ConfigError
from gptddp.k8s.act import queueing
from gptddp.k8s.act.failure import AGAIN, says
from gptddp.k8s.cluster import JOB, Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError, NotFoundError
from gptddp.k8s.objects import (
    Object,
    argument,
    claim_at,
    is_ours,
    ours,
    queue_name,
    replica_count,
    resource,
    seconds,
    suspended,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.observe import why
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.observe.why import state
from gptddp.k8s.render import companions
from gptddp.k8s.render.manifest import RUNS

UNREACHABLE = (
    "the node may be down; once you are certain that it no longer runs,"
    " `kubectl delete pod POD --force` removes the pod"
)
_SHORT_JOB = "batch.kubernetes.io/job-name"  # label of the pods of `prepare` and `sample`
_POLL_S = 1.0
_OVERDUE_S = 10.0


def finished(job: Object) -> bool:
    """Has the job succeeded or failed?"""
    return state(job) in why.FINAL


def grace_s(job: Object) -> int:
    """The pods' termination grace period."""
    return int(worker_pod_spec(job).get("terminationGracePeriodSeconds", 30))


def run_location(job: Object) -> str:
    """The location of the run: `NAME in the claim CLAIM`; "" if the job has no such volume."""
    pod_spec = worker_pod_spec(job)
    claim = claim_at(pod_spec, RUNS)
    folder = argument(pod_spec, "--run-dir").removeprefix(f"{RUNS}/") or job["metadata"]["name"]
    return f"{folder} in the claim {claim}" if claim else ""


def check_ours(cluster: Cluster, job: Object, kubectl: str) -> None:
    name = job["metadata"]["name"]
    if not is_ours(job, name):
        raise ConfigError(
            f"the PyTorchJob {name} was not created by gptddp-k8s; if it is yours, "
            f"`kubectl {kubectl}{cluster.kubectl}`"
        )


# -- delete --------------------------------------------------------------------------------------

_Named = tuple[str, Object]  # kind and object; an object in a list has no kind


def delete(cluster: Cluster, name: str, job: Object | None, say: Say) -> Iterator[str]:
    """Delete the job and our objects of its name that it does not own; yields each.

    The garbage collector deletes the objects that the job owns. An object that this user may not
    delete is reported and kept; none of these run. Raises NotFoundError if there was nothing,
    ConfigError for a job that is not ours, ClusterError. The next call completes one that failed.
    """
    if job is not None:
        check_ours(cluster, job, f"delete pytorchjob {name}")
    with says("nothing was deleted"):
        found = [(JOB, job)] if job else []
        found += [(kind, it) for kind, it in _beside(cluster, name) if not _is_owned(it)]
    gone = 0
    for at, (kind, it) in enumerate(found):
        with says(f"probably not deleted: {names(found[at:])}; {AGAIN}"):
            if _delete_one(cluster, kind, it, say):
                yield resource(kind, it["metadata"]["name"])
                gone += 1
    if not gone and not remains(cluster, name):
        if cluster.get(JOB, name) is not None:
            what = f"the job {name} was replaced by a new one of its name at the same moment"
            raise NotFoundError(f"{what}\n  nothing was deleted; {AGAIN}")
        raise cluster.not_found(name)


def _beside(cluster: Cluster, name: str) -> Iterator[_Named]:
    """Our objects under a job's name, as far as this user may read them."""
    for kind in (*companions.KINDS, "Secret"):
        it = if_allowed(partial(cluster.get, kind, name), None)
        if it is not None and is_ours(it, name):
            yield kind, it
    for kind in ("ConfigMap", "Job"):
        yield from ((kind, it) for it in if_allowed(partial(cluster.find, kind, ours(name)), []))


def _is_owned(it: Object) -> bool:
    """Does the garbage collector delete it with the job?"""
    return bool(it["metadata"].get("ownerReferences"))


def _delete_one(cluster: Cluster, kind: str, it: Object, say: Say) -> bool:
    """Delete it; False if it is gone, or if this user may not delete it and it may stay."""
    what = names([(kind, it)])
    try:
        return cluster.delete(kind, it["metadata"]["name"], it["metadata"].get("uid"))
    except ClusterError as error:
        if error.status == 409:  # another submit has created a new one of its name
            return False
        if error.status != 403 or kind in (JOB, "Job"):  # jobs would continue to run
            raise
        say(
            f"no right to delete {what}: it stays, runs nothing, and a new job of this name uses it"
            f" again; a user with the right can `kubectl delete {what}{cluster.kubectl}`"
        )
        return False


def remains(cluster: Cluster, name: str) -> list[_Named]:
    """Pods and services of a deleted job, and objects that the garbage collector will delete.

    A new job of the name has to wait for them: a late collection would delete its objects.
    """
    job = cluster.get(JOB, name)
    if job is not None and "deletionTimestamp" not in job["metadata"]:
        return []  # all objects belong to a new job that was submitted meanwhile
    beside = list(_beside(cluster, name))
    jobs = [it["metadata"]["name"] for kind, it in beside if kind == "Job"]
    rest: list[_Named] = [
        ("Pod", pod)
        for pod in cluster.find("Pod", ours(name))
        if pod["metadata"]["labels"].get(_SHORT_JOB) not in jobs  # of a Job that still exists
    ]
    rest += [("Service", it) for it in cluster.find("Service", f"{companions.JOB_NAME}={name}")]
    return rest + [(kind, it) for kind, it in beside if _is_owned(it)]


def wait_gone(cluster: Cluster, name: str, say: Say, limit_s: float = math.inf) -> str:
    """Wait until nothing of a deleted job remains; at the limit, returns the remaining names."""
    end, reported, warned = time.monotonic() + limit_s, 0, False
    while rest := remains(cluster, name):
        if time.monotonic() > end:
            return names(rest)
        if len(rest) != reported:
            say(f"waiting for {names(rest)} to end{_CHECKPOINT if any(map(_trains, rest)) else ''}")
            reported = len(rest)
        stuck = [(kind, it) for kind, it in rest if _overdue(it)]
        if stuck and not warned:
            say(f"{names(stuck)} should have ended by now: {UNREACHABLE}")
            warned = True
        time.sleep(_POLL_S)
    return ""


_CHECKPOINT = "; a pod commits a checkpoint first"


def _trains(named: _Named) -> bool:
    kind, it = named
    return kind == "Pod" and (it.get("status") or {}).get("phase") == "Running"


def names(things: Sequence[_Named], most: int = 3) -> str:
    """`pod/a, pod/b, service/c and 2 more`."""
    first = ", ".join(resource(kind, it["metadata"]["name"]) for kind, it in things[:most])
    return first + (f" and {len(things) - most} more" if len(things) > most else "")


def _overdue(it: Object) -> bool:
    """Is a pod on a node _OVERDUE_S past its end, the grace period included?"""
    due = seconds(it["metadata"].get("deletionTimestamp"))
    return bool(due and "nodeName" in it.get("spec", {}) and time.time() > due + _OVERDUE_S)


# -- scale, suspend, resume ----------------------------------------------------------------------


def scale(cluster: Cluster, name: str, replicas: int, say: Say) -> str:
    """Set the number of pods of a job between its minimum and maximum."""
    by_hand = f"scale pytorchjob {name} --replicas {replicas}"
    job, workload = _changeable(cluster, name, "scale", by_hand)
    policy, at = job["spec"].get("elasticPolicy") or {}, cluster.flags
    old = replica_count(worker_spec(job))
    low, high = int(policy.get("minReplicas", old)), int(policy.get("maxReplicas", old))
    if replicas < 1:
        raise ConfigError(
            f"--replicas {replicas}: a job without pods would count as succeeded; "
            f"`gptddp-k8s suspend {name}{at}` stops it, and `resume` continues it"
        )
    if not low <= replicas <= high:
        above = replicas > high
        bound = f"above the job's maximum, {high}" if above else f"below the job's minimum, {low}"
        raise ConfigError(
            f"--replicas {replicas} is {bound}, which was set when its pods were started;"
            f" `gptddp-k8s delete {name}{at}` and submit it with --{'max' if above else 'min'} "
            f"{replicas}: the run continues from its newest checkpoint"
        )
    if replicas == old:
        say(f"the job has {old} replicas already")
        return f"{resource(JOB, name)} unchanged"
    if workload and not suspended(job):
        raise ConfigError(
            f"--replicas {replicas}: Kueue stops a job whose number of pods changes, and queues it"
            f" again. If you want that: `gptddp-k8s suspend {name}{at}`, and then this command"
        )
    _patch(cluster, JOB, name, {"pytorchReplicaSpecs": {"Worker": {"replicas": replicas}}})
    if workload:
        say(f"the job waits in the queue {queue_name(job)} for room for its pods")
    elif suspended(job):
        say(f"the job is suspended: the change takes effect with `gptddp-k8s resume {name}{at}`")
    return f"{resource(JOB, name)} scaled: {old} -> {replicas}"


def set_suspended(cluster: Cluster, name: str, wanted: bool, say: Say) -> str:
    """Suspend or resume a job; in a queue by its Workload, as Kueue reverts changes to the job."""
    verb, done = ("suspend", "suspended") if wanted else ("resume", "resumed")
    spec = {"runPolicy": {"suspend": wanted}}
    by_hand = f"patch pytorchjob {name} --type merge -p '{json.dumps({'spec': spec})}'"
    job, workload = _changeable(cluster, name, verb, by_hand)
    status = f"`gptddp-k8s status {name}{cluster.flags}`"
    waits = f"it is in the queue {queue_name(job)}; {status} says what it waits for"
    held = workload["spec"].get("active") is False if workload else suspended(job)
    if held == wanted:
        say(f"the job is {'suspended already' if held else 'not suspended'}")
        if workload and suspended(job) and not held:
            say(waits)
        return f"{resource(JOB, name)} unchanged"
    if workload:
        without = (
            f"`gptddp-k8s delete {name}{cluster.flags}` and the same submit do not need this right"
        )
        active = {"active": not wanted}
        _patch(cluster, "Workload", workload["metadata"]["name"], active, f"; {without}")
    else:
        _patch(cluster, JOB, name, spec)
    if wanted and not suspended(job):
        say(f"its pods get SIGTERM and have {grace_s(job)} s to commit a checkpoint")
    if wanted:
        say(f"`gptddp-k8s resume {name}{cluster.flags}` continues it")
    elif workload:
        say(waits)
    return f"{resource(JOB, name)} {done}"


def _patch(cluster: Cluster, kind: str, name: str, spec: Object, otherwise: str = "") -> None:
    with says(
        f"the job was not changed{otherwise}",
        f"it is not known whether the job was changed; {AGAIN}",
    ):
        cluster.patch(kind, name, {"spec": spec})


def _changeable(
    cluster: Cluster, name: str, verb: str, kubectl: str
) -> tuple[Object, Object | None]:
    """A job that is ours and has not ended, with its Workload if it is in a queue of Kueue."""
    with says("nothing was changed"):
        job = cluster.job(name)
        check_ours(cluster, job, kubectl)
        if finished(job):
            raise ConfigError(
                f"the job {name} has {state(job).lower()}: there is nothing to {verb}; to run it"
                f" again, submit it with --replace"
            )
        return job, queueing.workload(cluster, job)
