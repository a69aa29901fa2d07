"""Causes of the job as a whole: refused, no operator, no progress, suspended, ended."""

from collections.abc import Iterator

from gptddp.k8s.objects import (
    age_s,
    condition,
    container_statuses,
    event_time,
    has_ended,
    is_ready,
    ranks_per_pod,
    seconds,
    started,
    wanted_pods,
)
from gptddp.k8s.observe import queue_causes, rank_0_log
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.endings import end_in_words, ends
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_causes import BEGINNING, ended_by_node
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.replaced_causes import exits
from gptddp.k8s.render.companions import OURS

OPERATOR = "kubeflow.org/training-operator"
NO_OPERATOR_S = 15.0  # a working operator reacts within a second
NO_STEP_S = 300.0  # time without a line of a step until it is reported
START_S = 10.0  # a pod that needs longer to start is reported
JOIN_S = 120.0  # a pod that has started, or is reachable again, joins the training within this time


# -- no pod is created ---------------------------------------------------------------------------


def refused(facts: Facts) -> Iterator[Cause]:
    """Pods and services that the API server refuses to create for the operator."""
    made = facts.about(facts.job, "SuccessfulCreatePod")
    for event in reversed(facts.about(facts.job, "FailedCreatePod")):
        message = str(event.get("message", ""))
        names = [name for name in facts.missing if f'"{name}"' in message]
        if not names and f'"{facts.name}-' in message:
            continue  # the pod of this event exists by now
        names = names or facts.missing  # the server may name none
        later = [e for e in made if event_time(e) > event_time(event)]
        if names and not any(str(e.get("message")).endswith(tuple(names)) for e in later):
            yield refusal(facts, message)
            break
    made = facts.about(facts.job, "SuccessfulCreateService")
    for event in facts.about(facts.job, "FailedCreateService")[-1:]:
        if all(event_time(e) < event_time(event) for e in made):
            yield cause(facts, "refused", f"its services are refused: {event.get('message', '')}")


# Phrases in messages of the API server: the id and the sentence of the cause.
_REFUSALS = {
    "violates PodSecurity": ("pod-security", "the namespace's Pod Security refuses its pods"),
    "exceeded quota": ("quota", "no room in the namespace's quota"),
}


def refusal(facts: Facts, message: str) -> Cause:
    """Why the API server refuses a pod: the server's message without the pod's name."""
    message = message.removeprefix("Error creating: ")
    message = message.partition(" is forbidden: ")[2] or message
    found = (known for words, known in _REFUSALS.items() if words in message)
    id, text = next(found, ("refused", "its pods are refused"))
    return cause(facts, id, f"{text}: {message}")


def no_operator(facts: Facts) -> Iterator[Cause]:
    """Nothing has happened to the job, as far as this user may see."""
    job, run_policy = facts.job, facts.job["spec"].get("runPolicy") or {}
    touched = (job.get("status") or {}).get("conditions") or facts.pods or facts.about(job)
    if touched or facts.unseen or age_s(job, facts.now) <= NO_OPERATOR_S:
        return
    other = run_policy.get("managedBy", OPERATOR)
    text = f"{other} has not taken it up (spec.runPolicy.managedBy)"
    if other == OPERATOR:
        text = "no training operator reacts to it: is one installed and running?"
    yield cause(facts, "no-operator", text)


# -- progress ------------------------------------------------------------------------------------


def no_step(facts: Facts) -> Iterator[Cause]:
    """All pods run, and the training's log has no new step; for our jobs only."""
    running = seconds((condition(facts.job, "Running") or {}).get("lastTransitionTime"))
    if facts.log is None or not running or not _is_ours(facts):
        return
    step, gap_s = rank_0_log.pace(facts.log)
    quiet_s = facts.now - max(running, rank_0_log.newest(facts.log)[0])  # rank 0 may be new
    if quiet_s < max(NO_STEP_S, 10 * (gap_s or 0.0)):
        return
    last = next((line.strip() for _, line in reversed(facts.log) if line.strip()), "")
    since = "no new step" if step is not None else "not one step"
    ready = sum(map(is_ready, facts.pods))
    text = (
        f"{ready} of {wanted_pods(facts.job)} pods run, and {since} was logged for "
        f"{quiet_s:.0f} s; "
        + (f"the log's last line: {last[:200]}" if last else "the log is empty")
    )
    yield cause(facts, "no-step", text)


