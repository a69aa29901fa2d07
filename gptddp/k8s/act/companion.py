"""One object beside a job: created, or adopted where an earlier call has left it, and owned."""

import time
from collections.abc import Sequence

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.act import code, lifecycle
from gptddp.k8s.act.failure import REFUSED
from gptddp.k8s.cluster import JOB, Cluster, resource
from gptddp.k8s.objects import Object
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render import companions

_TRIES = 30  # a second apart: one that is being deleted has to go first


def check(cluster: Cluster, wanted: Object) -> None:
    """Ask whether a companion may be created, or adopted, before anything is created.

    Raises ConfigError for one of somebody else, ClusterError.
    """
    try:
        if live_one(cluster, wanted) is None:
            cluster.create(wanted, dry_run=True)
    except ClusterError as error:
        if error.status in REFUSED and wanted["kind"] in companions.KINDS:
            without = f"or leave it out: --without {wanted['kind'].lower()}"
            raise ClusterError(f"{error}; {without}", error.status) from None
        if error.status != 409:  # created meanwhile
            raise


def own(cluster: Cluster, wanted: Object, owner: Object, say: Say) -> None:
    """Make the job the owner of a companion, which then goes with it; created if it is not there.

    Who may not change it is told what that means: the job runs all the same. Raises ConfigError for
    one of somebody else, ClusterError.
    """
    try:
        ensure(cluster, wanted, owner)
    except ClusterError as error:
        live = live_one(cluster, wanted) if error.status in REFUSED else None
        if live is None or not contains(live, changeable(wanted)):
            raise
        by_hand = lifecycle.by_hand(cluster, [(wanted["kind"], wanted)])
        what = resource(wanted["kind"], wanted["metadata"]["name"])
        say(
            f"warning: the {what} does not go with the job: {error}. `gptddp-k8s delete` deletes it"
            f" too; after any other, {by_hand}"
        )


def ensure(
    cluster: Cluster, wanted: Object, owner: Object | None, at_creation: Object | None = None
) -> None:
    """Create a companion, or adopt the one that an earlier call has left, and set its owner.

    Raises ConfigError for one of somebody else, which stays as it is; ClusterError.
    """
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    for _ in range(_TRIES):
        live = live_one(cluster, wanted)
        body = _owned(wanted if live is None else changeable(wanted), live, owner)
        try:
            if live is None:
                cluster.create({**body, **(at_creation or {})})
                return
            if "deletionTimestamp" not in live["metadata"]:
                if not contains(live, body):
                    cluster.patch(kind, name, body)
                return
        except ClusterError as error:
            if error.status not in (404, 409):  # deleted or created meanwhile: try again
                raise
        time.sleep(1)
    raise ClusterError(f"the {resource(kind, name)} is being deleted, and does not go")


def live_one(cluster: Cluster, wanted: Object) -> Object | None:
    """The companion as it is; raises ConfigError for one of somebody else."""
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    job = wanted["metadata"]["labels"]["app.kubernetes.io/instance"]
    live = cluster.get(kind, name)
    if live is not None and not lifecycle.is_ours(live, job):
        raise ConfigError(
            f"the {resource(kind, name)} exists, and not from gptddp-k8s: use another --name"
        )
    if live is not None and wanted.get("immutable"):
        code.check(cluster, live, wanted)
    return live


def changeable(wanted: Object) -> Object:
    """It without its content, if that is immutable."""
    content = ("immutable", "binaryData") if wanted.get("immutable") else ()
    return {key: value for key, value in wanted.items() if key not in content}


def say_left(cluster: Cluster, wanted: Sequence[Object], name: str, say: Say) -> None:
    """Name what an earlier submit has made beside a job that exists, and this one leaves out.

    Who may not see it has left it out for that.
    """
    there = {it["kind"] for it in wanted}
    for kind in (kind for kind in companions.KINDS if kind not in there):
        try:
            live = cluster.get(kind, name)
        except ClusterError as error:
            if error.status != 403:
                raise
            continue
        if live is not None and lifecycle.is_ours(live, name):
            what = resource(kind, name)
            say(
                f"warning: the {what} of an earlier submit is there, and in force: "
                f"`kubectl delete {what} -n {cluster.namespace}` removes it"
            )


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


def contains(live: object, wanted: object) -> bool:
    """Does the live value have all that is wanted, whatever the server has added."""
    if isinstance(live, dict) and isinstance(wanted, dict):
        return all(key in live and contains(live[key], item) for key, item in wanted.items())
    if isinstance(live, list) and isinstance(wanted, list) and len(live) == len(wanted):
        return all(map(contains, live, wanted))
    return live == wanted
