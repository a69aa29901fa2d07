"""Checks what a cluster lacks for a job, with fixes. Only reads and dry runs: changes nothing.

The server reports most problems itself, in the dry runs of `submit`. Problems that only a
controller would find later are checked here: the operator, the nodes and the queue.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gptddp.errors import GptddpError
from gptddp.k8s.act import companion, queueing, submit
from gptddp.k8s.cluster import INSTALL_OPERATOR, Cluster, if_allowed
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object, condition, queue_name, worker_pod_spec
from gptddp.k8s.render import quantity

OK, WARN, FAIL = "ok", "warn", "fail"
_CHANGE = "change the option, or the quota or policy of the namespace, that the message names"
_OPERATOR = "control-plane=kubeflow-training-operator"


@dataclass(frozen=True)
class Check:
    """One result: the check, its status, and the fix; a `warn` may need none."""

    id: str
    status: str
    text: str
    fix: str = ""


def examine(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """All checks, in the order in which to fix problems; stops without a server or a namespace.

    objects: the objects that `submit` would create, the job last.
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
        fix = f"is it installed under another name? Else {INSTALL_OPERATOR}"
        yield Check("operator", WARN, f"no Deployment has the operator's label {_OPERATOR}", fix)
    for it in found:
        name, namespace = it["metadata"]["name"], it["metadata"]["namespace"]
        image = it["spec"]["template"]["spec"]["containers"][0].get("image", "")
        if (it.get("status") or {}).get("availableReplicas"):
            yield Check("operator", OK, f"{namespace}/{name} is ready ({image})")
        else:
            fix = f"`kubectl describe deployment {name}{cluster.flags} -n {namespace}` says why"
            yield Check("operator", FAIL, f"{namespace}/{name} has no ready pod", fix)


# -- the job, with the dry runs of `submit` ------------------------------------------------------


def _job(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    submit.refuse(cluster, objects[-1])
    yield Check("job", OK, "the server accepts the job (dry run)")


def _beside(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    for helper in objects[:-1]:
        companion.apply(cluster, helper, dry_run=True)
    yield Check("beside", OK, "the server accepts the job's other objects (dry run)")


def _pod(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    said: list[str] = []
    if not submit.check_pod(cluster, objects[-1], objects[:-1], said.append):
        yield Check("pod", OK, "not tried: you have no right to create pods, and need none")
    elif not said:
        yield Check("pod", OK, "the server accepts a pod of the job (dry run)")
    for text in said:
        yield Check("pod", FAIL, text.removeprefix("warning: "), _CHANGE)


def _needs(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """Check claims, Secrets etc. that the pods name, and policies that keep pods apart."""
    *helpers, job = objects
    found = submit.lacks(cluster, job, helpers)
    for lack in found:
        yield Check("needs", FAIL if lack.fatal else WARN, lack.text, lack.fix)
    if not found:
        yield Check("needs", OK, "the claims and all other objects that its pods name exist")


# -- nodes and queue -----------------------------------------------------------------------------


def _nodes(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """Do the size, labels and taints of a node let a pod run? Free room is not checked."""
    pod_spec = worker_pod_spec(objects[-1])
    nodes = cluster.ask("/api/v1/nodes").get("items") or []
    lacks = Counter(_why_not(pod_spec, node) for node in nodes)
    if free := lacks.pop("", 0):
        yield Check("nodes", OK, f"{free} of {len(nodes)} nodes can take a pod when they are empty")
        return
    lacking = ", ".join(f"{what} ({count})" for what, count in lacks.most_common(3))
    fix = "change --cpu, --memory, --gpus, --gpu-resource, --node-selector or --toleration; "
    fix += "no fix is needed if an autoscaler adds nodes"
    yield Check("nodes", FAIL, f"none of the {len(nodes)} nodes can take a pod: {lacking}", fix)


def _why_not(pod_spec: Object, node: Object) -> str:
    """The first reason why a pod cannot run on the node; "" if it can."""
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
        and toleration.get("tolerationSeconds") is None  # else tolerates for a limited time only
    )


def _queue(cluster: Cluster, objects: Sequence[Object]) -> Iterator[Check]:
    """Does the job's LocalQueue exist, and is it active?"""
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
            yield Check("queue", FAIL, text, "ask Kueue's administrator, or use another --queue")
        else:
            yield Check("queue", OK, f"the LocalQueue {name} admits jobs")


def summary(checks: Sequence[Check]) -> str:
    """`2 failed, 1 to look at`."""
    failed, warned = (sum(it.status == status for it in checks) for status in (FAIL, WARN))
    return f"{failed} failed, {warned} to look at" if failed or warned else "all is well"


_ADMINS = ("operator", "nodes")  # objects of the cluster, which few users may read
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
