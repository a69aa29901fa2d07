"""A job's state, and why it does not run: conditions, pods and events -> one sentence and causes.

Pure functions over the objects as the API gives them. The state comes from conditions by type and
status: the last of the list, which `kubectl get` shows, may be one that no longer holds. The
operator writes no status at all while pods or services are refused: that is in events only.
"""

import re
from collections.abc import Callable, Iterator

from gptddp.k8s.exit_codes import FIRST_RETRYABLE
from gptddp.k8s.objects import (
    Object,
    age_s,
    condition,
    container_statuses,
    event_time,
    holds,
    seconds,
    suspended,
)
from gptddp.k8s.observe import pod_causes
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_causes import Cause, how_it_ended

PENDING, RUNNING, RESTARTING, SUSPENDED = "Pending", "Running", "Restarting", "Suspended"
SUCCEEDED, FAILED, DELETING, UNKNOWN = "Succeeded", "Failed", "Deleting", "Unknown"
FINAL = (SUCCEEDED, FAILED)
NO_OPERATOR_S = 15.0  # a working operator reacts within a second
REPLACED_S, LOOP_S = 30.0, 300.0  # how long a pod's end is news; the same where it came often
_EXITED = re.compile(r"Pod: (?:[^.\s]+\.)?(\S+) exited with code (\d+)")
_SAID = re.compile(
    r"Error pod (\S+) container \S+ exitCode: (\d+) terminated message: (.*)", re.DOTALL
)


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
        return [*pod_causes.node_lost(facts), *_deleting(facts)]
    if now == FAILED:
        return [_failed(facts)]
    if now == SUSPENDED:
        return [*pod_causes.node_lost(facts), *_suspended(facts)]
    found: dict[tuple[str, str], Cause] = {}
    for check in _CHECKS:
        if found and check is _starting:
            break
        for cause in check(facts):
            pods = found[cause.id, cause.text].pods if (cause.id, cause.text) in found else ()
            found[cause.id, cause.text] = Cause(cause.id, cause.text, (*pods, *cause.pods))
    return list(found.values())


def why(facts: Facts) -> str:
    """The first cause as a sentence; empty where nothing is wrong."""
    return next((cause.sentence for cause in causes(facts)), "")


# -- checks, in the order of importance ----------------------------------------------------------


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


def _replaced(facts: Facts) -> Iterator[Cause]:
    """Pods that were lost a moment ago, or again and again: only events have their exit codes."""
    for event, pod_name, ending in _exits(facts):
        created = facts.about(facts.job, "SuccessfulCreatePod")
        own = [e for e in created if str(e.get("message", "")).endswith(f" {pod_name}")]
        # The operator tells one exit several times, and one of a container that restarts too.
        times = sum(int(e.get("count") or 1) for e in own) - 1
        since_s = facts.now - event_time(event)
        if times > 0 and since_s < (REPLACED_S if times < 3 else LOOP_S):
            often = f", {times} times by now" if times > 2 else ""
            yield Cause("replaced", f"{ending}; it was replaced{often}", (pod_name,))


def _exits(facts: Facts) -> Iterator[tuple[Object, str, str]]:
    """Bad ends that the operator saw, the newest first: (event, pod's name, how it ended).

    It tells the exit code in one event, and in another what is left of the container's last words.
    """
    about = facts.about(facts.job)
    told = [(said, e) for e in about if (said := _SAID.match(str(e.get("message", ""))))]
    for event in reversed(facts.about(facts.job, "ExitedWithCode")):
        exited = _EXITED.search(str(event.get("message", "")))
        if not exited or exited[2] == "0":
            continue
        terminated = {"exitCode": exited[2]}
        for said, other in told:
            near = abs(event_time(other) - event_time(event)) < 5
            if near and said.group(1, 2) == exited.group(1, 2):
                terminated |= {"reason": other["reason"], "message": said[3]}
        yield event, exited[1], how_it_ended({}, terminated)


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
    """Nothing is wrong: pods are being created or started."""
    if state(facts.job) != PENDING:
        return
    for pod in facts.pods:
        waiting = [(c.get("state") or {}).get("waiting") or {} for c in container_statuses(pod)]
        if any(w.get("reason") in ("ContainerCreating", "PodInitializing") for w in waiting):
            node = pod.get("spec", {}).get("nodeName")
            yield Cause("starting", f"on its way on node {node}", (pod["metadata"]["name"],))
    if not facts.pods:
        yield Cause("starting", "its pods have not been created yet")


Check = Callable[[Facts], Iterator[Cause]]
_CHECKS: tuple[Check, ...] = (
    _refused,
    pod_causes.unschedulable,
    pod_causes.waiting,
    pod_causes.crashed,
    pod_causes.node_lost,
    pod_causes.volume,
    _replaced,
    _no_operator,
    _starting,
)

# -- states that are their own cause --------------------------------------------------------------


def _suspended(facts: Facts) -> Iterator[Cause]:
    queue = (facts.job["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name")
    if queue:
        yield Cause("queued", f"it waits for room in the queue {queue}")
    elif (facts.job.get("status") or {}).get("local"):
        yield Cause("suspended", "it was stopped, or its submit is gone: the same submit goes on")
    else:
        yield Cause("suspended", f"it is suspended: gptddp-k8s resume {facts.name}")


def _deleting(facts: Facts) -> Iterator[Cause]:
    left = f"; {len(facts.pods)} pods are still stopping" if facts.pods else ""
    yield Cause("deleting", f"it is being deleted{left}")


def _failed(facts: Facts) -> Cause:
    """The pod that failed the job: the first with a final exit code, one with a reason before."""
    ends = []
    for pod in facts.pods:
        for container in container_statuses(pod):
            terminated = (container.get("state") or {}).get("terminated") or {}
            if code := int(terminated.get("exitCode") or 0):
                by_rank = "gptddp.launch: rank" in str(terminated.get("message") or "")
                when = seconds(terminated.get("finishedAt")) or 0.0
                ends.append((code >= FIRST_RETRYABLE, not by_rank, when, pod, terminated))
    told = condition(facts.job, FAILED) or {}
    message = str(told.get("message", ""))
    limit = re.search(r"(backoff limit|specified deadline|longer than)", message)
    if ends and not limit:
        *_, pod, terminated = min(ends, key=lambda end: end[:3])
        return Cause("failed", how_it_ended(pod, terminated), (pod["metadata"]["name"],))
    for _, pod_name, ending in _exits(facts):
        if not limit:
            return Cause("failed", f"{ending} (the pod and its log are gone)", (pod_name,))
    return Cause("failed", message or "it failed, and the operator says no more")
