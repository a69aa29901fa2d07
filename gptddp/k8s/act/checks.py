"""What a cluster lacks for a job, each thing with its fix. Nothing is changed: reads and dry runs.

Most of it the server says itself, asked as `submit` asks it. What only a controller would find out
later is looked at here: the operator, the nodes and the queue.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gptddp.errors import GptddpError
from gptddp.k8s.act import companion, needs, networks, queueing, submit
from gptddp.k8s.cluster import INSTALL_OPERATOR, Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import (
    Object,
    condition,
    queue_name,
    replica_count,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.render import quantity

OK, WARN, FAIL = "ok", "warn", "fail"
_CHANGE = "change the option, or the quota or policy of the namespace, that the message names"
_OPERATOR = "control-plane=kubeflow-training-operator"


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, and what helps; `warn` may be right as it is."""

    id: str
    status: str
    text: str
    fix: str = ""


def examine(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """All checks, in the order in which to mend what they find, up to the server and the namespace.

    objects: as `submit` would create them, the job last.
    """
    for id, look in _LOOKS:
        try:
            yield from look(cluster, objects)
        except GptddpError as error:
            what, _, fix = str(error).partition("; ")
            unseen = id in _ADMINS and isinstance(error, ClusterError) and error.status == 403
            yield Check(id, WARN if unseen else FAIL, what, fix or _CHANGE)
            if id == "api" or what.startswith("there is no namespace"):
                return


# -- the server and the operator -----------------------------------------------------------------


def _api(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    version = cluster.ask("/version").get("gitVersion", "of unknown version")
    yield Check("api", OK, f"Kubernetes {version}, namespace {cluster.namespace}")


def _operator(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    answer = cluster.ask("/apis/apps/v1/deployments", {"labelSelector": _OPERATOR})
    found = answer.get("items") or []
    if not found:
        fix = f"is it there under another name? Else {INSTALL_OPERATOR}"
        yield Check("operator", WARN, f"no Deployment has the operator's label {_OPERATOR}", fix)
    for it in found:
        name, namespace = it["metadata"]["name"], it["metadata"]["namespace"]
        image = it["spec"]["template"]["spec"]["containers"][0].get("image", "")
        if (it.get("status") or {}).get("availableReplicas"):
            yield Check("operator", OK, f"{namespace}/{name} is ready ({image})")
        else:
            fix = f"`kubectl describe deployment {name}{cluster.flags} -n {namespace}` says why"
            yield Check("operator", FAIL, f"{namespace}/{name} has no pod that is ready", fix)


# -- the job, asked as `submit` asks -------------------------------------------------------------


def _job(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    submit.refuse(cluster, objects[-1])
    yield Check("job", OK, "the server takes the job (dry run)")


def _beside(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    for helper in objects[:-1]:
        companion.apply(cluster, helper, dry_run=True)
    yield Check("beside", OK, "the server takes what goes with it (dry run)")


def _pod(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    said: list[str] = []
    if not submit.check_pod(cluster, objects[-1], objects[:-1], said.append):
        yield Check("pod", OK, "not tried: you have no right to create pods, and need none")
    elif not said:
        yield Check("pod", OK, "the server takes a pod of it (dry run)")
    for text in said:
        yield Check("pod", FAIL, text.removeprefix("warning: "), _CHANGE)


def _needs(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """Claims, Secrets and so on that the pods name, and policies that keep pods apart."""
    *helpers, job = objects
    pod_spec, count = worker_pod_spec(job), replica_count(worker_spec(job))
    policies = if_allowed(partial(cluster.find, "NetworkPolicy"), [])
    found = [
        *needs.claims(cluster, pod_spec, count),
        *needs.references(cluster, pod_spec, helpers),
        *filter(None, [networks.closed(job, helpers, policies)]),
    ]
    for lack in found:
        yield Check("needs", FAIL if lack.fatal else WARN, lack.text, lack.fix)
    if not found:
        yield Check("needs", OK, "the claims and all else that its pods name are there")


# -- nodes and queue -----------------------------------------------------------------------------


def _nodes(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """Is there a node whose size, labels and taints let a pod run? How full it is may change."""
    pod_spec = worker_pod_spec(objects[-1])
    nodes = cluster.ask("/api/v1/nodes").get("items") or []
    lacks = Counter(_why_not(pod_spec, node) for node in nodes)
    if free := lacks.pop("", 0):
        yield Check("nodes", OK, f"{free} of {len(nodes)} nodes can take a pod when they are empty")
        return
    lacking = ", ".join(f"{what} ({count})" for what, count in lacks.most_common(3))
    fix = "change --cpu, --memory, --gpus, --gpu-resource, --node-selector or --toleration; right "
    fix += "as it is where an autoscaler adds nodes"
    yield Check("nodes", FAIL, f"none of the {len(nodes)} nodes can take a pod: {lacking}", fix)


def _why_not(pod_spec: Object, node: Object) -> str:
    """The first thing that keeps a pod off the node; empty where it can run there."""
    labels = node["metadata"].get("labels") or {}
    for key, value in (pod_spec.get("nodeSelector") or {}).items():
        if labels.get(key) != value:
            return f"no label {key}={value}"
    has = (node.get("status") or {}).get("allocatable") or {}
    requests = (pod_spec["containers"][0].get("resources") or {}).get("requests") or {}
    for name, wanted in sorted(requests.items(), key=lambda it: "/" not in it[0]):
        if quantity.number(has.get(name)) < quantity.number(wanted):
            return f"{name} {has.get(name, 0)} of {wanted}"
    for taint in node["spec"].get("taints") or []:
        tolerations = pod_spec.get("tolerations") or []
        hard = taint.get("effect") in ("NoSchedule", "NoExecute")
        if hard and not any(_tolerates(it, taint) for it in tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"taint {taint['key']}{value}:{taint['effect']}"
    return ""


def _tolerates(toleration: Object, taint: Object) -> bool:
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return (
        toleration.get("key") in (None, "", taint["key"])
        and toleration.get("effect") in (None, "", taint["effect"])
        and (toleration.get("operator") == "Exists" or same_value)
        and toleration.get("tolerationSeconds") is None  # else for a while only
    )


def _queue(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """Is the job's LocalQueue there, and does it say that it admits jobs?"""
    queueing.check(cluster, objects[-1])
    name = queue_name(objects[-1])
    try:
        found = if_allowed(partial(cluster.find, "LocalQueue"), [])
    except ClusterError as error:
        if error.status != 404:  # no Kueue
            raise
        return
    if found and not name:
        names = ", ".join(it["metadata"]["name"] for it in found)
        text = f"the namespace has queues ({names}), and the job is in none"
        yield Check("queue", WARN, text, "add --queue, unless jobs may run outside of queues")
    for it in found:
        if it["metadata"]["name"] != name:
            continue
        active = condition(it, "Active") or {}
        if active.get("status") == "False":
            text = f"LocalQueue {name}: {active.get('reason')}: {active.get('message')}"
            yield Check("queue", FAIL, text, "ask who administers Kueue, or use another --queue")
        else:
            yield Check("queue", OK, f"the LocalQueue {name} admits jobs")


def summary(checks: Sequence[Check]) -> str:
    """`2 failed, 1 to look at`."""
    failed, warned = (sum(it.status == status for it in checks) for status in (FAIL, WARN))
    return f"{failed} failed, {warned} to look at" if failed or warned else "all is well"


_ADMINS = ("operator", "nodes")  # what belongs to the cluster: few may see it
_LOOKS: tuple[tuple[str, Callable[[Cluster, Sequence[Object]], Iterable[Check]]], ...] = (
    ("api", _api),
    ("operator", _operator),
    ("job", _job),
    ("beside", _beside),
    ("pod", _pod),
    ("needs", _needs),
    ("nodes", _nodes),
    ("queue", _queue),
)
