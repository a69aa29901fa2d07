"""What keeps a pod from running: no node, its claims, its image, its configuration, a crash.

A cause with a known fix has its own id. Any other cause is reported in Kubernetes' words: reason
and message of a container, a condition or an event.
"""

from collections.abc import Iterator

from gptddp.k8s import exit_codes
from gptddp.k8s.objects import (
    Object,
    condition,
    container_statuses,
    event_time,
    has_ended,
    is_ready,
    seconds,
    volume_claims,
)
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.endings import end_in_words, ends
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER

GONE_S = 5.0  # after the grace period, for the kubelet to report that a pod has ended
BEGINNING = ("ContainerCreating", "PodInitializing")  # waiting reasons that are no problem
_DENIED = ("denied", "nauthorized", "orbidden", "authentication", "credentials")  # by a registry
_NO_NEWS = ("ContainersNotReady", "PodCompleted", "PodFailed")  # not-Ready reasons without news


def pods(facts: Facts) -> Iterator[Cause]:
    """The first cause found for each pod that does not run."""
    for pod in facts.pods:
        found = filter(None, (check(facts, pod) for check in _CHECKS))
        if first := next(found, None):
            yield first


def lost(facts: Facts) -> Iterator[Cause]:
    """Pods that do not end, though the job is to have no pods."""
    return filter(None, (_lost(facts, pod) for pod in facts.pods))


def _words(facts: Facts, pod: Object, said: Object, before: str = "", id: str = "pod") -> Cause:
    """A cause in Kubernetes' words: the reason and the message, unchanged."""
    words = [str(said[key]) for key in ("reason", "message") if said.get(key)]
    text = before + ": ".join(words).rstrip(". ")
    # Objects that `submit` created, such as the code's, have names that begin with the job's name.
    again = "; the same submit creates it again" if f'"{facts.name}-' in text else ""
    return cause(facts, id, text + again, pod=pod)


# -- nodes ---------------------------------------------------------------------------------------


def _lost(facts: Facts, pod: Object) -> Cause | None:
    """A pod that should have been gone by now, or whose node has stopped reporting."""
    meta, node = pod["metadata"], pod.get("spec", {}).get("nodeName")
    gone = seconds(meta.get("deletionTimestamp"))
    if gone and has_ended(pod) and (held := meta.get("finalizers")):
        text = f"it has ended, and metadata.finalizers keep it from being replaced: {held}"
        return cause(facts, "pod", text, pod=pod)
    if gone and node and not has_ended(pod) and facts.now > gone + GONE_S:
        text = (
            f"its node {node} does not answer, so it cannot be replaced: if the node is off, remove"
            f" it (kubectl delete node {node}) or kubectl delete pod {meta['name']} --force"
        )
        return cause(facts, "node-lost", text, pod=pod)
    # The node controller sets a pod not ready without a reason; a kubelet gives one.
    ready = condition(pod, "Ready") or {}
    silent = ready.get("status") == "False" and not ready.get("reason")
    own = (pod.get("status") or {}).get("containerStatuses") or []
    if not gone and node and silent and all(c.get("ready") for c in own):
        return cause(facts, "node-lost", f"its node {node} has not been heard from", pod=pod)
    return None


def ended_by_node(facts: Facts, pod: Object) -> Cause | None:
    """The node has ended or refused the pod: the pod's status has the reason."""
    status, node = pod.get("status") or {}, pod.get("spec", {}).get("nodeName")
    if status.get("phase") != "Failed" or not status.get("reason"):
        return None
    return _words(facts, pod, status, f"its node {node} has ended or refused it: ", "evicted")


def _taken_away(facts: Facts, pod: Object) -> Cause | None:
    """The pod is being ended from outside: by a drain, a preemption or a taint."""
    target = condition(pod, "DisruptionTarget") or {}
    holds = target.get("status") == "True"
    return _words(facts, pod, target, "it is taken off its node: ", "drained") if holds else None


# -- the scheduler -------------------------------------------------------------------------------


def _no_node(facts: Facts, pod: Object) -> Cause | None:
    """The scheduler has found no node, or a claim does not exist."""
    scheduled = condition(pod, "PodScheduled") or {}
    if scheduled.get("status") != "False":
        return None
    if scheduled.get("reason") == "SchedulingGated":
        return _words(facts, pod, scheduled)
    message = str(scheduled.get("message", ""))
    named = [name for _, name in volume_claims(pod.get("spec") or {})]
    for claim in filter(facts.claims.__contains__, named):
        found = facts.claims[claim]
        if found is None:
            text = f"there is no PersistentVolumeClaim {claim}: create it, or name another"
            return cause(facts, "claim-missing", text, pod=pod)
        # A claim with WaitForFirstConsumer is Pending too, and no cause.
        phase = (found.get("status") or {}).get("phase")
        if phase == "Pending" and "persistent" in message.lower():
            said = [it for it in facts.about(found) if it.get("type") == "Warning"]
            reason = max(said, key=event_time, default={}).get("message") or message
            text = f"its PersistentVolumeClaim {claim} has no volume: {reason}"
            return cause(facts, "claim-unbound", text, pod=pod, claim=claim)
    return _by_nodes(facts, pod, message)


def _by_nodes(facts: Facts, pod: Object, message: str) -> Cause:
    """What the nodes lack, in the scheduler's words, and the pod's fields that it concerns."""
    short = message.partition(". ")[0].rstrip(".")  # without the sentence about preemption
    ids, fields = [], dict[str, None]()
    for part in (short.partition(": ")[2] or short).split(", "):
        id, field = _lack(pod, part)
        ids.append(id)
        fields[field] = None
    # A node that lacks room has passed all other filters, so it came closest.
    id = max(ids, key=("taints", "pod", "no-room").index)
    text = f"no node takes it: {short or 'no reason given'}" + "".join(fields)
    return cause(facts, id, text, pod=pod)


