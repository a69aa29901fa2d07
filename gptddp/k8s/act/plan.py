"""What a submit would do to the cluster, without doing it: by comparing, or by a dry run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gptddp.errors import ClusterError
from gptddp.k8s.act import code, companion, queueing, submit
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import (
    PRIORITY,
    QUEUE,
    Object,
    queue_name,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render.companions import secret
from gptddp.k8s.render.difference import NONE, Difference, compare, scales_to

CREATE, CHANGE = "create", "change"
_SUSPEND = "spec.runPolicy.suspend"  # a state, of which no option is
_LATER = (
    "code",
    "spec.pytorchReplicaSpecs.Worker.template.",
    "spec.elasticPolicy.",
    "spec.nprocPerNode",
)


@dataclass(frozen=True)
class Change:
    """An object that a submit would create, or one that is not as it would be."""

    kind: str
    name: str
    action: str
    fields: Sequence[Difference] = ()


def changes(cluster: Cluster, objects: Sequence[Object]) -> list[Change]:
    """What of these objects is missing, or differs; a job that is being deleted counts as missing.

    Raises ConfigError for objects of somebody else, ClusterError, also for what the server refuses.
    """
    found = [_change(cluster, objects, *pair) for pair in _pairs(cluster, objects)]
    if found[-1] is not None and found[-1].action == CREATE:
        submit.refuse(cluster, objects[-1])  # such as for want of its namespace
    return [change for change in found if change is not None]


def _pairs(
    cluster: Cluster, objects: Sequence[Object]
) -> Iterator[tuple[str, Object, Object | None]]:
    for wanted in objects:
        live = companion.live_one(cluster, wanted)
        gone = live is not None and "deletionTimestamp" in live["metadata"]
        yield wanted["kind"], wanted, None if gone else live


def _change(
    cluster: Cluster, objects: Sequence[Object], kind: str, wanted: Object, live: Object | None
) -> Change | None:
    name = wanted["metadata"]["name"]
    if live is None:
        return Change(kind, name, CREATE)
    if kind == JOB:
        found = edits(cluster, objects, live)
    elif companion.contains(live, companion.changeable(wanted)):
        found = []
    else:  # what others have added to a companion stays, but in a list: that is set as a whole
        found = compare(companion.changeable(live), companion.changeable(wanted))
        found = [it for it in found if it.new != NONE or "[" in it.path]
    return Change(kind, name, CHANGE, found) if found else None


def edits(cluster: Cluster, objects: Sequence[Object], live: Object) -> list[Difference]:
    """What of a live job is not as in the last of these objects, which a submit would create.

    What others have added is none: a suspension, labels of the job alone, what Kueue has set.
    """
    found = code.differences(cluster, live, objects, compare(live, objects[-1]))
    of_pods = (worker_spec(live)["template"].get("metadata") or {}).get("labels") or {}
    ours = {f"metadata.labels.{key}" for key in (*of_pods, QUEUE, PRIORITY)}
    return [
        it
        for it in found
        if it.path != _SUSPEND
        and (it.new != NONE or it.path in ours or not it.path.startswith("metadata.labels."))
        and (it.new != NONE or not queue_name(live) or not queueing.set_by_kueue(it.path))
    ]


def advice(cluster: Cluster, found: Sequence[Change]) -> list[str]:
    """What a submit would do about these changes, and when they would take effect."""
    job = next((it for it in found if it.kind == JOB and it.action == CHANGE), None)
    if job is None:
        return []
    name, at = job.name, cluster.flags
    if count := scales_to(job.fields):
        return [
            f"`gptddp-k8s scale {name}{at} --replicas {count}` changes the number of pods; submit"
            " leaves it as it is"
        ]
    told = [
        f"submit changes no job that exists: `gptddp-k8s delete {name}{at}` and the same submit go"
        " on from its newest checkpoint"
    ]
    if any(it.path.startswith(_LATER) for it in job.fields):
        told.append(
            "applied to the job as it is, a change of its template takes effect on pods that are"
            " created later: those that run stay as they are"
        )
    return told


# -- a dry run of the server ---------------------------------------------------------------------


def dry_run(cluster: Cluster, objects: Sequence[Object], say: Say) -> list[tuple[Object, str]]:
    """Every object as the server would have it, and what it would do: created, configured,
    unchanged. Nothing is changed.

    Raises ConfigError for another job of the name, objects of somebody else and missing claims,
    ClusterError for what the server refuses.
    """
    *helpers, job = objects
    live = cluster.get(JOB, job["metadata"]["name"])
    if live is not None and "deletionTimestamp" not in live["metadata"]:
        submit.check_same(cluster, live, objects)
        made = (live, "unchanged")
    else:
        made = (submit.refuse(cluster, job), "created")
        queueing.check(cluster, job, made[0], say)
        submit.check_needs(cluster, job, helpers, say)
        submit.check_pod(cluster, with_an_account(cluster, job), say)
    answers = [_try(cluster, kind, wanted, it) for kind, wanted, it in _pairs(cluster, helpers)]
    return [*answers, *_try_secret(cluster, job, say), made]


def _try(cluster: Cluster, kind: str, wanted: Object, live: Object | None) -> tuple[Object, str]:
    if live is None:
        return cluster.create(wanted, dry_run=True), "created"
    change = companion.changeable(wanted)
    if companion.contains(live, change):
        return live, "unchanged"
    return cluster.patch(kind, wanted["metadata"]["name"], change, dry_run=True), "configured"


def _try_secret(cluster: Cluster, job: Object, say: Say) -> Iterator[tuple[Object, str]]:
    """The Secret with the key, of which none is made here; a job can do without."""
    wanted = secret(job)
    try:
        live = cluster.get("Secret", wanted["metadata"]["name"])
        if live is None:
            cluster.create(wanted, dry_run=True)
        yield wanted, "unchanged" if live else "created"
    except ClusterError as error:
        if error.status != 403:
            raise
        say(f"warning: the job would run without a key of its rendezvous: {error}")


def with_an_account(cluster: Cluster, job: Object) -> Object:
    """The job; with the namespace's own account while the one of the job is not there."""
    account = worker_pod_spec(job).get("serviceAccountName", "default")
    try:
        missing = cluster.get("ServiceAccount", account) is None
    except ClusterError:
        missing = False
    if account != job["metadata"]["name"] or not missing:
        return job
    role = worker_spec(job)
    spec = {**role["template"]["spec"], "serviceAccountName": "default"}
    role = {**role, "template": {**role["template"], "spec": spec}}
    return {**job, "spec": {**job["spec"], "pytorchReplicaSpecs": {"Worker": role}}}
