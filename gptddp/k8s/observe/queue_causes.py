"""A job that waits in a queue of Kueue, was taken out of it, or runs though it should wait.

Kueue says why in the conditions of the job's Workload, in its own words; what is wrong with the
queue itself it says of the queue.
"""

import re
from collections.abc import Iterator

from gptddp.k8s.objects import (
    PRIORITY,
    QUEUE,
    Object,
    age_s,
    condition,
    holds,
    queue_name,
    seconds,
)
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.queue import Queue

NO_WORKLOAD_S = 15.0  # a working Kueue makes it within a second
_LABEL = f"metadata.labels[{QUEUE}]"
_PREFIX = re.compile(r"couldn't assign flavors to pod set \S+: ")
# What Kueue says of a job that does not fit: the cause, and its sentence.
_SAID = (
    (
        r"request > maximum capacity",
        "quota-too-small",
        "it asks for more than the whole quota of the ClusterQueue {of}, and will never start",
    ),
    (
        r"resource \S+ unavailable in ClusterQueue",
        "quota-none",
        "the ClusterQueue {of} has no quota at all for a resource of its pods",
    ),
    (
        r"doesn't match ClusterQueue selector",
        "queue-closed",
        "the ClusterQueue {of} takes no jobs of this namespace (spec.namespaceSelector)",
    ),
    (
        r"^ClusterQueue \S+ is (inactive|stopped|terminating)",
        "cluster-queue-inactive",
        "the ClusterQueue {of} takes no jobs",
    ),
    (
        r"LimitRange constraints",
        "limit-range",
        "a LimitRange of its namespace keeps it from the ClusterQueue {of}",
    ),
    (
        r"topology .* (allow|fit)|TopologyAwareScheduling|requested level",
        "queue-topology",
        "no nodes of the ClusterQueue {of} fit the topology that it asks for",
    ),
    (
        r"untolerated taint|doesn't match node affinity",
        "queue-flavor",
        "its pods may not run on the nodes of the ClusterQueue {of}",
    ),
)

# What keeps a job from one flavor for good; another one may do.
_NOT_OF = (
    r"in flavor ([\w.-]+), request > maximum",
    r"untolerated taint .*? in flavor ([\w.-]+)",
    r"flavor ([\w.-]+) (?:doesn't match node affinity|not found)",
    r'Flavor "([\w.-]+)"',
)


def queued(facts: Facts) -> Iterator[Cause]:
    """What a job in a queue waits for."""
    queue = facts.queue
    if queue is None:  # nobody has asked
        queue = Queue(queue_name(facts.job))
        yield _cause(facts, queue, "queued", f"it waits in the queue {queue.name}")
    elif queue.unseen:
        text = f"it waits in the queue {queue.name}; for what is not to be seen: {queue.unseen}"
        yield _cause(facts, queue, "queued", text)
    elif queue.workload is None:
        yield _unmade(facts, queue)
    elif queue.admitted:
        yield from _admitted(facts, queue, queue.workload)
    else:
        yield _broken(facts, queue) or _waiting(facts, queue, queue.workload)


def taken_out(facts: Facts) -> Iterator[Cause]:
    """A job that no queue will start: it was taken out of it, or there is no Kueue."""
    queue = facts.queue
    if queue and queue.held:
        said = str((condition(queue.workload or {}, "Evicted") or {}).get("message", ""))
        why = re.search(r" due to (.*)", said)
        text = f"it was taken out of the queue {queue.name}{f' for {why[1]}' if why else ''}"
        yield _cause(facts, queue, "held", f"{text} (spec.active of its Workload)")
    elif queue and queue.given_up:
        text = f"Kueue could not start it when it was its turn, and tries no more: {queue.given_up}"
        yield _cause(facts, queue, "queue-given-up", text)
    elif queue and not queue.kueue:
        text = f"it is to wait in the queue {queue.name}, and the cluster has no Kueue ({_LABEL})"
        yield _cause(facts, queue, "no-kueue", text)


def not_queued(facts: Facts) -> Iterator[Cause]:
    """A job with a queue that runs, though no Kueue has admitted it."""
    queue = facts.queue
    known = queue is not None and queue.workload is None and not queue.unseen
    if not known or queue is None or age_s(facts.job, facts.now) < NO_WORKLOAD_S:
        return
    why = "the cluster has no Kueue"
    if queue.kueue:
        why = "Kueue has no Workload for it: is its integration kubeflow.org/pytorchjob on?"
    text = f"it runs outside of its queue {queue.name} and of any quota ({_LABEL}): {why}"
    yield _cause(facts, queue, "not-queued", text)


def _cause(facts: Facts, queue: Queue, id: str, text: str) -> Cause:
    names = {"queue": queue.name, "cluster_queue": queue.cluster_queue_name}
    return cause(facts, id, text, named={**names, "uid": str(facts.job["metadata"].get("uid", ""))})


def _unmade(facts: Facts, queue: Queue) -> Cause:
    """A job that Kueue has not put into its queue."""
    if name := queue.priority_missing:
        text = f"there is no WorkloadPriorityClass {name} (metadata.labels[{PRIORITY}])"
        return _cause(facts, queue, "queue-priority-missing", f"{text}: Kueue does not queue it")
    if facts.pods:
        text = f"it goes into the queue {queue.name} when its pods have ended"
        return _cause(facts, queue, "queued", text)
    if age_s(facts.job, facts.now) < NO_WORKLOAD_S:
        return _cause(facts, queue, "queued", f"it is on its way into the queue {queue.name}")
    named = (facts.job["metadata"].get("labels") or {}).get(PRIORITY)
    priority = f" Is there a WorkloadPriorityClass {named} (metadata.labels[{PRIORITY}])?"
    text = (
        f"Kueue has not put it into the queue {queue.name}: it has no Workload; is Kueue running,"
        f" and is its integration kubeflow.org/pytorchjob on?{priority if named else ''}"
    )
    return _cause(facts, queue, "no-workload", text)


