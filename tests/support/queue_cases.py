"""What Kueue says of jobs in its queues, as version 0.14 does, and the cause that it is."""

from support.api_objects import JOB_UID, at, job, pod

from gptddp.k8s.objects import seconds
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.queue import Queue

NOW = seconds(at(0, minute=1))
QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
POD_SET = "couldn't assign flavors to pod set worker: "
MORE = "insufficient unused quota for cpu in flavor any, 500m more needed"
WHOLE = "insufficient quota for cpu in flavor any, request > maximum capacity (2 > 1)"
PREEMPTED = "Preempted to accommodate a workload (UID: u, JobUID: v) due to prioritization"
ADMITTED = [("QuotaReserved", "True", "QuotaReserved", ""), ("Admitted", "True", "Admitted", "")]


def queued_job(*, suspend=True, **labels):
    """A job of the queue `team`, as Kueue has it: suspended."""
    return job("Created", suspend=suspend, labels={QUEUE: "team", **labels})


def condition(kind, status, reason, message=""):
    return {"type": kind, "status": status, "reason": reason, "message": message}


def workload(*conditions, active=True, **status):
    """The Workload of the job `demo`; conditions are (type, status, reason, message)."""
    meta = {"name": "pytorchjob-demo-1a2b3", "labels": {"kueue.x-k8s.io/job-uid": JOB_UID}}
    return {
        "kind": "Workload",
        "metadata": {**meta, "creationTimestamp": at(2)},
        "spec": {"active": active, "queueName": "team"},
        "status": {"conditions": [condition(*c) for c in conditions], **status},
    }


def pending(message, **status):
    return workload(("QuotaReserved", "False", "Pending", message), **status)


def local_queue(stop="None", active="True", reason="Ready"):
    return {
        "kind": "LocalQueue",
        "metadata": {"name": "team"},
        "spec": {"clusterQueue": "gpus", "stopPolicy": stop},
        "status": {"conditions": [condition("Active", active, reason, "c")]},
    }


def cluster_queue(active="True", message=""):
    conditions = [condition("Active", active, "x", message)]
    return {"metadata": {"name": "gpus"}, "status": {"conditions": conditions}}


def facts(made=None, *, made_job=None, pods=(), now=NOW, **known):
    """A queued job with this Workload, and what else is known of its queue."""
    queue = Queue("team", workload=made, **known)
    return Facts(made_job or queued_job(), pods, (), now, queue=queue)


def seen(made, **known):
    """The same where the user sees the queues too."""
    return facts(made, **{"local_queue": local_queue(), "cluster_queue": cluster_queue(), **known})


EVICTED = ("Evicted", "True", "Preempted", PREEMPTED)
TIMEOUT = ("Evicted", "True", "PodsReadyTimeout", "Exceeded the PodsReady timeout")
DEACTIVATED = (
    "Evicted", "True", "Deactivated",
    "The workload is deactivated due to exceeding the maximum execution time",
)  # fmt: skip
MISSING_FLAVOR = "Can't admit new workloads: references missing ResourceFlavor(s): h100."
CONFLICT = (
    "Finished", "True", "FailedToStart",
    "invalid admission check PodSetUpdate: conflict for annotations: conflict for key=k",
)  # fmt: skip
GOING = {"metadata": {"name": "gpus", "deletionTimestamp": at(3)}}
ENDING = "Can't admit new workloads; clusterQueue is terminating"
SPOT = "insufficient quota for cpu in flavor spot, request > maximum capacity (2 > 1)"
TAINT = "untolerated taint {spot true NoSchedule <nil>} in flavor spot"
GATE = [
    {"name": "prov", "state": "Pending", "message": "no nodes yet", "lastTransitionTime": at(3)}
]
LATE = seconds(at(0, minute=0)) + 14

