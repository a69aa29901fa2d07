"""Creates a job on a cluster. If the call is killed at any point, the same call completes it.

1. check what would keep the job or its pods from running: dry runs of all objects and of a pod, and
   reads in the namespace
2. create the companions, and a Secret with a new key
3. create the job, and make it the owner of the companions and the Secret
"""

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from gptddp.config import FIELDS, FIXED
from gptddp.errors import ConfigError, GptddpError
from gptddp.flags import flag
from gptddp.k8s.act import companion, lifecycle, needs, networks, own_code, queueing, rendezvous_key
from gptddp.k8s.act.failure import AGAIN, says
from gptddp.k8s.cluster import JOB, Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError, NotFoundError
from gptddp.k8s.objects import (
    SUBMIT_LINE,
    Object,
    is_ours,
    queue_name,
    replica_count,
    suspended,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.observe import why
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render.difference import NONE, Difference, compare, scales_to
from gptddp.k8s.render.manifest import SPEC_HASH

_DELETED_S = 30.0  # beyond the grace period, for the remains of a deleted job of the same name
_MOST_LINES = 12  # in a message
_FIXED = {flag(name) for name, field in FIELDS.items() if field.metadata["fate"] == FIXED}


def submit(
    cluster: Cluster, objects: Sequence[Object], say: Say, *, line: str, replace: bool
) -> tuple[Object, bool]:
    """The job of these objects as it is on the cluster, and whether this call created it.

    line: the command, stored with the job; replace: replace a job that has ended. Raises
    ConfigError for another job of this name and for missing claims, ClusterError.
    """
    *helpers, job = objects
    name = job["metadata"]["name"]
    with says("nothing was created", errors=GptddpError):
        live = _settled(cluster, job, say)
        ended = live is not None and replace and lifecycle.finished(live)
        if live is None or ended:
            review(cluster, objects, live, say)
    if live is not None and ended:
        say(f"the job {name} is {why.state(live)}: it is replaced")
        with contextlib.suppress(NotFoundError):  # another submit has replaced it
            for _ in lifecycle.delete(cluster, name, live, say):
                pass
        with says(f"the old job was deleted, and the new job was not created; {AGAIN}"):
            live = _settled(cluster, job, say)
    created = False
    if live is None:
        live, created = _create(cluster, objects, line)
    check_same(cluster, live, objects)
    if not lifecycle.finished(live):
        now = "was created" if created else "exists"
        with says(f"the job {now}; it does not own all its other objects yet; {AGAIN}"):
            for helper in helpers:
                companion.apply(cluster, helper, live)
            rendezvous_key.own(cluster, live, say)
    return live, created


def _settled(cluster: Cluster, job: Object, say: Say) -> Object | None:
    """The existing job, if any, after waiting for the end of its deletion."""
    name, limit_s = job["metadata"]["name"], lifecycle.grace_s(job) + _DELETED_S
    end = time.monotonic() + limit_s
    while (live := cluster.get(JOB, name)) and "deletionTimestamp" in live["metadata"]:
        if time.monotonic() > end:
            held = ", ".join(live["metadata"].get("finalizers") or ["an unknown reason"])
            raise ClusterError(f"the job {name} is still being deleted; it waits for {held}")
        time.sleep(1)
    if live is None and (leftover := lifecycle.wait_gone(cluster, name, say, limit_s)):
        raise ClusterError(
            f"{leftover} of a deleted job {name} would conflict: {lifecycle.UNREACHABLE}"
        )
    return live


def _create(cluster: Cluster, objects: Sequence[Object], line: str) -> tuple[Object, bool]:
    """Create the companions, then the job; returns it, and whether this call created it."""
    *helpers, job = objects
    meta = job["metadata"]
    undo = f"`gptddp-k8s delete {meta['name']}{cluster.flags}` removes what exists"
    beside = f"the job was not created, only objects beside it; {AGAIN}, or {undo}"
    with says(beside, errors=GptddpError):
        for helper in helpers:
            companion.apply(cluster, helper)
        rendezvous_key.make(cluster, job)
    notes = {**meta["annotations"], SUBMIT_LINE: line}
    with says(beside, f"it is not known whether the job was created; {AGAIN}, or {undo}"):
        try:
            return cluster.create({**job, "metadata": {**meta, "annotations": notes}}), True
        except ClusterError as error:
            live = cluster.get(JOB, meta["name"]) if error.status == 409 else None
            if live is None:
                raise
            return live, False  # another submit has just created it


# -- before anything is created ------------------------------------------------------------------


class Change(NamedTuple):
    """The effect of a submit on an object: it is created, or these fields change."""

    kind: str
    name: str
    exists: bool
    fields: Sequence[Difference] = ()


def review(
    cluster: Cluster, objects: Sequence[Object], live: Object | None, say: Say
) -> list[Change]:
    """The changes that these objects would make on the cluster, by dry runs; `live`: the job there.

    For a job that would be created, checks everything that would keep it or its pods from running.
    Raises ConfigError, ClusterError.
    """
    *helpers, job = objects
    name, changes = job["metadata"]["name"], []
    if live is None or lifecycle.finished(live):
        refuse(cluster, job)
        queueing.check(cluster, job)
        check_pod(cluster, job, helpers, say)
        needs.check(lacks(cluster, job, helpers), say)
        if rendezvous_key.check(cluster, job):
            changes.append(Change("Secret", name, False))
    for helper in helpers:
        before, after = companion.apply(cluster, helper, dry_run=True)
        fields = compare(before, after) if before else ()
        changes.append(Change(helper["kind"], helper["metadata"]["name"], bool(before), fields))
    fields = differences(cluster, live, objects) if live else ()
    return [*changes, Change(JOB, name, live is not None, fields)]


def lacks(cluster: Cluster, job: Object, helpers: Sequence[Object]) -> list[needs.Lack]:
    """Claims, Secrets etc. that the pods would silently wait for, and a policy between the pods."""
    found = needs.lacks(cluster, worker_pod_spec(job), replica_count(worker_spec(job)), helpers)
    policies = if_allowed(lambda: cluster.find("NetworkPolicy"), [])
    closed = networks.closed(job, helpers, policies)
    return [*found, closed] if closed else found


def refuse(cluster: Cluster, job: Object) -> None:
    """Let the server and its webhooks check the job. Raises ClusterError in their words.

    Raises ConfigError for a job of a queue if Kueue does not suspend it: Kueue's default
    configuration does not include PyTorchJobs.
    """
    answer = None
    try:
        answer = cluster.create(job, dry_run=True)
    except ClusterError as error:
        if error.status == 404 and "namespaces" in str(error):
            command = f"kubectl create namespace {cluster.namespace}{cluster.kubectl}"
            make = f"`{command}` creates it, -n names another"
            raise ClusterError(f"there is no namespace {cluster.namespace}; {make}", 404) from None
        if error.status != 409:  # 409: it exists; the server checks this last
            raise
    if answer and queue_name(job) and not suspended(answer):
        raise ConfigError(
            f"--queue {queue_name(job)}: Kueue does not hold PyTorchJobs here: the job would start"
            " at once, outside of the queue; leave out --queue, or have an administrator add"
            " kubeflow.org/pytorchjob to integrations.frameworks of Kueue's configuration"
        )


def check_pod(cluster: Cluster, job: Object, helpers: Sequence[Object], say: Say) -> bool:
    """Let the server check a pod of the job by a dry run; it does not check pods with the job.

    Warns of a quota or a policy that refuses it, as these may change. False without the right to
    create pods, which only the operator needs. Raises ClusterError for a pod that is invalid in
    this version of Kubernetes.
    """
    template = worker_spec(job)["template"]
    spec = {**template["spec"], "restartPolicy": "Never"}
    if any(it["kind"] == "ServiceAccount" for it in helpers):
        spec.pop("serviceAccountName", None)  # it does not exist yet
    meta = {**template["metadata"], "name": f"{job['metadata']['name']}-worker-0"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    try:
        cluster.create(pod, dry_run=True)
    except ClusterError as error:
        if error.status not in (403, 409):
            raise ClusterError(f"its pods would be refused: {error}", error.status) from None
        if error.status == 403 and " cannot create resource " in str(error):
            return False
        if error.status == 403:
            say(f"warning: its pods would be refused now: {error}")
    return True


# -- what exists ---------------------------------------------------------------------------------


def differences(cluster: Cluster, live: Object, objects: Sequence[Object]) -> list[Difference]:
    """The differences between a live job and the last of these objects.

    For a job with the same options, fields that others have added do not count: Kueue adds some.
    """
    found = own_code.differences(cluster, live, objects, compare(live, objects[-1]))
    return [it for it in found if it.new != NONE] if is_same(live, objects[-1]) else found


def is_same(live: Object, job: Object) -> bool:
    """Was it submitted with the same options? Raises ConfigError for a job that is not ours."""
    name = job["metadata"]["name"]
    hashes = [it["metadata"].get("annotations", {}).get(SPEC_HASH) for it in (live, job)]
    if not is_ours(live, name) or hashes[0] is None:
        raise ConfigError(
            f"the PyTorchJob {name} exists, not created by gptddp-k8s: use another --name"
        )
    return bool(hashes[0] == hashes[1])


def check_same(cluster: Cluster, live: Object, objects: Sequence[Object]) -> None:
    """Raise ConfigError if the live job is not the last of these objects."""
    if is_same(live, objects[-1]):
        return
    found = differences(cluster, live, objects)
    raise ConfigError("\n".join([f"{another(cluster, live, found)}:", *lines(found)]))


def lines(found: Sequence[Difference]) -> list[str]:
    """The first fields that differ, one line each."""
    more = [f"  ... and {len(found) - _MOST_LINES} more"] if len(found) > _MOST_LINES else []
    return [*(f"  {it}" for it in found[:_MOST_LINES]), *more]


def another(cluster: Cluster, live: Object, found: Sequence[Difference]) -> str:
    """The message that a job of the name exists with another spec, and the ways out."""
    name, at, state = live["metadata"]["name"], cluster.flags, why.state(live)
    given = [it.path.rpartition(".args[")[2].rstrip("]") for it in found if it.new != NONE]
    fixed = [f"another {it}" for it in given if it in _FIXED]
    refuses = f", which refuses {' and '.join(fixed)} than it was started with" if fixed else ""
    same = "a job of the same name continues its run"
    ways = [
        f"`gptddp-k8s delete {name}{at}` makes room, and {same}{refuses}",
        "another --name starts a new run",
    ]
    if state in why.FINAL:
        ways[0] = f"the same command with --replace deletes it, and continues its run{refuses}"
    elif (count := scales_to(found)) and not (queue_name(live) and not suspended(live)):
        ways.insert(
            0, f"`gptddp-k8s scale {name}{at} --replicas {count}` changes the number of pods"
        )
    return f"the job {name} exists, is {state} and has another spec; {'; '.join(ways)}"
