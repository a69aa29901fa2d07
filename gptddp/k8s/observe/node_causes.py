"""What nodes do to pods: reject, evict, shut down, fall silent, find no address for them."""

import re
from collections.abc import Iterator

from gptddp.k8s.objects import (
    Object,
    age_s,
    condition,
    container_statuses,
    event_time,
    has_ended,
    seconds,
)
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.scheduling_causes import preemption

UNATTENDED_S = 20.0  # a kubelet that runs reports a pod within a second
GONE_S = 5.0  # beyond its grace: what the kubelet needs to report that a pod has ended
_BY_NODE = "Pod was rejected"
_OWN_STORAGE = re.compile(r"emptydir|ephemeral (local )?storage (usage|limit)", re.I)
_NO_ADDRESS = re.compile(
    r"no (available )?(ip )?addresses|failed to assign an ip|no available addresses|"
    r"insufficient.{0,20}ip address|range set.*(full|exhaust)|failed to allocate.{0,40}address",
    re.I,
)
AROUND_S = 90.0  # between the end of a pod and its events
EVICTED_S = 300.0  # after which Kubernetes ends the pods of a node that is silent
_PROBE = re.compile(r"([Ll]iveness|[Ss]tartup) probe")  # those that end a container
_HOOK = "spec.containers[].lifecycle.postStart"
_TAKEN = {  # reasons of a pod's condition DisruptionTarget
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "tainted",
    "EvictionByEvictionAPI": "drained",
}


def ended_by_node(facts: Facts) -> Iterator[Cause]:
    """Pods that the node has ended or never begun: the pod's status has the reason."""
    for pod in facts.pods:
        status = pod.get("status") or {}
        reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
        if status.get("phase") == "Failed" and reason:
            node = pod.get("spec", {}).get("nodeName")
            id, text = _ending(reason, message, node)
            yield cause(facts, id, text, pod=pod)


def _ending(reason: str, message: str, node: object) -> tuple[str, str]:
    """The cause and the sentence for the reason with which a kubelet has ended a pod."""
    said = f"{reason}: {message.removeprefix('Pod ').rstrip('. ')}" if message else reason
    if reason in ("Terminated", "NodeShutdown", "Shutdown"):
        return "node-shutdown", f"its node {node} shuts down, as a spot node may ({said})"
    if reason == "Evicted":
        own = _OWN_STORAGE.search(message)
        field = "; raise resources.limits[ephemeral-storage] or the volume's sizeLimit"
        where = f"evicted from its node {node}: {message.rstrip('. ')}"
        return ("evicted-storage", where + field) if own else ("evicted", where)
    if reason == "DeadlineExceeded":
        return "pod-deadline", f"it has run for longer than its spec.activeDeadlineSeconds ({said})"
    if reason == "NodeLost":
        return "node-silent", f"its node {node} has not been heard from ({said})"
    if reason in ("Preempting", "Preempted"):
        return "preempted", f"its node {node} needed its place for a critical pod ({said})"
    return "rejected", f"its node {node} rejects it before it starts: {said}"


def taken_away(facts: Facts) -> Iterator[Cause]:
    """Pods that are being ended from outside: preempted, evicted, or off a tainted node."""
    for pod in facts.pods:
        target = condition(pod, "DisruptionTarget") or {}
        id = _TAKEN.get(str(target.get("reason")))
        ended = has_ended(pod) and (pod.get("status") or {}).get("reason")
        if target.get("status") == "True" and id and not ended:
            text = f"it is being {_PARTICIPLES[id]}: {target.get('message', '')}"
            yield cause(facts, id, text, pod=pod)


_PARTICIPLES = {
    "preempted": "preempted by a pod of a higher priority (spec.priorityClassName)",
    "tainted": "taken off its node, which got a taint that spec.tolerations has not",
    "drained": "evicted through the API, as by a drain of its node",
}