QUEUE_CASES = [
    ("queued", facts(pending(POD_SET + MORE)), f"waits in the queue team: {MORE}"),
    ("queued", seen(pending(POD_SET + MORE), ahead=2), "with 2 jobs before it: insufficient"),
    ("queued", seen(pending(POD_SET + MORE), ahead=1), "with 1 job before it"),
    ("queued", seen(pending(POD_SET + MORE), ahead=0), "team and is the next"),
    ("queued", facts(workload()), "it waits in the queue team"),
    # of two flavors one would do, and is full
    ("queued", seen(pending(f"{POD_SET}{SPOT}, {MORE}")), f"queue team: {SPOT}, {MORE}"),
    ("queued", seen(pending(f"{POD_SET}{MORE}, {TAINT}")), f"queue team: {MORE}, {TAINT}"),
    ("quota-too-small", seen(pending(f"{POD_SET}{SPOT}, {WHOLE}")), "and will never start"),
    ("quota-too-small", seen(pending(f"{POD_SET}{MORE}, {WHOLE}")), "and will never start"),
    ("queued", facts(workload(*ADMITTED)), "about to start"),
    ("queued", facts(now=LATE), "on its way into the queue team"),
    ("queued", facts(pods=[pod(0)]), "when its pods have ended"),
    ("queued", Facts(queued_job(), [], (), NOW, queue=Queue("team", unseen="no right")),
     "for what is not to be seen: no right"),
    ("queue-preempted", seen(workload(("QuotaReserved", "False", "Pending", MORE), EVICTED)),
     "it was preempted, and it waits in the queue team: Preempted to accommodate"),
    # its pods still commit a checkpoint
    ("queue-preempted", seen(workload(*ADMITTED, EVICTED), pods=[pod(0)]),
     "and it goes back into the queue team when its pods have ended: Preempted to"),
    (
        "queue-evicted",
        seen(workload(("QuotaReserved", "False", "Pending", MORE), TIMEOUT,
                      requeueState={"requeueAt": at(30, minute=1)})),
        "stopped by Kueue (PodsReadyTimeout), and it waits in the queue team again in 30 s",
    ),
    ("admission-check", facts(workload(ADMITTED[0], admissionChecks=GATE,
                                       admission={"clusterQueue": "gpus"})),
     "in the ClusterQueue gpus, and the admission check prov is Pending: no nodes yet"),
    ("quota-too-small", seen(pending(POD_SET + WHOLE)),
     "the whole quota of the ClusterQueue gpus, and will never start: insufficient quota"),
    ("quota-none", seen(pending(f"{POD_SET}resource nvidia.com/gpu unavailable in ClusterQueue")),
     "no quota at all for a resource of its pods: resource nvidia.com/gpu unavailable"),
    ("queue-closed", seen(pending("Workload namespace doesn't match ClusterQueue selector")),
     "spec.namespaceSelector"),
    ("limit-range", seen(pending("resources didn't satisfy LimitRange constraints: cpu is above")),
     "a LimitRange of its namespace keeps it from the ClusterQueue gpus: resources didn't"),
    ("queue-topology", seen(pending(f'{POD_SET}topology "racks" allows to fit only 1 out of 2')),
     "allows to fit only 1 out of 2"),
    ("queue-topology", seen(pending(f'{POD_SET}Flavor "any" does not support '
                                    "TopologyAwareScheduling")), "does not support"),
    ("queue-flavor", seen(pending(f"{POD_SET}untolerated taint {{gpu}} in flavor any")),
     "may not run on the nodes of the ClusterQueue gpus"),
    ("local-queue-missing", facts(pending("LocalQueue team doesn't exist"), local_queue={}),
     "there is no LocalQueue team in its namespace (metadata.labels[kueue.x-k8s.io/queue-name])"),
    ("local-queue-stopped", facts(pending("LocalQueue team is inactive"),
                                  local_queue=local_queue("Hold")), "(spec.stopPolicy: Hold)"),
    ("cluster-queue-missing", facts(pending("ClusterQueue gpus doesn't exist"), cluster_queue={},
                                    local_queue=local_queue()), "no ClusterQueue gpus, which"),
    ("cluster-queue-missing",  # to somebody who may not see ClusterQueues
     facts(pending(""), local_queue=local_queue("None", "False", "ClusterQueueDoesNotExist")),
     "no ClusterQueue gpus"),
    ("cluster-queue-inactive", seen(pending("ClusterQueue gpus is inactive"),
                                    cluster_queue=cluster_queue("False", MISSING_FLAVOR)),
     "takes no jobs: it references missing ResourceFlavor(s): h100"),
    ("cluster-queue-inactive",
     facts(pending(""), local_queue=local_queue("None", "False", "ClusterQueueIsInactive")),
     "takes no jobs; why, is for those to see who may read ClusterQueues"),
    ("cluster-queue-inactive", seen(pending(""), cluster_queue=cluster_queue("False", ENDING)),
     "takes no jobs: clusterQueue is terminating"),
    ("queue-priority-missing", facts(priority_missing="high"),
     "no WorkloadPriorityClass high (metadata.labels[kueue.x-k8s.io/priority-class])"),
    # who may not see the ClusterQueue
    ("cluster-queue-inactive", facts(pending("ClusterQueue gpus is inactive"),
                                     local_queue=local_queue()), "ClusterQueue gpus takes no jobs"),
    ("cluster-queue-inactive", seen(pending("ClusterQueue gpus is inactive"),
                                    cluster_queue=GOING), "is being deleted, and takes no jobs"),
    ("queue-given-up", facts(workload(*ADMITTED, CONFLICT)),
     "tries no more: invalid admission check PodSetUpdate: conflict for annotations"),
    ("local-queue-missing", Facts(job("Created", suspend=True), [], (), NOW,
                                  queue=Queue("", workload=pending("LocalQueue  doesn't exist"))),
     "it names no queue, and Kueue starts no job without one here"),
    ("held", facts(workload(active=False)),
     "taken out of the queue team (spec.active of its Workload)"),
    ("held", facts(workload(DEACTIVATED, active=False)), "for exceeding the maximum execution"),
    ("no-workload", facts(), "it has no Workload; is Kueue running"),
    ("no-workload", facts(made_job=queued_job(**{PRIORITY: "high"})),  # which may not be seen
     "Is there a WorkloadPriorityClass high (metadata.labels[kueue.x-k8s.io/priority-class])?"),
    ("no-kueue", Facts(queued_job(), [], (), NOW, queue=Queue("team", kueue=False)),
     "the cluster has no Kueue"),
    ("not-queued", facts(made_job=queued_job(suspend=False), pods=[pod(n) for n in range(4)]),
     "integration kubeflow.org/pytorchjob on?"),
    ("not-queued", Facts(queued_job(suspend=False), [pod(n) for n in range(4)], (), NOW,
                         queue=Queue("team", kueue=False)), "the cluster has no Kueue"),
]  # fmt: skip