def left_out(facts: Facts) -> Iterator[Cause]:
    """All pods are ready, and for JOIN_S fewer ranks have done each step; for our jobs only."""
    ready = [pod for pod in facts.pods if is_ready(pod)]
    per_pod = ranks_per_pod(facts.job)
    if not facts.log or not _is_ours(facts) or per_pod is None:
        return
    wanted = len(ready) * per_pod
    since = max((started(pod) for pod in ready), default=0.0) + JOIN_S
    fewer: list[tuple[float, int]] = []  # time and ranks of the last lines that have fewer
    for at, line in facts.log:
        if at and (count := rank_0_log.ranks(line)):
            fewer = [*fewer, (at.timestamp(), count)] if count < wanted else []
    fewer = [it for it in fewer if it[0] > since]
    lines = len(fewer)
    if lines > 1 and (fewer[-1][0] - fewer[0][0] > JOIN_S or lines > rank_0_log.TAIL // 2):
        text = (
            f"{len(ready)} pods are ready, and each step is done by {fewer[-1][1]} of {wanted} "
            "ranks: a pod that is left out is stopped, cannot reach the others, or has another "
            "Secret; its own log says what it waits for"
        )
        yield cause(facts, "left-out", text)


def _is_ours(facts: Facts) -> bool:
    """Is it a job of our trainer, whose log lines are known, on a cluster?"""
    label, _, ours = OURS.partition("=")
    labels = facts.job["metadata"].get("labels") or {}
    return labels.get(label) == ours and not facts.local


def starting(facts: Facts, pending: bool) -> Iterator[Cause]:
    """No problem found: pods are being created or started, or an image is pulled.

    `pending`: the job has not run yet. If it has, only pods that are slow to start are reported.
    """
    unseen = f"; the reason is unknown: {facts.unseen}" if facts.unseen else ""
    for pod in facts.pods:
        spec = pod.get("spec") or {}
        waiting = [(c.get("state") or {}).get("waiting") or {} for c in container_statuses(pod)]
        begins = not waiting or any(it.get("reason") in BEGINNING for it in waiting)
        if not begins or has_ended(pod) or not (pending or age_s(pod, facts.now) > START_S):
            continue
        # Only the kubelet's events: the scheduler's times have fractions of a second.
        last = max(facts.about(pod, "Pulling", "Pulled"), key=event_time, default={})
        pulls = f": {last.get('message')}" if last.get("reason") == "Pulling" else ""
        where = f"starting on node {spec.get('nodeName')}{pulls}"
        if not spec.get("nodeName"):
            scheduler = spec.get("schedulerName", "default-scheduler")
            where = f"it waits for its scheduler {scheduler} (spec.schedulerName)"
        yield cause(facts, "starting", where + unseen, pod=pod)
    if pending and not facts.pods:
        yield cause(facts, "starting", f"its pods have not been created yet{unseen}")


# -- states that are their own cause -------------------------------------------------------------


def suspended(facts: Facts) -> Iterator[Cause]:
    if facts.local:
        text = "it was stopped, or its submit has ended: the same submit continues it"
        yield cause(facts, "suspended", text)
    elif held := list(queue_causes.taken_out(facts)):
        yield from held
    else:
        yield cause(facts, "suspended", "it is suspended (spec.runPolicy.suspend)")


_OF_KUBERNETES = ("foregroundDeletion", "orphan")  # finalizers that Kubernetes itself removes


def deleting(facts: Facts) -> Iterator[Cause]:
    held = facts.job["metadata"].get("finalizers") or []
    by = ", ".join(it for it in held if it not in _OF_KUBERNETES)
    holds = f", and metadata.finalizers hold it: {by}" if by else ""
    stopping = f"; {len(facts.pods)} pods are still stopping" if facts.pods and not by else ""
    yield cause(facts, "deleting", f"it is being deleted{holds}{stopping}")


def failed(facts: Facts) -> Iterator[Cause]:
    """The pod that failed the job: the first with a final exit code; exits before kills."""
    message = str((condition(facts.job, "Failed") or {}).get("message", ""))
    if "backoff limit" in message or "specified deadline" in message:
        before = next((f"; before that, pod {it.pod_name}: {it.text}" for it in exits(facts)), "")
        yield cause(facts, "limit", f"{message} (spec.runPolicy){before}")
    elif found := [it for it in ends(facts.pods) if not it.previous and not it.by_node]:
        end = found[0]
        id = "failed" if end.container == CONTAINER else "failed-container"
        yield cause(facts, id, end_in_words(facts, end), pod=end.pod, container=end.container)
    elif evicted := list(filter(None, (ended_by_node(facts, pod) for pod in facts.pods))):
        yield evicted[0]
    elif gone := next(exits(facts), None):
        text = f"{gone.text} (the pod and its log are gone)"
        yield cause(facts, "failed", text, name=gone.pod_name)
    else:
        yield cause(facts, "failed", message or "it failed, and the operator gives no reason")
