"""What keeps a single pod from running: scheduler, image, container, node, volumes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from gptddp.k8s import exit_codes
from gptddp.k8s.objects import Object, condition, container_statuses, has_ended, seconds
from gptddp.k8s.observe.facts import Facts

_TAIL = re.compile(r"[.,]?( no new claims to deallocate[.,]?)?( preemption:.*)?$", re.S)
GONE_S = 5.0  # beyond its grace: what the kubelet needs to report that a pod has ended


@dataclass(frozen=True)
class Cause:
    """One thing that keeps pods from running: an id, the pods, and what to read or to do."""

    id: str
    text: str
    pods: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        if not self.pods:
            return self.text
        first = ", ".join(self.pods[:3]) + (" and more" if len(self.pods) > 3 else "")
        return f"{'pod' if len(self.pods) == 1 else 'pods'} {first}: {self.text}"


def unschedulable(facts: Facts) -> Iterator[Cause]:
    """No node takes the pod, or a claim of it is not there."""
    for pod in facts.pods:
        scheduled = condition(pod, "PodScheduled") or {}
        if scheduled.get("status") != "False" or has_ended(pod):
            continue
        message = _TAIL.sub("", str(scheduled.get("message", "")))
        name = (pod["metadata"]["name"],)
        if found := re.search(r'persistentvolumeclaim "([^"]+)" not found', message):
            text = f"there is no PersistentVolumeClaim {found[1]}: create it, or name another"
            yield Cause("claim-missing", text, name)
        elif "unbound immediate PersistentVolumeClaims" in message:
            text = "a PersistentVolumeClaim of it has no volume: see kubectl get pvc"
            yield Cause("claim-unbound", text, name)
        elif scheduled.get("reason") == "SchedulingGated":
            yield Cause("gated", "a scheduling gate holds it back, as a queue's", name)
        else:
            yield Cause("unschedulable", f"no node takes it: {message or 'no reason given'}", name)


def waiting(facts: Facts) -> Iterator[Cause]:
    """Containers that cannot start: image, configuration, back-off."""
    for pod in facts.pods:
        name = (pod["metadata"]["name"],)
        images = {c["name"]: c.get("image") for c in pod.get("spec", {}).get("containers", [])}
        for status in container_statuses(pod):
            waiting = (status.get("state") or {}).get("waiting") or {}
            reason, message = waiting.get("reason", ""), waiting.get("message", "")
            image = images.get(status["name"]) or status.get("image")
            if "Image" in reason or reason in ("ErrImagePull", "RegistryUnavailable"):
                told = f"{reason}: {message}" if message else reason
                yield Cause("image", f"cannot get the image {image}: {told}", name)
            elif reason.startswith("CreateContainer") or reason == "RunContainerError":
                yield Cause("container", f"cannot start its container: {reason}: {message}", name)
            elif reason == "CrashLoopBackOff" or reason.startswith("Init:"):
                last = (status.get("lastState") or {}).get("terminated") or {}
                count = status.get("restartCount", 0)
                text = f"crashed {count} times and waits to start again: {how_it_ended(pod, last)}"
                yield Cause(_ending_id(last, "crash-loop"), text, name)


def crashed(facts: Facts) -> Iterator[Cause]:
    """Containers that have ended badly, and evicted pods."""
    for pod in facts.pods:
        name, status = (pod["metadata"]["name"],), pod.get("status") or {}
        if status.get("reason") == "Evicted":
            yield Cause("evicted", f"evicted from its node: {status.get('message', '')}", name)
            continue
        for container in container_statuses(pod):
            terminated = (container.get("state") or {}).get("terminated") or {}
            if terminated.get("exitCode"):
                yield Cause(_ending_id(terminated, "crash"), how_it_ended(pod, terminated), name)


def _ending_id(terminated: Object, other: str) -> str:
    return "out-of-memory" if terminated.get("reason") == "OOMKilled" else other


def how_it_ended(pod: Object, terminated: Object) -> str:
    """How a container ended, with the reason among its last words."""
    if terminated.get("reason") == "OOMKilled":
        resources = pod.get("spec", {}).get("containers", [{}])[0].get("resources") or {}
        limit = (resources.get("limits") or {}).get("memory")
        of = f" of {limit}" if limit else ""
        return f"killed for using more than its memory{of}: give it more with --memory"
    said = exit_codes.reason(str(terminated.get("message") or ""))
    code = exit_codes.meaning(int(terminated.get("exitCode", 0)))
    return f"exited with {code}" + (f": {said}" if said else "")


def node_lost(facts: Facts) -> Iterator[Cause]:
    """A pod that should have been gone by now, or whose node has stopped reporting."""
    for pod in facts.pods:
        name, node = (pod["metadata"]["name"],), pod.get("spec", {}).get("nodeName")
        gone = seconds(pod["metadata"].get("deletionTimestamp"))
        if gone and node and not has_ended(pod) and facts.now > gone + GONE_S:
            text = (
                f"its node {node} does not answer, so it cannot be replaced: if the node is off, "
                f"remove it (kubectl delete node {node}) or kubectl delete pod {name[0]} --force"
            )
            yield Cause("node-lost", text, name)
        elif not gone and node and _silent(pod):
            yield Cause("node-silent", f"its node {node} has not been heard from", name)


def _silent(pod: Object) -> bool:
    """The pod is not ready though its containers are: the node controller has set that."""
    own = (pod.get("status") or {}).get("containerStatuses") or []
    not_ready = (condition(pod, "Ready") or {}).get("status") == "False"
    gates = pod.get("spec", {}).get("readinessGates")
    return not_ready and not gates and bool(own) and all(c.get("ready") for c in own)


def volume(facts: Facts) -> Iterator[Cause]:
    """A scheduled pod whose volumes cannot be mounted."""
    for pod in facts.pods:
        if any("waiting" in (c.get("state") or {}) for c in container_statuses(pod)):
            for event in facts.about(pod, "FailedMount", "FailedAttachVolume")[-1:]:
                text = f"its volumes do not mount: {event.get('message', '')}"
                yield Cause("volume", text, (pod["metadata"]["name"],))
