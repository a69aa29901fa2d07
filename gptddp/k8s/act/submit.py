"""Creates a job on a cluster: killed at any point, the same call completes what it began.

1. what the server would refuse (a dry run of the job), and the claims that must be there
2. the companions, and a Secret with a new key: created, or adopted where an earlier call has left
   them
3. the job, and its uid as the owner of the companions and the Secret
"""

import secrets
import time
from collections.abc import Sequence

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.act import claims, lifecycle
from gptddp.k8s.cluster import JOB, Cluster, resource
from gptddp.k8s.objects import Object, replica_count, worker_pod_spec, worker_spec
from gptddp.k8s.observe import why
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render import companions
from gptddp.k8s.render.difference import differences
from gptddp.k8s.render.manifest import SPEC_HASH

_DELETED_S = 30.0  # beyond the grace period, for what is left of a deleted job of the same name
_MOST_LINES = 12  # in a message


def submit(cluster: Cluster, objects: Sequence[Object], say: Say) -> tuple[Object, bool]:
    """The job of these objects as it is on the cluster, and whether this call created it.

    Raises ConfigError for another job of this name and for missing claims, ClusterError.
    """
    *helpers, job = objects
    name = job["metadata"]["name"]
    live = _settled(cluster, job, say)
    created = live is None
    if live is None:
        _dry_run(cluster, job)
        claims.check(cluster, worker_pod_spec(job), replica_count(worker_spec(job)), say)
        for helper in helpers:
            _ensure(cluster, helper, None)
        _ensure_key(cluster, job, None, say)
        _check_pod(cluster, job, say)
        try:
            live = cluster.create(job)
        except ClusterError as error:
            live = cluster.get(JOB, name) if error.status == 409 else None
            if live is None:
                raise
            created = False  # by another submit, a moment ago
    _check_same(cluster, live, job)
    if not lifecycle.finished(live):
        for helper in helpers:
            _ensure(cluster, helper, live)
        _ensure_key(cluster, job, live, say)
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


def _dry_run(cluster: Cluster, job: Object) -> None:
    """Ask the server, its webhooks included, before anything is created."""
    try:
        cluster.create(job, dry_run=True)
    except ClusterError as error:
        if error.status == 404 and "namespaces" in str(error):
            raise ClusterError(
                f"there is no namespace {cluster.namespace}: `kubectl create namespace "
                f"{cluster.namespace}` makes it, -n names another",
                404,
            ) from None
        if "failed calling webhook" in str(error):
            fix = "is the training operator running? `kubectl get pods -n kubeflow`"
            raise ClusterError(f"{error}; {fix}", error.status) from None
        if error.status != 409:  # another submit of this very moment: `_check_same` judges
            raise


def _check_pod(cluster: Cluster, job: Object, say: Say) -> None:
    """A quota or a policy that refuses the pods now: a warning, as that may change."""
    meta, template = job["metadata"], worker_spec(job)["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{meta['name']}-worker-0", "labels": template["metadata"]["labels"]},
        "spec": {**template["spec"], "restartPolicy": "Never"},
    }
    try:
        cluster.create(pod, dry_run=True)
    except ClusterError as error:
        if " cannot create resource " not in str(error):  # no right to create pods, no matter
            say(f"warning: its pods would be refused now: {error}")


# -- what exists ---------------------------------------------------------------------------------


