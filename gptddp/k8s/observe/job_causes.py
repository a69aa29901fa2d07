"""The job as a whole: refused, without an operator, without progress, suspended, ended."""

import re
from collections.abc import Iterator, Sequence

from gptddp.k8s.objects import (
    Object,
    age_s,
    condition,
    container_statuses,
    event_time,
    is_ready,
    seconds,
    wanted_pods,
)
from gptddp.k8s.observe import progress
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.container_causes import ended, ending_order, hinted
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.replaced_causes import exits
from gptddp.k8s.render.companions import OURS

NO_OPERATOR_S = 15.0  # a working operator reacts within a second
NO_STEP_S = 300.0  # of running without a line of a step, until that is told
JOIN_S = 120.0  # in which a pod that has started, or is found again, is in the training
GIVEN_UP = "gptddp/given-up"  # annotation of a job: why a command that waited has failed it


# -- refused -------------------------------------------------------------------------------------


def refused(facts: Facts) -> Iterator[Cause]:
    """Pods and services that the API server does not let the operator create."""
    made = facts.about(facts.job, "SuccessfulCreatePod")
    for event in reversed(facts.about(facts.job, "FailedCreatePod")):
        message = str(event.get("message", "")).removeprefix("Error creating: ")
        name = re.search(r'[Pp]ods? "([^"]+)"', message)
        later = [e for e in made if event_time(e) > event_time(event)]
        if name and name[1] in facts.missing:
            later = [e for e in later if str(e.get("message", "")).endswith(name[1])]
        if not later and facts.missing and (not name or name[1] in facts.missing):
            yield refusal(facts, message)
            break
    made = facts.about(facts.job, "SuccessfulCreateService")
    for event in facts.about(facts.job, "FailedCreateService")[-1:]:
        if all(event_time(e) < event_time(event) for e in made):
            message = str(event.get("message", "")).removeprefix("Error creating: ")
            yield cause(facts, "service-refused", f"its services are refused: {message}")


# What the API server says: the cause, and its sentence. Groups are the command's names.
_REFUSALS = (
    (
        r'violates PodSecurity "([^"]+)": (.*)',
        "pod-security",
        r"the namespace's Pod Security (\1) refuses its pods: \2",
    ),
    (
        r"failed quota: (?P<quota>[^:\s]+): must specify (.*)",
        "quota-unstated",
        r"the namespace's ResourceQuota \1 wants its pods to state \2",
    ),
    (
        r"exceeded quota: ((?P<quota>[^,\s]+).*)",
        "quota",
        r"no room in the namespace's quota: \1",
    ),
    (
        r'serviceaccount "(?P<account>[^"]+)" not found',
        "service-account-missing",
        r"there is no ServiceAccount \1, which its pods name (spec.serviceAccountName)",
    ),
    (
        r"no PriorityClass with name (\S+) was found",
        "priority-class-missing",
        r"there is no PriorityClass \1, which its pods name (spec.priorityClassName)",
    ),
    (
        r'RuntimeClass "([^"]+)" not found',
        "runtime-class-missing",
        r"there is no RuntimeClass \1, which its pods name (spec.runtimeClassName)",
    ),
    (
        r"((minimum|maximum) \S+ usage per .*|\S+ max limit to request ratio per .*)",
        "limit-range",
        r"a LimitRange of the namespace refuses its pods (resources): \1",
    ),
    (
        r"(ValidatingAdmissionPolicy '.*)",
        "policy",
        r"a policy of the cluster refuses its pods: \1",
    ),
    (
        r'(admission webhook ".*|failed calling webhook .*)',
        "webhook",
        r"a webhook of the cluster refuses its pods: \1",
    ),
    (
        r"(because it is being terminated)",
        "namespace-ending",
        r"its pods are refused because the namespace is being deleted",
    ),
    (
        r'(Pod "[^"]+" is invalid: .*)',
        "pod-invalid",
        r"its pods are refused: \1",
    ),
)  # fmt: skip


def refusal(facts: Facts, message: str) -> Cause:
    """A refused pod's message in the words of who has to act."""
    for pattern, id, text in _REFUSALS:
        if found := re.search(pattern, message, re.S):
            named: dict[str, str] = found.groupdict()
            return cause(facts, id, found.expand(text), named=named)
    return cause(facts, "pods-refused", f"its pods are refused: {message}")


def no_operator(facts: Facts) -> Iterator[Cause]:
    """Nothing at all has happened to the job."""
    job, run_policy = facts.job, facts.job["spec"].get("runPolicy") or {}
    untouched = not (job.get("status") or {}).get("conditions") and not facts.pods
    mine = [e for e in facts.events if e.get("involvedObject", {}).get("name") == facts.name]
    if untouched and not mine and age_s(job, facts.now) > NO_OPERATOR_S:
        other = run_policy.get("managedBy", "kubeflow.org/training-operator")
        if other != "kubeflow.org/training-operator":
            text = f"{other} has not taken it up (spec.runPolicy.managedBy)"
            yield cause(facts, "managed-elsewhere", text)
        else:
            text = "no training operator reacts to it: is one installed, and does it run?"
            yield cause(facts, "no-operator", text)


# -- progress ------------------------------------------------------------------------------------


def no_step(facts: Facts) -> Iterator[Cause]:
    """All pods run, and the training's log has no new step; of jobs of ours only."""
    running = seconds((condition(facts.job, "Running") or {}).get("lastTransitionTime"))
    if facts.log is None or not running or not _is_ours(facts):
        return
    steps = [
        at.timestamp() for at, line in facts.log if at and progress.progress([line])["progress"]
    ]
    gaps = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    quiet_s = facts.now - max([running, *steps[-1:]])
    if quiet_s < max(NO_STEP_S, 10 * max(gaps, default=0.0)):
        return
    last = next((line.strip() for _, line in reversed(facts.log) if line.strip()), "")
    since = "no new step" if steps else "not one step"
    ready = sum(map(is_ready, facts.pods))
    text = (
        f"{ready} of {wanted_pods(facts.job)} pods run, and {since} was logged for "
        f"{quiet_s:.0f} s; "
        + (f"the log's last line: {last[:200]}" if last else "the log is empty")
    )
    yield cause(facts, "no-step", text)


