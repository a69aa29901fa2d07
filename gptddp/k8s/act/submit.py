"""Creates a job on a cluster: killed at any point, the same call completes what it began.

1. what the server would refuse (a dry run of the job and of its companions), and the claims,
   Secrets and so on that must be there
2. the companions, and a Secret with a new key: created, or adopted where an earlier call has left
   them
3. the job, and its uid as the owner of the companions and the Secret
"""

import time
from collections.abc import Sequence

from gptddp.errors import ClusterError, ConfigError, GptddpError
from gptddp.k8s.act import (
    claims,
    code,
    companion,
    lifecycle,
    networks,
    queueing,
    references,
    rendezvous_key,
)
from gptddp.k8s.act.failure import AGAIN, says
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, replica_count, worker_pod_spec, worker_spec
from gptddp.k8s.observe import why
from gptddp.k8s.observe.watcher import Say, transient
from gptddp.k8s.render.difference import compare, scales_to
from gptddp.k8s.render.manifest import SPEC_HASH

_DELETED_S = 30.0  # beyond the grace period, for what is left of a deleted job of the same name
_MOST_LINES = 12  # in a message


def submit(cluster: Cluster, objects: Sequence[Object], say: Say) -> tuple[Object, bool]:
    """The job of these objects as it is on the cluster, and whether this call created it.

    Raises ConfigError for another job of this name and for missing claims, ClusterError.
    """
    *helpers, job = objects
    name, keyed = job["metadata"]["name"], False
    with says("nothing was created", errors=GptddpError):
        live = _settled(cluster, job, say)
        if live is None:
            answer = refuse(cluster, job)
            queueing.check(cluster, job, answer, say)
            check_needs(cluster, job, helpers, say)
            for helper in helpers:
                companion.check(cluster, helper)
    created = live is None
    if live is None:
        undo = f"`gptddp-k8s delete {name}{cluster.flags}` removes what is there"
        beside = f"the job was not created, only things beside it; {AGAIN}, and {undo}"
        with says(beside, errors=GptddpError):  # of what belongs to somebody else as well
            for helper in helpers:
                companion.ensure(cluster, helper, None)
            keyed = rendezvous_key.make(cluster, job, say)
            check_pod(cluster, job, say)
        with says(beside, f"whether the job was created is not known; {AGAIN}, and {undo}"):
            live, created = _create(cluster, job)
    check_same(cluster, live, objects)
    if not lifecycle.finished(live):
        now = "was created" if created else "exists"
        with says(f"the job {now}; not all that is beside it goes with it; {AGAIN}"):
            for helper in helpers:
                companion.own(cluster, helper, live, say)
            if keyed:
                rendezvous_key.own(cluster, job, live, say)
            elif not created:
                rendezvous_key.check(cluster, job, live, say)
                companion.say_left(cluster, helpers, name, say)
            if created:
                code.sweep(cluster, live)
    return live, created


def _settled(cluster: Cluster, job: Object, say: Say) -> Object | None:
    """The job that exists, if any, once a deletion of it has ended."""
    name, limit_s = job["metadata"]["name"], lifecycle.grace_s(job) + _DELETED_S
    end = time.monotonic() + limit_s
    while (live := cluster.get(JOB, name)) and "deletionTimestamp" in live["metadata"]:
        if time.monotonic() > end:
            held = ", ".join(live["metadata"].get("finalizers") or ["nothing that it says"])
            raise ClusterError(f"the job {name} is still being deleted; it waits for {held}")
        time.sleep(1)
    if live is None and not lifecycle.wait_gone(
        cluster, name, say, limit_s=limit_s, short_jobs=False
    ):
        left = lifecycle.names(lifecycle.remains(cluster, name, short_jobs=False))
        raise ClusterError(
            f"{left} of a deleted job {name} would be in the way: {lifecycle.UNREACHABLE}"
        )
    return live


# -- what the server would refuse ----------------------------------------------------------------


def refuse(cluster: Cluster, job: Object) -> Object:
    """Ask the server, its webhooks included, before anything is created; the job as it would be."""
    try:
        return cluster.create(job, dry_run=True)
    except ClusterError as error:
        if error.status == 404 and "namespaces" in str(error):
            raise ClusterError(
                f"there is no namespace {cluster.namespace}: `kubectl create namespace "
                f"{cluster.namespace}` makes it, -n names another",
                404,
            ) from None
        if error.status != 409:  # another submit of this very moment: `check_same` judges
            raise
    return job


def check_needs(cluster: Cluster, job: Object, helpers: Sequence[Object], say: Say) -> None:
    """What the pods name and would wait for without a word; raises ConfigError."""
    claims.check(cluster, worker_pod_spec(job), replica_count(worker_spec(job)), say)
    references.check(cluster, worker_pod_spec(job), helpers, say)
    _check_network(cluster, job, helpers, say)


def _check_network(cluster: Cluster, job: Object, helpers: Sequence[Object], say: Say) -> None:
    """Pods that may not talk to each other would wait for their peers: a warning, with the fix."""
    try:
        found = cluster.find("NetworkPolicy")
    except ClusterError as error:
        if error.status != 403:
            raise
        return
    if replica_count(worker_spec(job)) > 1 and (closed := networks.closed(job, helpers, found)):
        say(f"warning: {closed[0]}, where the network enforces it; {closed[1]}")


def check_pod(cluster: Cluster, job: Object, say: Say) -> None:
    """A quota or a policy that refuses the pods now: a warning, as that may change."""
    meta, template = job["metadata"], worker_spec(job)["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": f"{meta['name']}-worker-0"},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }
    try:
        cluster.create(pod, dry_run=True)
    except ClusterError as error:
        if transient(error):
            say(f"warning: whether its pods would be refused now is not known: {error}")
        elif " cannot create resource " not in str(error):  # no right to create pods, no matter
            say(f"warning: its pods would be refused now: {error}")


def _create(cluster: Cluster, job: Object) -> tuple[Object, bool]:
    """The job, and whether it is this call that has created it."""
    try:
        return cluster.create(job), True
    except ClusterError as error:
        live = cluster.get(JOB, job["metadata"]["name"]) if error.status == 409 else None
        if live is None:
            raise
        return live, False  # by another submit, a moment ago


# -- what exists ---------------------------------------------------------------------------------


def check_same(cluster: Cluster, live: Object, objects: Sequence[Object]) -> None:
    """Refuse to take another job for this one, the last of the objects."""
    job = objects[-1]
    name = job["metadata"]["name"]
    hashes = [o["metadata"].get("annotations", {}).get(SPEC_HASH) for o in (live, job)]
    if not lifecycle.is_ours(live, name) or hashes[0] is None:
        raise ConfigError(
            f"a PyTorchJob {name} exists, and not from gptddp-k8s: use another --name"
        )
    if hashes[0] == hashes[1]:
        return
    found = code.differences(cluster, live, objects, compare(live, job))
    lines = [f"  {it}" for it in found[:_MOST_LINES]]
    lines += [f"  ... and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    at = cluster.flags
    scale = ""
    if count := scales_to(found):
        scale = f"`gptddp-k8s scale {name}{at} --replicas {count}` changes the number of pods; "
    head = (
        f"the job {name} exists, is {why.state(live)} and has another spec; {scale}"
        f"`gptddp-k8s delete {name}{at}` makes room, and a job of the same name continues its run;"
        " or use another --name:"
    )
    raise ConfigError("\n".join([head, *lines]))
