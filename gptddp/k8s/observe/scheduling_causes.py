"""Pods that have no node: what the scheduler says, and which field of the pod it is about."""

import re
from collections.abc import Iterator

from gptddp.k8s.objects import Object, age_s, condition, event_time, has_ended, volume_claims
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.facts import Facts

NO_SCHEDULER_S = 20.0  # a scheduler that runs says something of a pod within a second
_PREEMPTED_S = 300.0  # how long a preemption is why a pod waits
_TAIL = re.compile(r"[.,]?( no new claims to deallocate[.,]?)?( preemption:.*)?$", re.S)
# What the scheduler says of nodes: the cause, and the pod's field that it is about. In the order of
# its filters: a node that fails a later one has passed those before it, so it was the nearest.
_SAID = (
    (r"untolerated taint", "taints", "spec.tolerations"),
    (r"untolerated taint \{node\.kubernetes\.io/(not-ready|unreach)", "nodes-not-ready", ""),
    (r"were unschedulable", "cordoned", ""),
    (r"node affinity/selector|requested node name", "node-selector", "spec.nodeSelector"),
    (r"free ports", "host-port", "spec.containers[].ports[].hostPort"),
    (r"Too many pods", "too-many-pods", ""),
    (r"Insufficient (?P<resource>\S+)", "no-room", ""),
    (r"ReadWriteOncePod", "volume-in-use", "spec.volumes"),
    (r"volume node affinity|volume zone|exceed max volume", "claim-elsewhere", "spec.volumes"),
    (r"topology spread", "pod-affinity", "spec.topologySpreadConstraints"),
    (r"(anti-)?affinity rules", "pod-affinity", "spec.affinity"),
)
_REASON = re.compile(r"(?:^|: |, )(\d+ .+?)(?=, \d+ |$)", re.S)  # of so many nodes
_TAINT = re.compile(r"untolerated taint \{([^:}]+)")  # Kubernetes 1.34 names it no more


def unschedulable(facts: Facts) -> Iterator[Cause]:
    """No node takes the pod, or a claim of it is not there."""
    for pod in facts.pods:
        scheduled = condition(pod, "PodScheduled") or {}
        if has_ended(pod) or "deletionTimestamp" in pod["metadata"]:
            continue
        if not scheduled and not pod.get("spec", {}).get("nodeName"):
            yield from _unseen(facts, pod)
        elif scheduled.get("status") == "False":
            message = str(scheduled.get("message", ""))
            short = _TAIL.sub("", message)
            if scheduled.get("reason") == "SchedulingGated":
                text = "a scheduling gate holds it back, as a queue's (spec.schedulingGates)"
                yield cause(facts, "gated", text, pod=pod)
            else:
                if node := (pod.get("status") or {}).get("nominatedNodeName"):
                    text = f"it waits on node {node} for pods of a lower priority, which have to go"
                    yield cause(facts, "preempting", text, pod=pod)
                    continue
                found = _by_claims(facts, pod, short) or _by_nodes(facts, pod, short)
                yield _preempted(facts, pod, found) or found


def _unseen(facts: Facts, pod: Object) -> Iterator[Cause]:
    if age_s(pod, facts.now) > NO_SCHEDULER_S and not facts.local:
        name = pod.get("spec", {}).get("schedulerName", "default-scheduler")
        text = f"no scheduler looks at it: its spec.schedulerName is {name}; does that one run?"
        yield cause(facts, "no-scheduler", text, pod=pod)


