"""A job's state, and why it does not run: conditions, pods and events -> one sentence and causes.

Pure functions over the objects as the API gives them. The state comes from conditions by type and
status: the last of the list, which `kubectl get` shows, may be one that no longer holds. The
operator writes no status at all while pods or services are refused: that is in events only.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gptddp.k8s import endings
from gptddp.k8s.facts import (
    Facts,
    Object,
    age_s,
    condition,
    containers,
    ended,
    event_time,
    holds,
    seconds,
    suspended,
)  # fmt: skip

PENDING, RUNNING, RESTARTING, SUSPENDED = "Pending", "Running", "Restarting", "Suspended"
SUCCEEDED, FAILED, DELETING, UNKNOWN = "Succeeded", "Failed", "Deleting", "Unknown"
FINAL = (SUCCEEDED, FAILED)
NO_OPERATOR_S = 15.0  # a working operator reacts within a second
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


def state(job: Object) -> str:
    """One word for the job, by what holds now."""
    if "deletionTimestamp" in job["metadata"]:
        return DELETING
    for kind in (FAILED, SUCCEEDED):
        if holds(job, kind):
            return kind
    if suspended(job):
        return SUSPENDED
    for kind in (RESTARTING, RUNNING):
        if holds(job, kind):
            return kind
    known = (job.get("status") or {}).get("conditions") or []
    named = {"Created", RUNNING, RESTARTING, SUSPENDED, *FINAL}
    return PENDING if not known or any(c["type"] in named for c in known) else UNKNOWN


def causes(facts: Facts) -> list[Cause]:
    """What keeps the job, or some of its pods, from running: the most important first."""
    now = state(facts.job)
    if now == SUCCEEDED:
        return []
    if now == DELETING:
        return [*_node_lost(facts), *_deleting(facts)]
    if now == FAILED:
        return [_failed(facts)]
    if now == SUSPENDED:
        return [*_node_lost(facts), *_suspended(facts)]
    found: dict[tuple[str, str], Cause] = {}
    for look in _LOOKS:
        for cause in look(facts):
            pods = found[cause.id, cause.text].pods if (cause.id, cause.text) in found else ()
            found[cause.id, cause.text] = Cause(cause.id, cause.text, (*pods, *cause.pods))
    return list(found.values())


def why(facts: Facts) -> str:
    """The first cause as a sentence; empty where nothing is wrong."""
    return next((cause.sentence for cause in causes(facts)), "")


# -- looks, in the order of importance -----------------------------------------------------------


def _refused(facts: Facts) -> Iterator[Cause]:
    """Pods and services that the API server does not let the operator create."""
    made = facts.about(facts.job, "SuccessfulCreatePod")
    for event in reversed(facts.about(facts.job, "FailedCreatePod")):
        message = str(event.get("message", "")).removeprefix("Error creating: ")
        name = re.search(r'[Pp]ods? "([^"]+)"', message)
        later = [e for e in made if event_time(e) > event_time(event)]
        if name and name[1] in facts.missing:
            later = [e for e in later if str(e.get("message", "")).endswith(name[1])]
        if not later and facts.missing and (not name or name[1] in facts.missing):
            yield Cause("pods-refused", _refusal(message))
            break
    made = facts.about(facts.job, "SuccessfulCreateService")
    for event in facts.about(facts.job, "FailedCreateService")[-1:]:
        if all(event_time(e) < event_time(event) for e in made):
            message = str(event.get("message", "")).removeprefix("Error creating: ")
            yield Cause("service-refused", f"its services are refused: {message}")


def _refusal(message: str) -> str:
    """A refused pod's message in the words of who has to act."""
    if found := re.search(r'violates PodSecurity "([^"]+)": (.*)', message, re.S):
        return f"the namespace's Pod Security ({found[1]}) refuses its pods: {found[2]}"
    if found := re.search(r"exceeded quota: (.*)", message, re.S):
        return f"no room in the namespace's quota: {found[1]}"
    if found := re.search(r'serviceaccount "([^"]+)" not found', message):
        return f"there is no ServiceAccount {found[1]}, which its pods name: create it"
    return f"its pods are refused: {message}"


