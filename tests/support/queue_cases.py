"""Kueue's own messages about jobs in its queues, and the cause of each."""

from support.api_objects import JOB_UID, at, job, pod

from gptddp.k8s.objects import seconds
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.queue import Queue

NOW = seconds(at(0, minute=1))
SOON = seconds(at(14))  # Kueue may still make a Workload
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
MORE = "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor any"
ADMITTED = [("QuotaReserved", "True", "QuotaReserved", ""), ("Admitted", "True", "Admitted", "")]
CONFLICT = ("Finished", "True", "FailedToStart", "conflict for annotations: conflict for key=k")
PREEMPTED = ("Evicted", "True", "Preempted", "Preempted to accommodate a workload")
DEACTIVATED = ("Evicted", "True", "Deactivated", "exceeding the maximum execution time")
STOPPED = ("Evicted", "True", "ClusterQueueStopped", "The ClusterQueue is stopped")


def queued_job(*, suspend=True, **labels):
    """A job of the queue `team`, as Kueue has it: suspended."""
    made = job("Created", suspend=suspend)
    made["metadata"]["labels"] |= {QUEUE: "team", **labels}
    return made


def workload(*conditions, active=True, **status):
    """The Workload of the job `demo`; conditions are (type, status, reason, message)."""
    meta = {"name": "pytorchjob-demo-1a2b3", "labels": {"kueue.x-k8s.io/job-uid": JOB_UID}}
    keys = ("type", "status", "reason", "message")
    return {
        "kind": "Workload",
        "metadata": {**meta, "creationTimestamp": at(2)},
        "spec": {"active": active, "queueName": "team"},
        "status": {"conditions": [dict(zip(keys, it, strict=True)) for it in conditions], **status},
    }


def pending(message):
    return ("QuotaReserved", "False", "Pending", message)


def local_queue(stop="None", active="True", reason="Ready"):
    told = {"type": "Active", "status": active, "reason": reason, "message": "c"}
    return {
        "kind": "LocalQueue",
        "metadata": {"name": "team"},
        "spec": {"clusterQueue": "gpus", "stopPolicy": stop},
        "status": {"conditions": [told]},
    }


def facts(made=None, *, made_job=None, pods=(), now=NOW, name="team", **known):
    """A queued job with this Workload, and what else is known of its queue."""
    queue = Queue(name, workload=made, **known)
    return Facts(made_job or queued_job(), pods, (), now, queue=queue)


def runs(**known):
    """The job runs with all of its pods, but Kueue has not admitted it."""
    return facts(made_job=queued_job(suspend=False), pods=[pod(n) for n in range(4)], **known)


QUEUE_CASES = [
    ("queued", facts(workload(pending(MORE))), f"it waits in the queue team; Pending: {MORE}; see"),
    ("queued", facts(workload()), "it waits in the queue team; see"),
    ("queued", facts(workload(*ADMITTED)), "it has its quota in the queue team, and has not"),
    ("queued", facts(workload(pending(MORE), PREEMPTED)),
     f"in the queue team; Preempted: Preempted to accommodate a workload; Pending: {MORE}; see"),
    ("queued", facts(workload(pending(PREEMPTED[3]), PREEMPTED)),
     f"it waits in the queue team; Preempted: {PREEMPTED[3]}; see"),
    ("queued", facts(workload(pending(MORE), DEACTIVATED)), f"queue team; Pending: {MORE}; see"),
    ("queued", facts(workload(pending(MORE), STOPPED)), f"queue team; Pending: {MORE}; see"),
    ("queued", facts(workload(*ADMITTED, PREEMPTED), pods=[pod(0)]), "team; Preempted: Preempted"),
    ("queued", facts(workload(ADMITTED[0], ("Admitted", "False", "Waiting", "for checks"))),
     "not started yet; Waiting: for checks"),
    ("queued", facts(workload(pending("LocalQueue  doesn't exist")), name=""),
     "it names no queue (metadata.labels[kueue.x-k8s.io/queue-name]); Pending: LocalQueue"),
    ("queued", facts(now=SOON), "it waits in the queue team"),
    ("queued", facts(pods=[pod(0)]), "it waits in the queue team"),
    ("queued", facts(unseen="no right"), "queue team; its Workload cannot be read: no right"),
    ("held", facts(workload(active=False)), "out of the queue team (spec.active of its Workload)"),
    ("held", facts(workload(DEACTIVATED, active=False)), "; Deactivated: exceeding the maximum"),
    ("held", facts(workload(*ADMITTED, CONFLICT)), "has given up: conflict for annotations"),
    ("not-queued", facts(), "Kueue has no Workload for it in the queue team"),
    ("not-queued", facts(made_job=queued_job(**{PRIORITY: "high"})),
     "is there a WorkloadPriorityClass high (metadata.labels[kueue.x-k8s.io/priority-class])?"),
    ("not-queued", runs(), "it runs outside of its queue team and of any quota: Kueue has no Work"),
    ("not-queued", runs(kueue=False), "of any quota: the cluster has no Kueue"),
    ("no-kueue", facts(kueue=False), "but the cluster has no Kueue"),
]  # fmt: skip