def _by_claims(facts: Facts, pod: Object, message: str) -> Cause | None:
    """Claims that are missing, without a volume, or going."""
    names = [claim for _, claim in volume_claims(pod.get("spec") or {})]
    names = [name for name in names if name in facts.unbound] or names
    if found := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
        text = f"there is no PersistentVolumeClaim {found[1]}: create it, or name another"
        return cause(facts, "claim-missing", text, pod=pod)
    if found := re.search(
        r'persistentvolumeclaim "([^"]+)" (is being deleted|bound to .*)', message
    ):
        text = f"its PersistentVolumeClaim {found[1]} {found[2]}: make it anew, or name another"
        return cause(facts, "claim-lost", text, pod=pod)
    unbound = "unbound immediate PersistentVolumeClaims" in message
    if names and (unbound or "available persistent volumes to bind" in message):
        text = f"a PersistentVolumeClaim of it has no volume ({', '.join(names)})"
        return cause(facts, "claim-unbound", text, pod=pod, named={"claim": names[0]})
    if unbound:  # an ephemeral volume's
        text = "a PersistentVolumeClaim of it has no volume"
        return cause(facts, "claim-unbound", text, pod=pod, named={"claim": ""})
    return None


def _by_nodes(facts: Facts, pod: Object, message: str) -> Cause:
    """What the nodes lack that were nearest to taking the pod; the fields of all that they lack."""
    text = f"no node takes it: {message or 'no reason given'}"
    found = [(id, field, it) for p, id, field in _SAID if (it := re.search(p, message))]
    unknown = [it for it in _REASON.findall(message) if not any(re.search(p[0], it) for p in _SAID)]
    if not found or unknown:  # the filters of plug-ins come last
        named = "".join(f"; {field}" for id, field, _ in found if field and id != "taints")
        return cause(facts, "unschedulable", text + named, pod=pod)
    id, asked = (
        found[-1][0],
        str([c.get("resources") for c in pod.get("spec", {}).get("containers", [])]),
    )
    pools = [key for key in _TAINT.findall(message) if "node-role.kubernetes.io" not in key]
    if id == "node-selector" and pools or any(key in asked for key in pools):
        id = "taints"  # of the nodes that the pod asks for; the others are not of that pool
    fields = [
        _stated(pod, field, (it.groupdict().get("resource") or "").rstrip(".,"))
        for kind, field, it in found
        if kind != "taints" or id in ("taints", "node-selector")
    ]
    claim = next((claim for _, claim in volume_claims(pod.get("spec", {}))), "")
    return cause(facts, id, text + "".join(fields), pod=pod, named={"claim": claim})


def _stated(pod: Object, field: str, resource: str) -> str:
    """What the pod's own field says, for the end of a sentence."""
    if resource:
        asked = [
            (c["name"], ((c.get("resources") or {}).get("requests") or {}).get(resource))
            for c in pod.get("spec", {}).get("containers", [])
        ]
        words = [f"{name} requests {much}" for name, much in asked if much]
        return f"; resources.requests[{resource}]: {', '.join(words)}" if words else ""
    if field == "spec.nodeSelector":
        labels = pod.get("spec", {}).get("nodeSelector") or {}
        words = [f"{key}={value}" for key, value in labels.items()]
        return f"; {field}: {', '.join(words)}" if words else "; spec.affinity.nodeAffinity"
    if field == "spec.tolerations":
        keys = [t.get("key") or "everything" for t in pod.get("spec", {}).get("tolerations") or []]
        own = [key for key in keys if not key.startswith("node.kubernetes.io/")]
        return f"; {field}: {', '.join(own) or 'none'}"
    return f"; {field}" if field else ""


def _preempted(facts: Facts, pod: Object, found: Cause) -> Cause | None:
    """A pod that has to wait because one of a higher priority has taken its predecessor's place."""
    if found.id != "no-room":
        return None
    for event in facts.ever_about(pod["metadata"]["name"], "Preempted")[-1:]:
        if facts.now - event_time(event) < _PREEMPTED_S:
            text = f"{preemption(event)}, and since then {found.text}"
            return cause(facts, "preempted", text, pod=pod)
    return None


def preemption(event: Object) -> str:
    """`it was preempted by pod x on node y`: a pod of a higher spec.priorityClassName took it."""
    said = str(event.get("message", "")).rstrip(".")
    said = said[:1].lower() + said[1:]
    return f"it was {said}, of a higher priority (spec.priorityClassName)"