def _unschedulable(facts: Facts) -> Iterator[Cause]:
    """No node takes the pod, or a claim of it is not there."""
    for pod in facts.pods:
        scheduled = condition(pod, "PodScheduled") or {}
        if scheduled.get("status") != "False" or ended(pod):
            continue
        message = str(scheduled.get("message", "")).partition(" preemption:")[0].rstrip(".,")
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


def _waiting(facts: Facts) -> Iterator[Cause]:
    """Containers that wait for more than their turn: image, configuration, back-off."""
    for pod in facts.pods:
        name = (pod["metadata"]["name"],)
        images = {c["name"]: c.get("image") for c in pod.get("spec", {}).get("containers", [])}
        for status in containers(pod):
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
                text = f"crashed {count} times and waits to start again: {_end(pod, last)}"
                yield Cause(_ending_id(last, "crash-loop"), text, name)


def _crashed(facts: Facts) -> Iterator[Cause]:
    """Containers that have ended badly, and evicted pods."""
    for pod in facts.pods:
        name, status = (pod["metadata"]["name"],), pod.get("status") or {}
        if status.get("reason") == "Evicted":
            yield Cause("evicted", f"evicted from its node: {status.get('message', '')}", name)
            continue
        for container in containers(pod):
            terminated = (container.get("state") or {}).get("terminated") or {}
            if terminated.get("exitCode"):
                yield Cause(_ending_id(terminated, "crash"), _end(pod, terminated), name)


def _ending_id(terminated: Object, other: str) -> str:
    return "out-of-memory" if terminated.get("reason") == "OOMKilled" else other


def _end(pod: Object, terminated: Object) -> str:
    """How a container ended, with the reason among its last words."""
    if terminated.get("reason") == "OOMKilled":
        resources = pod.get("spec", {}).get("containers", [{}])[0].get("resources") or {}
        limit = (resources.get("limits") or {}).get("memory")
        of = f" of {limit}" if limit else ""
        return f"killed for using more than its memory{of}: give it more with --memory"
    said = endings.reason(str(terminated.get("message") or ""))
    code = endings.meaning(int(terminated.get("exitCode", 0)))
    return f"exited with {code}" + (f": {said}" if said else "")


def _node_lost(facts: Facts) -> Iterator[Cause]:
    """A pod that should have been gone by now, or whose node has fallen silent."""
    for pod in facts.pods:
        name, node = (pod["metadata"]["name"],), pod.get("spec", {}).get("nodeName")
        gone = seconds(pod["metadata"].get("deletionTimestamp"))
        if gone and node and not ended(pod) and facts.now > gone + GONE_S:
            text = (
                f"its node {node} does not answer, so it cannot be replaced: if the node is off, "
                f"remove it (kubectl delete node {node}) or kubectl delete pod {name[0]} --force"
            )
            yield Cause("node-lost", text, name)
        elif not gone and node and _silent(pod):
            yield Cause("node-silent", f"its node {node} has not been heard from", name)


def _silent(pod: Object) -> bool:
    """The node controller takes back Ready, while nobody can take back the containers'."""
    own = (pod.get("status") or {}).get("containerStatuses") or []
    not_ready = (condition(pod, "Ready") or {}).get("status") == "False"
    gates = pod.get("spec", {}).get("readinessGates")
    return not_ready and not gates and bool(own) and all(c.get("ready") for c in own)


def _volume(facts: Facts) -> Iterator[Cause]:
    """A scheduled pod whose volumes do not come."""
    for pod in facts.pods:
        if any("waiting" in (c.get("state") or {}) for c in containers(pod)):
            for event in facts.about(pod, "FailedMount", "FailedAttachVolume")[-1:]:
                text = f"its volumes do not mount: {event.get('message', '')}"
                yield Cause("volume", text, (pod["metadata"]["name"],))


