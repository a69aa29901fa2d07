"""A job's state, and why it does not run: conditions, pods and events -> one sentence and causes.

Pure functions over the objects as the API gives them. The state comes from conditions by type and
status: the last of the list, which `kubectl get` shows, may be one that no longer holds. The
operator writes no status at all while pods or services are refused: that is in events only.
"""

from collections.abc import Callable, Iterator

from gptddp.k8s.objects import Object, holds, is_local, queue_name, suspended
from gptddp.k8s.observe import (
    container_causes,
    job_causes,
    node_causes,
    queue_causes,
    replaced_causes,
    scheduling_causes,
    volume_causes,
)
from gptddp.k8s.observe.cause import Cause, merged
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.queue import Queue

PENDING, RUNNING, RESTARTING, SUSPENDED = "Pending", "Running", "Restarting", "Suspended"
SUCCEEDED, FAILED, DELETING, UNKNOWN = "Succeeded", "Failed", "Deleting", "Unknown"
QUEUED = "Queued"  # suspended by Kueue, which lets it go on
FINAL = (SUCCEEDED, FAILED)


def state(job: Object, queue: Queue | None = None) -> str:
    """One word for the job, by what holds now; with what is known of its queue."""
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
    known = (job.get("status") or {}).get("conditions") or []
    named = {"Created", RUNNING, RESTARTING, SUSPENDED, *FINAL}
    return PENDING if not known or any(c["type"] in named for c in known) else UNKNOWN


def causes(facts: Facts) -> list[Cause]:
    """What keeps the job, or some of its pods, from running: the most important first."""
    now = state(facts.job, facts.queue)
    if now == SUCCEEDED:
        return []
    if now == DELETING:
        stay = [*node_causes.node_lost(facts), *node_causes.not_let_go(facts)]
        return [*stay, *job_causes.deleting(facts)]
    if now == FAILED:
        return [job_causes.failed(facts)]
    if now == SUSPENDED:
        held = list(queue_causes.taken_out(facts)) or job_causes.suspended(facts)
        return [*node_causes.node_lost(facts), *held]
    if now == QUEUED:
        return [*node_causes.node_lost(facts), *queue_causes.queued(facts)]
    found = merged([cause for check in _CHECKS for cause in check(facts)])
    if not found and now == PENDING:
        found = merged(list(job_causes.starting(facts)))
    return found or [*job_causes.no_step(facts), *job_causes.left_out(facts)]


def why(facts: Facts) -> str:
    """The first cause as a sentence; empty where nothing is wrong."""
    return next((cause.sentence for cause in causes(facts)), "")


Check = Callable[[Facts], Iterator[Cause]]
_CHECKS: tuple[Check, ...] = (  # in the order of importance
    job_causes.refused,
    replaced_causes.in_vain,
    scheduling_causes.unschedulable,
    node_causes.not_let_go,
    container_causes.waiting,
    node_causes.ended_by_node,
    container_causes.sidecar,
    container_causes.crashed,
    node_causes.taken_away,
    node_causes.node_lost,
    node_causes.unattended,
    volume_causes.volume,
    node_causes.sandbox,
    container_causes.probes,
    container_causes.gated,
    container_causes.pulling,
    container_causes.initialising,
    replaced_causes.replaced,
    job_causes.no_operator,
    queue_causes.not_queued,
)
