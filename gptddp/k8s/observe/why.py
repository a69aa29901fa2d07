"""A job's state, and why it does not run: conditions, pods and events -> one sentence and causes.

Pure functions over the objects as the API gives them. The state comes from conditions by type and
status: the last condition of the list, which `kubectl get` shows, may no longer hold. While pods or
services are refused, the operator writes no status: only events show it.
"""

from collections.abc import Callable, Iterator

from gptddp.k8s.objects import Object, holds, is_local, queue_name, suspended
from gptddp.k8s.observe import job_causes, pod_causes, queue_causes, replaced_causes
from gptddp.k8s.observe.cause import Cause, in_order
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.queue import Queue

PENDING, RUNNING, RESTARTING, SUSPENDED = "Pending", "Running", "Restarting", "Suspended"
SUCCEEDED, FAILED, DELETING = "Succeeded", "Failed", "Deleting"
QUEUED = "Queued"  # suspended by Kueue, which will start it
FINAL = (SUCCEEDED, FAILED)


def state(job: Object, queue: Queue | None = None) -> str:
    """The job's state in one word, from the conditions that hold and from its queue."""
    if "deletionTimestamp" in job["metadata"]:
        return DELETING
    for kind in (FAILED, SUCCEEDED):
        if holds(job, kind):
            return kind
    if suspended(job):
        waits = not is_local(job) and (queue or queue_name(job))
        return QUEUED if waits and not (queue and queue.gone) else SUSPENDED
    for kind in (RESTARTING, RUNNING):
        if holds(job, kind):
            return kind
    return PENDING


Check = Callable[[Facts], Iterator[Cause]]
_LOST: tuple[Check, ...] = (pod_causes.lost,)  # also for a job that is to have no pods
_CHECKS: dict[str, tuple[Check, ...]] = {
    SUCCEEDED: (),
    FAILED: (job_causes.failed,),
    DELETING: (*_LOST, job_causes.deleting),
    SUSPENDED: (*_LOST, job_causes.suspended),
    QUEUED: (*_LOST, queue_causes.queued),
}
_RUNS: tuple[Check, ...] = (
    job_causes.refused,
    job_causes.no_operator,
    pod_causes.pods,
    replaced_causes.in_vain,
    replaced_causes.replaced,
    queue_causes.not_queued,
    job_causes.no_step,
    job_causes.left_out,
)


def causes(facts: Facts) -> list[Cause]:
    """The causes that keep the job, or some pods, from running: the most important first."""
    now = state(facts.job, facts.queue)
    found = in_order(it for check in _CHECKS.get(now, _RUNS) for it in check(facts))
    return found or ([] if now in _CHECKS else list(job_causes.starting(facts, now == PENDING)))


def why(facts: Facts) -> str:
    """The first cause as a sentence; "" if nothing is wrong."""
    return next((cause.sentence for cause in causes(facts)), "")