def _replaced(facts: Facts) -> Iterator[Cause]:
    """A pod that has just been lost: the operator tells its exit code in an event only."""
    for event in facts.about(facts.job, "ExitedWithCode")[-1:]:
        found = re.search(r"Pod: \S*?\.?([^.\s]+) exited with code (\d+)", event.get("message", ""))
        if found and state(facts.job) == RESTARTING and facts.now - event_time(event) < 60:
            text = f"exited with {endings.meaning(int(found[2]))} and is being replaced"
            yield Cause("replaced", text, (found[1],))


def _no_operator(facts: Facts) -> Iterator[Cause]:
    """Nothing at all has happened to the job."""
    job, run_policy = facts.job, facts.job["spec"].get("runPolicy") or {}
    untouched = not (job.get("status") or {}).get("conditions") and not facts.pods
    mine = [e for e in facts.events if e.get("involvedObject", {}).get("name") == facts.name]
    if untouched and not mine and age_s(job, facts.now) > NO_OPERATOR_S:
        other = run_policy.get("managedBy", "kubeflow.org/training-operator")
        if other != "kubeflow.org/training-operator":
            yield Cause("managed-elsewhere", f"{other} has not taken it up")
        else:
            text = "no training operator reacts to it: is it installed and running? see operator/"
            yield Cause("no-operator", text)


def _starting(facts: Facts) -> Iterator[Cause]:
    """Nothing is wrong, and yet it takes its time."""
    if state(facts.job) != PENDING:
        return
    for pod in facts.pods:
        waiting = [(c.get("state") or {}).get("waiting") or {} for c in containers(pod)]
        if any(w.get("reason") in ("ContainerCreating", "PodInitializing") for w in waiting):
            node = pod.get("spec", {}).get("nodeName")
            yield Cause("starting", f"on its way on node {node}", (pod["metadata"]["name"],))
    if not facts.pods:
        yield Cause("starting", "its pods have not been created yet")


Look = Callable[[Facts], Iterator[Cause]]
_LOOKS: tuple[Look, ...] = (
    _refused, _unschedulable, _waiting, _crashed, _node_lost, _volume, _replaced, _no_operator,
    _starting,
)  # fmt: skip

# -- states that need no search ------------------------------------------------------------------


def _suspended(facts: Facts) -> Iterator[Cause]:
    queue = (facts.job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if queue:
        yield Cause("queued", f"it waits for room in the queue {queue}")
    else:
        yield Cause("suspended", f"it is suspended: gptddp-k8s resume {facts.name}")


def _deleting(facts: Facts) -> Iterator[Cause]:
    left = f"; {len(facts.pods)} pods are still stopping" if facts.pods else ""
    yield Cause("deleting", f"it is being deleted{left}")


def _failed(facts: Facts) -> Cause:
    """The pod that failed the job: the first with a final exit code, one with a reason before."""
    ends = []
    for pod in facts.pods:
        for container in containers(pod):
            terminated = (container.get("state") or {}).get("terminated") or {}
            if code := int(terminated.get("exitCode") or 0):
                by_rank = "gptddp.launch: rank" in str(terminated.get("message") or "")
                when = seconds(terminated.get("finishedAt")) or 0.0
                ends.append((code > 127, not by_rank, when, pod, terminated))
    told = condition(facts.job, FAILED) or {}
    message = str(told.get("message", ""))
    limit = re.search(r"(backoff limit|specified deadline|longer than)", message)
    if ends and not limit:
        *_, pod, terminated = min(ends, key=lambda end: end[:3])
        return Cause("failed", _end(pod, terminated), (pod["metadata"]["name"],))
    for event in reversed(facts.about(facts.job, "ExitedWithCode")):
        found = re.search(r"Pod: \S*?\.?([^.\s]+) exited with code (\d+)", event.get("message", ""))
        if found and not limit:
            text = f"exited with {endings.meaning(int(found[2]))}; the pod and its log are gone"
            return Cause("failed", text, (found[1],))
    return Cause("failed", message or "it failed, and the operator says no more")