def _admitted(facts: Facts, queue: Queue, workload: Object) -> Iterator[Cause]:
    """A job that has its quota."""
    of = queue.cluster_queue_name
    checks = (workload.get("status") or {}).get("admissionChecks") or []
    open_ = [] if holds(workload, "Admitted") else [it for it in checks if it["state"] != "Ready"]
    for check in open_:
        said = f": {check['message']}" if check.get("message") else ""
        text = (
            f"it has its quota in the ClusterQueue {of}, and the admission check "
            f"{check['name']} is {check['state']}{said}"
        )
        yield _cause(facts, queue, "admission-check", text)
    if not open_:
        text = f"it is admitted to the ClusterQueue {of}, and about to start"
        yield _cause(facts, queue, "queued", text)


def _broken(facts: Facts, queue: Queue) -> Cause | None:
    """What is wrong with the queue itself, as far as it may be seen."""
    local, of = queue.local_queue, queue.cluster_queue_name
    if not queue.name:
        text = f"it names no queue, and Kueue starts no job without one here (set {_LABEL})"
        return _cause(facts, queue, "local-queue-missing", text)
    if local is None:
        return None
    if not local:
        text = f"there is no LocalQueue {queue.name} in its namespace ({_LABEL})"
        return _cause(facts, queue, "local-queue-missing", text)
    policy = local["spec"].get("stopPolicy") or "None"
    if policy != "None":
        text = f"the LocalQueue {queue.name} is stopped (spec.stopPolicy: {policy})"
        return _cause(facts, queue, "local-queue-stopped", text)
    active = condition(local, "Active") or {}
    if queue.cluster_queue == {} or active.get("reason") == "ClusterQueueDoesNotExist":
        text = f"there is no ClusterQueue {of}, which the LocalQueue {queue.name} names"
        return _cause(facts, queue, "cluster-queue-missing", f"{text} (spec.clusterQueue)")
    if "deletionTimestamp" in (queue.cluster_queue or {}).get("metadata", {}):
        text = (
            f"the ClusterQueue {of} of the queue {queue.name} is being deleted, and takes no jobs"
        )
        return _cause(facts, queue, "cluster-queue-inactive", text)
    seen = condition(queue.cluster_queue or {}, "Active")
    if (seen or active).get("status") == "False":
        said = re.sub(r"^Can't [^:;]*[:;] ", "", str((seen or {}).get("message", ""))).rstrip(".")
        said = re.sub(r"^(?=is |references )", "it ", said)
        why = f": {said}" if said else "; why, is for those to see who may read ClusterQueues"
        text = f"the ClusterQueue {of} of the queue {queue.name} takes no jobs{why}"
        return _cause(facts, queue, "cluster-queue-inactive", text)
    return None


def _waiting(facts: Facts, queue: Queue, workload: Object) -> Cause:
    """A job that waits for its turn, or for others to end."""
    told = condition(workload, "QuotaReserved") or {}
    said = _PREFIX.sub("", str(told.get("message", ""))).rstrip(".")
    for pattern, id, text in () if _only_full(said) else _SAID:
        if re.search(pattern, said):
            sentence = text.format(of=queue.cluster_queue_name or f"of {queue.name}")
            return _cause(facts, queue, id, f"{sentence}: {said}")
    place = f"it waits in the queue {queue.name}{_place(queue)}"
    evicted = condition(workload, "Evicted") or {}
    if evicted.get("status") == "True":
        preempted = evicted.get("reason") == "Preempted"
        how = "preempted" if preempted else f"stopped by Kueue ({evicted.get('reason')})"
        by = str(evicted.get("message", "")).rstrip(".")
        if holds(workload, "QuotaReserved"):  # until its pods have committed a checkpoint
            place = f"it goes back into the queue {queue.name} when its pods have ended"
            said = ""
        place += _later(facts, workload)
        text = f"it was {how}, and {place}: {by}"
        text += f"; now {said}" if said not in ("", by) else ""
        return _cause(facts, queue, "queue-preempted" if preempted else "queue-evicted", text)
    return _cause(facts, queue, "queued", f"{place}: {said}" if said else place)


def _only_full(said: str) -> bool:
    """Is there a flavor with all that the job asks for, were it not for others that run there?"""
    full = set(re.findall(r"insufficient unused quota for \S+ in flavor ([\w.-]+)", said))
    return bool(full.difference(*(re.findall(pattern, said) for pattern in _NOT_OF)))


def _place(queue: Queue) -> str:
    if queue.ahead is None:
        return ""
    jobs = "job" if queue.ahead == 1 else "jobs"
    return f" with {queue.ahead} {jobs} before it" if queue.ahead else " and is the next"


def _later(facts: Facts, workload: Object) -> str:
    """When Kueue tries again, where it waits before that."""
    at = ((workload.get("status") or {}).get("requeueState") or {}).get("requeueAt")
    left_s = (seconds(at) or 0.0) - facts.now
    return f" again in {left_s:.0f} s" if left_s > 0 else ""