def _check_same(cluster: Cluster, live: Object, job: Object) -> None:
    """Refuse to take another job for this one."""
    name = job["metadata"]["name"]
    hashes = [o["metadata"].get("annotations", {}).get(SPEC_HASH) for o in (live, job)]
    if not lifecycle.is_ours(live, name) or hashes[0] is None:
        raise ConfigError(
            f"a PyTorchJob {name} exists, and not from gptddp-k8s: use another --name"
        )
    if hashes[0] == hashes[1]:
        return
    found = differences(live, job)
    lines = [f"  {line}" for line in found[:_MOST_LINES]]
    lines += [f"  ... and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    at = cluster.flags
    size = found and all(line.partition(":")[0].lower().endswith("replicas") for line in found)
    scale = f"`gptddp-k8s scale {name}{at}` changes the number of pods; " if size else ""
    head = (
        f"the job {name} exists, is {why.state(live)} and has another spec; {scale}"
        f"`gptddp-k8s delete {name}{at}` makes room, and a job of the same name continues its run;"
        " or use another --name:"
    )
    raise ConfigError("\n".join([head, *lines]))


def _ensure_key(cluster: Cluster, job: Object, owner: Object | None, say: Say) -> None:
    """The Secret with the key of the rendezvous: made before the job, kept as it is, owned by it.

    One that the user has made is used as it is, and stays the user's. Where secrets are not this
    user's to make, the job runs without a key, as one does that exists already: with a new key,
    the next of its pods to start could not join the others.
    """
    name = job["metadata"]["name"]
    try:
        live = cluster.get("Secret", name)
        theirs = live is not None and not lifecycle.is_ours(live, name)
        if live and theirs:
            if companions.SECRET_FIELD not in (live.get("data") or {}):
                raise ConfigError(
                    f"the Secret {name} exists, and not from gptddp-k8s, without the field "
                    f"{companions.SECRET_FIELD}: add the field with a key, or use another --name"
                )
            return
        if live is None and owner is not None:
            say(
                f"warning: there is no Secret {name}, so the job's pods have no key for their "
                f"rendezvous: `gptddp-k8s delete {name}{cluster.flags}` and a new submit make one; "
                "see docs/security.md"
            )
            return
        data = {"stringData": {companions.SECRET_FIELD: secrets.token_hex()}}
        _ensure(cluster, companions.secret(job), owner, data)
    except ClusterError as error:
        if error.status != 403:
            raise
        say(f"warning: the pods have no key for their rendezvous: {error}; see docs/security.md")


def _ensure(
    cluster: Cluster, wanted: Object, owner: Object | None, at_creation: Object | None = None
) -> None:
    """Create a companion, or adopt the one that an earlier call has left, and set its owner."""
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    for _ in range(30):
        live = cluster.get(kind, name)
        if live is not None and not lifecycle.is_ours(live, name):
            raise ConfigError(
                f"the {resource(kind, name)} exists, and not from gptddp-k8s: use another --name"
            )
        body = _owned(wanted, live, owner)
        try:
            if live is None:
                cluster.create({**body, **(at_creation or {})})
                return
            if "deletionTimestamp" not in live["metadata"]:
                if not _contains(live, body):
                    cluster.patch(kind, name, body)
                return
        except ClusterError as error:
            if error.status not in (404, 409):  # deleted or created meanwhile: try again
                raise
        time.sleep(1)
    raise ClusterError(f"the {resource(kind, name)} is being deleted, and does not go")


def _owned(wanted: Object, live: Object | None, owner: Object | None) -> Object:
    """The companion with the job as an owner, which does not block the job's deletion.

    An owner of an earlier job goes: the garbage collector would follow it.
    """
    old = (live or wanted)["metadata"].get("ownerReferences") or []
    owners = [reference for reference in old if reference["kind"] != JOB]
    if owner is not None:
        owners.append(
            {
                "apiVersion": "kubeflow.org/v1",
                "kind": JOB,
                "name": owner["metadata"]["name"],
                "uid": owner["metadata"]["uid"],
                "controller": False,
                "blockOwnerDeletion": False,
            }
        )
    if not owners and not old:
        return wanted
    return {**wanted, "metadata": {**wanted["metadata"], "ownerReferences": owners}}


def _contains(live: object, wanted: object) -> bool:
    """Does the live value have all that is wanted, whatever the server has added."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        return all(key in live and _contains(live[key], item) for key, item in wanted.items())
    if isinstance(live, list) and isinstance(wanted, list) and len(live) == len(wanted):
        return all(map(_contains, live, wanted))
    return live == wanted
