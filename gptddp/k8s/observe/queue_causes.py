"""Causes of a job that waits in a queue of Kueue, was taken out of it, or runs outside of it.

Kueue gives the reason in the conditions of the job's Workload; it is passed on unchanged.
"""

from collections.abc import Iterator

from gptddp.k8s.objects import PRIORITY, QUEUE, Object, age_s, condition
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.queue import NO_KUEUE, Queue

NO_WORKLOAD_S = 15.0  # a working Kueue creates the Workload within a second
# Reasons that Kueue keeps until the job starts again, even when they no longer hold (the job was
# resumed, or its queue opened). While they hold, another condition has them too.
_OUTLIVED = ("Deactivated", "ClusterQueueStopped", "LocalQueueStopped")
_LABEL = f"metadata.labels[{QUEUE}]"


def queued(facts: Facts) -> Iterator[Cause]:
    """A suspended job that Kueue will start."""
    queue = facts.queue
    if queue and queue.workload:
        yield cause(facts, "queued", _waits(queue, queue.workload))
    elif queue and not queue.unseen and not facts.pods and _is_late(facts):
        yield cause(facts, "not-queued", _unmade(facts, queue))
    else:
        name = (facts.job["metadata"].get("labels") or {}).get(QUEUE)
        unseen = f"; its Workload cannot be read: {queue.unseen}" if queue and queue.unseen else ""
        yield cause(facts, "queued", f"it waits in the queue {name}{unseen}")


def taken_out(facts: Facts) -> Iterator[Cause]:
    """A job that no queue will start: it was taken out, or the cluster has no Kueue."""
    queue = facts.queue
    if queue and queue.held:
        evicted = condition(queue.workload or {}, "Evicted")
        text = f"it was taken out of the queue {queue.name} (spec.active of its Workload)"
        yield cause(facts, "held", text + _words(evicted))
    elif queue and queue.given_up:
        text = f"Kueue could not start it on its turn, and has given up: {queue.given_up}"
        yield cause(facts, "held", text)
    elif queue and not queue.kueue:
        text = f"it should wait in the queue {queue.name} ({_LABEL}), but {NO_KUEUE}"
        yield cause(facts, "no-kueue", text)


def not_queued(facts: Facts) -> Iterator[Cause]:
    """A job with a queue that runs without being admitted by Kueue."""
    queue = facts.queue
    if queue and queue.workload is None and not queue.unseen and _is_late(facts):
        text = f"it runs outside of its queue {queue.name} and of any quota: "
        why = _unmade(facts, queue) if queue.kueue else f"{NO_KUEUE} ({_LABEL})"
        yield cause(facts, "not-queued", text + why)


def _is_late(facts: Facts) -> bool:
    return age_s(facts.job, facts.now) > NO_WORKLOAD_S


def _unmade(facts: Facts, queue: Queue) -> str:
    """Kueue has no Workload for the job; only Kueue's own log says why."""
    named = (facts.job["metadata"].get("labels") or {}).get(PRIORITY)
    priority = f", and is there a WorkloadPriorityClass {named} (metadata.labels[{PRIORITY}])"
    return (
        f"Kueue has no Workload for it in the queue {queue.name} ({_LABEL}): does Kueue run, is its"
        f" integration kubeflow.org/pytorchjob on{priority if named else ''}?"
    )


def _waits(queue: Queue, workload: Object) -> str:
    """Where a job waits, and Kueue's reasons: why it was stopped, what it lacks."""
    place = f"it waits in the queue {queue.name}" if queue.name else f"it names no queue ({_LABEL})"
    if queue.admitted:
        place = f"it has its quota in the queue {queue.name}, and has not started yet"
    reasons: dict[str, str] = {}  # by message: an eviction sets two conditions with one message
    kinds = (("Evicted", "True"), ("Admitted" if queue.admitted else "QuotaReserved", "False"))
    for kind, bad in kinds:
        found = condition(workload, kind) or {}
        past = kind == "Evicted" and found.get("reason") in _OUTLIVED
        if found.get("status") == bad and not past:
            reasons.setdefault(str(found.get("message")), _words(found))
    return "".join([place, *reasons.values()])


def _words(found: Object | None) -> str:
    """`; Preempted: ...`: the reason and the message of a condition, unchanged."""
    return f"; {found.get('reason')}: {str(found.get('message', '')).rstrip('.')}" if found else ""