def _lack(pod: Object, part: str) -> tuple[str, str]:
    """The id of the cause for a part of the scheduler's message, and the pod's field with value."""
    spec = pod.get("spec") or {}
    if "Insufficient " in part:
        resource = part.partition("Insufficient ")[2]
        resources = [it.get("resources") or {} for it in spec.get("containers") or []]
        asked = [much for it in resources if (much := (it.get("requests") or {}).get(resource))]
        return "no-room", f"; resources.requests[{resource}]: {', '.join(asked)}" if asked else ""
    if "untolerated taint" in part:
        keys = [it.get("key") or "everything" for it in spec.get("tolerations") or []]
        own = [key for key in keys if not key.startswith("node.kubernetes.io/")]
        return "taints", f"; spec.tolerations: {', '.join(own) or 'none'}"
    if "node affinity/selector" in part:
        labels = [f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
        named = f"spec.nodeSelector: {', '.join(labels)}"
        return "taints", f"; {named if labels else 'spec.affinity.nodeAffinity'}"
    return "pod", ""


# -- containers ----------------------------------------------------------------------------------


def _waiting(facts: Facts, pod: Object) -> Cause | None:
    """A container that cannot start: its image, its configuration, or another reason."""
    for status in container_statuses(pod):
        held = (status.get("state") or {}).get("waiting") or {}
        reason = str(held.get("reason") or "")
        if reason in ("", *BEGINNING):
            continue
        if "Image" in reason or reason == "RegistryUnavailable":
            return _image(facts, pod, status, held)
        id = "config" if reason == "CreateContainerConfigError" else "pod"
        return _words(facts, pod, held, f"cannot start its container {status['name']}: ", id)
    return None


def _image(facts: Facts, pod: Object, status: Object, held: Object) -> Cause:
    image, reason, message = status.get("image"), held["reason"], str(held.get("message") or "")
    if reason == "ImagePullBackOff" and ": " not in message:  # older kubelets say it in an event
        tried = [str(event.get("message", "")) for event in facts.about(pod, "Failed")]
        message += "".join(f": {it}" for it in sorted(tried, key=len)[-1:])
    text = f"cannot get the image {image}: {reason}" + (f": {message}" if message else "")
    if any(word in message for word in _DENIED):
        may = "does the image exist (--image), and may the pod pull it (--image-pull-secret)?"
        return cause(facts, "image-denied", f"{text}; {may}", pod=pod)
    return cause(facts, "image", f"{text}; --image names another", pod=pod)


def crashed(facts: Facts, pod: Object) -> Cause | None:
    """A container that has ended badly; of several, the cause of the others."""
    for end in ends([pod]):
        waits = (end.status.get("state") or {}).get("waiting") or {}
        if end.previous and waits.get("reason") != "CrashLoopBackOff":
            continue
        count = end.status.get("restartCount", 0)
        before = f"crashed {count} times and waits to start again: " if end.previous else ""
        id = "out-of-memory" if end.terminated.get("reason") == "OOMKilled" else "crash"
        named = {"container": end.container, "previous": str(end.previous).lower()}
        return cause(facts, id, before + end_in_words(facts, end), pod=pod, **named)
    return None


def _sidecar(facts: Facts, pod: Object) -> Cause | None:
    """The training has ended, and a container beside it has not: the operator waits for the pod."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    states = {str(c["name"]): c.get("state") or {} for c in statuses}
    over = states.get(CONTAINER, {}).get("terminated")
    others = [name for name, state in states.items() if "running" in state]
    if not over or not others:
        return None
    code = exit_codes.meaning(int(over.get("exitCode") or 0))
    text = (
        f"its container {CONTAINER} has ended with {code}, and {', '.join(others)} keeps the pod "
        "alive: make it a native sidecar (spec.initContainers with restartPolicy Always), or "
        "remove it"
    )
    return cause(facts, "sidecar", text, pod=pod, container=others[0])


def _said(facts: Facts, pod: Object) -> Cause | None:
    """The last warning about a pod that is not ready, or the reason of its Ready condition."""
    ready = condition(pod, "Ready") or {}
    if is_ready(pod) and ready.get("status") != "False":
        return None
    if has_ended(pod) or "deletionTimestamp" in pod["metadata"]:
        return None
    if warning := facts.warning(pod):
        return _words(facts, pod, warning)
    if ready.get("reason") and ready["reason"] not in _NO_NEWS:
        return _words(facts, pod, ready)
    return None


def _init(facts: Facts, pod: Object) -> Cause | None:
    """An init container that still runs, such as the operator's, which waits for the Master."""
    init = pod.get("spec", {}).get("initContainers") or []
    sidecars = {c["name"] for c in init if c.get("restartPolicy") == "Always"}
    for status in (pod.get("status") or {}).get("initContainerStatuses") or []:
        name = str(status["name"])
        if "running" in (status.get("state") or {}) and name not in sidecars:
            what = " (it waits for the Master)" if name == "init-pytorch" else ""
            text = f"its init container {name} has not ended{what}"
            return cause(facts, "init", text, pod=pod, container=name)
    return None


_CHECKS = (
    _lost, ended_by_node, _taken_away, _no_node, _sidecar, crashed, _waiting, _said, _init,
)  # fmt: skip