def before(facts: Facts, pod_name: str, at: float) -> tuple[str, str] | None:
    """Why a pod of this name that is gone was ended, at a time: (cause, sentence), by its events.

    The exit code of a pod that was killed from outside says nothing of who did it.
    """
    for event in facts.ever_about(pod_name, "NodeNotReady"):
        if -AROUND_S < at - event_time(event) < EVICTED_S + AROUND_S:
            text = "its node was not heard from any more (NodeNotReady): a spot node that is gone?"
            return "node-silent", text
    own = ("Evicted", "Terminated", "NodeShutdown", "DeadlineExceeded")
    others = ("Preempted", "TaintManagerEviction", "Killing", "Unhealthy", "FailedPostStartHook")
    for event in reversed(facts.ever_about(pod_name, *own, *others)):
        if abs(event_time(event) - at) > AROUND_S:
            continue
        reason, message = event["reason"], str(event.get("message", ""))
        node = (event.get("source") or {}).get("host") or "that it was on"
        if reason == "Preempted":
            return "preempted", preemption(event)
        if reason == "TaintManagerEviction":
            return "tainted", f"its node got a taint that spec.tolerations has not: {message}"
        if reason in ("Killing", "Unhealthy") and (probe := _PROBE.search(message)):
            field = f"spec.containers[].{probe[1].lower()}Probe"
            said = message.strip().rstrip(": ")
            return "probe", f"ended by its node {node}: {said} ({field})"
        if reason == "FailedPostStartHook":
            return (
                "hook",
                f"ended by its node {node}: its postStart hook failed ({_HOOK}): {message}",
            )
        if reason in own:
            return _ending(reason, message, node)
    return None


def rejected(event: Object) -> bool:
    """Is this event of a pod the word of a kubelet that has refused to start it?"""
    reason = str(event.get("reason", ""))
    known = ("UnexpectedAdmissionError", "TopologyAffinityError", "NodeAffinity", "NodeShutdown")
    return reason.startswith("OutOf") or reason in known or _BY_NODE in str(event.get("message"))


def node_lost(facts: Facts) -> Iterator[Cause]:
    """A pod that should have been gone by now, or whose node has stopped reporting."""
    for pod in facts.pods:
        name, node = pod["metadata"]["name"], pod.get("spec", {}).get("nodeName")
        gone = seconds(pod["metadata"].get("deletionTimestamp"))
        if gone and node and not has_ended(pod) and facts.now > gone + GONE_S:
            text = (
                f"its node {node} does not answer, so it cannot be replaced: if the node is off, "
                f"remove it (kubectl delete node {node}) or kubectl delete pod {name} --force"
            )
            yield cause(facts, "node-lost", text, pod=pod)
        elif not gone and node and _silent(pod):
            text = f"its node {node} has not been heard from"
            yield cause(facts, "node-silent", text, pod=pod)


def _silent(pod: Object) -> bool:
    """The pod is not ready though its containers are: the node controller has set that.

    It gives no reason; a kubelet does, as for a pod that it is ending.
    """
    own = (pod.get("status") or {}).get("containerStatuses") or []
    ready = condition(pod, "Ready") or {}
    not_ready = ready.get("status") == "False" and not ready.get("reason")
    return not_ready and bool(own) and all(c.get("ready") for c in own)


def unattended(facts: Facts) -> Iterator[Cause]:
    """A pod that has a node, and of which no kubelet has said anything."""
    for pod in facts.pods:
        node, status = pod.get("spec", {}).get("nodeName"), pod.get("status") or {}
        age = age_s(pod, facts.now)
        over = "deletionTimestamp" in pod["metadata"] or has_ended(pod) or facts.local
        seen = over or "startTime" in status or any(container_statuses(pod))
        if node and not seen and age > UNATTENDED_S:
            text = (
                f"its node {node} has not taken it up for {age:.0f} s (spec.nodeName): is there "
                "such a node, and is it Ready?"
            )
            yield cause(facts, "not-taken-up", text, pod=pod)


def not_let_go(facts: Facts) -> Iterator[Cause]:
    """A pod that has ended and is deleted, and stays: nothing takes its place until it is gone."""
    for pod in facts.pods:
        held = pod["metadata"].get("finalizers")
        if held and has_ended(pod) and "deletionTimestamp" in pod["metadata"]:
            by = ", ".join(held)
            text = f"it has ended, and cannot be replaced: metadata.finalizers hold it: {by}"
            named = {"kind": "pod", "object": str(pod["metadata"]["name"])}
            yield cause(facts, "finalizers", text, pod=pod, named=named)


def sandbox(facts: Facts) -> Iterator[Cause]:
    """A pod for which its node cannot make a network: no address is left, as a rule."""
    for pod in facts.pods:
        if not any("waiting" in (c.get("state") or {}) for c in container_statuses(pod)):
            continue
        if event := facts.unsolved(pod, "FailedCreatePodSandBox"):
            message, node = str(event.get("message", "")), pod.get("spec", {}).get("nodeName")
            if "OOM-killed" in message:
                text = (
                    "its container's memory is too little to start with "
                    f"(resources.limits.memory): {message}"
                )
                yield cause(facts, "out-of-memory", text, pod=pod)
            elif _NO_ADDRESS.search(message):
                text = f"its node {node} has no free address for a pod: {message}"
                yield cause(facts, "addresses", text, pod=pod)
            else:
                text = f"its node {node} cannot make its sandbox: {message}"
                yield cause(facts, "sandbox", text, pod=pod)