def left_out(facts: Facts) -> Iterator[Cause]:
    """All pods are ready, and for a while fewer ranks have done each step; of jobs of ours only."""
    ready = [pod for pod in facts.pods if is_ready(pod)]
    per_pod = str(facts.job["spec"].get("nprocPerNode") or 1)
    if not facts.log or not _is_ours(facts) or not per_pod.isdigit():
        return
    wanted = len(ready) * int(per_pod)
    since = max((_started(pod) for pod in ready), default=0.0) + JOIN_S
    fewer: list[tuple[float, int]] = []  # of the lines at the end
    for at, line in facts.log:
        if at and (count := progress.ranks(line)):
            fewer = [*fewer, (at.timestamp(), count)] if count < wanted else []
    fewer = [it for it in fewer if it[0] > since]
    if len(fewer) > 1 and (fewer[-1][0] - fewer[0][0] > JOIN_S or len(fewer) > progress.TAIL // 2):
        text = (
            f"{len(ready)} pods are ready, and each step is done by {fewer[-1][1]} of {wanted} "
            "ranks: a pod that is left out is stopped, does not reach the others, or has another "
            "Secret than they; its own log says what it waits for"
        )
        yield cause(facts, "left-out", text)


def _started(pod: Object) -> float:
    """When the newest of the pod's containers was started."""
    states = [(c.get("state") or {}).get("running") or {} for c in container_statuses(pod)]
    return max((seconds(it.get("startedAt")) or 0.0 for it in states), default=0.0)


def _is_ours(facts: Facts) -> bool:
    """Is it a job of our trainer, whose lines are known, on a cluster?"""
    label, _, ours = OURS.partition("=")
    labels = facts.job["metadata"].get("labels") or {}
    return labels.get(label) == ours and not facts.local


_BEGINNING = ("ContainerCreating", "PodInitializing")


def starting(facts: Facts) -> Iterator[Cause]:
    """Nothing is wrong, as far as is seen: pods are being created or started."""
    unseen = f"; for what is not to be seen: {facts.unseen}" if facts.unseen else ""
    for pod in facts.pods:
        waiting = [(c.get("state") or {}).get("waiting") or {} for c in container_statuses(pod)]
        waiting = waiting or [{"reason": "ContainerCreating"}]  # its kubelet has not said so yet
        node = pod.get("spec", {}).get("nodeName")
        if node and any(w.get("reason") in _BEGINNING for w in waiting):
            yield cause(facts, "starting", f"on its way on node {node}{unseen}", pod=pod)
    if not facts.pods:
        yield cause(facts, "starting", f"its pods have not been created yet{unseen}")


# -- states that are their own cause -------------------------------------------------------------


def suspended(facts: Facts) -> Iterator[Cause]:
    if facts.local:
        text = "it was stopped, or its submit is gone: the same submit goes on"
        yield cause(facts, "suspended", text)
    else:
        yield cause(facts, "suspended", "it is suspended (spec.runPolicy.suspend)")


_OF_KUBERNETES = ("foregroundDeletion", "orphan")  # finalizers that its own controllers take off


def deleting(facts: Facts) -> Iterator[Cause]:
    left = f"; {len(facts.pods)} pods are still stopping" if facts.pods else ""
    held = facts.job["metadata"].get("finalizers") or []
    if by := [it for it in held if it not in _OF_KUBERNETES]:
        named = {"kind": "pytorchjob", "object": facts.name}
        text = f"it is being deleted, and metadata.finalizers hold it: {', '.join(by)}"
        yield cause(facts, "finalizers", text, named=named)
    else:
        yield cause(facts, "deleting", f"it is being deleted{left}")


def failed(facts: Facts) -> Cause:
    """The pod that failed the job: the first with a final exit code, one with a reason before."""
    told = condition(facts.job, "Failed") or {}
    message = str(told.get("message", ""))
    if reason := (facts.job["metadata"].get("annotations") or {}).get(GIVEN_UP):
        return cause(facts, "given-up", str(reason))
    if re.search(r"(backoff limit|specified deadline|longer than)", message):
        before = next((f"; before, pod {it.pod_name} {it.text}" for it in exits(facts)), "")
        return cause(facts, "limit", f"{message} (spec.runPolicy){before}")
    if ends := _ends(facts.pods):
        *_, pod, container, terminated = min(ends, key=lambda end: end[:3])
        id, text = ended(facts, pod, container, terminated, "")
        if container != CONTAINER:
            text = f"its container {container} {text}"
            named = {"container": container}
            return cause(facts, "failed-container", hinted(id, text), pod=pod, named=named)
        return cause(facts, "failed", hinted(id, text), pod=pod)
    for it in exits(facts):
        text = f"{it.text} (the pod and its log are gone)"
        return cause(facts, "failed", text, name=it.pod_name)
    return cause(facts, "failed", message or "it failed, and the operator says no more")


def _ends(pods: Sequence[Object]) -> list[tuple[bool, bool, float, Object, str, Object]]:
    """The bad ends of containers; the least is that of the job."""
    ends = []
    for pod in pods:
        for container in container_statuses(pod):
            terminated = (container.get("state") or {}).get("terminated") or {}
            if int(terminated.get("exitCode") or 0):
                ends.append((*ending_order(terminated), pod, container["name"], terminated))
    return ends
