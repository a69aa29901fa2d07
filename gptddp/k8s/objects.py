"""Kubernetes objects as plain dicts, as the API returns them, and small functions on them."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

Object = dict[str, Any]

QUEUE = "kueue.x-k8s.io/queue-name"  # labels of a job: its LocalQueue in Kueue
PRIORITY = "kueue.x-k8s.io/priority-class"  # and its WorkloadPriorityClass there
SUBMIT_LINE = "gptddp/submit"  # annotation of a job: the command line that created it
MANAGED = "app.kubernetes.io/managed-by=gptddp-k8s"
ROUTES = {  # kind: (API group and version, plural), as in a path
    "PyTorchJob": ("apis/kubeflow.org/v1", "pytorchjobs"),
    "Job": ("apis/batch/v1", "jobs"),
    "Pod": ("api/v1", "pods"),
    "Service": ("api/v1", "services"),
    "Secret": ("api/v1", "secrets"),
    "ConfigMap": ("api/v1", "configmaps"),
    "Event": ("api/v1", "events"),
    "ServiceAccount": ("api/v1", "serviceaccounts"),
    "PersistentVolumeClaim": ("api/v1", "persistentvolumeclaims"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "Workload": ("apis/kueue.x-k8s.io/v1beta2", "workloads"),
    "LocalQueue": ("apis/kueue.x-k8s.io/v1beta2", "localqueues"),
    "WorkloadPriorityClass": ("apis/kueue.x-k8s.io/v1beta2", "workloadpriorityclasses"),
}
CLUSTER_WIDE = ("WorkloadPriorityClass",)
_INDEX = "training.kubeflow.org/replica-index"
_ROLE = "training.kubeflow.org/replica-type"


# -- a PyTorchJob --------------------------------------------------------------------------------


def ours(name: str) -> str:
    """The label selector of everything that belongs to the job of this name."""
    return f"app.kubernetes.io/instance={name},{MANAGED}"


def is_ours(live: Object, name: str) -> bool:
    labels = live["metadata"].get("labels") or {}
    return all(labels.get(k) == v for k, v in (pair.split("=") for pair in ours(name).split(",")))


def replica_specs(job: Object) -> dict[str, Object]:
    """The job's entries by role, Master and Worker: replicas, restartPolicy, template."""
    specs: dict[str, Object] = job["spec"]["pytorchReplicaSpecs"]
    return specs


def worker_spec(job: Object) -> Object:
    """The entry of the job's workers, or of the Master if the job has no workers."""
    specs = replica_specs(job)
    return specs["Worker"] if "Worker" in specs else specs["Master"]


def worker_pod_spec(job: Object) -> Object:
    """The spec of each worker's pod."""
    spec: Object = worker_spec(job)["template"]["spec"]
    return spec


def replica_count(replica_spec: Object) -> int:
    """The number of pods that one entry requests."""
    return int(replica_spec.get("replicas", 1))


def wanted_pods(job: Object) -> int:
    """The number of pods that the job requests now, in all roles."""
    return sum(map(replica_count, replica_specs(job).values()))


def ranks_per_pod(job: Object) -> int | None:
    """The number of ranks per pod; None if torchrun decides it, as for `auto`."""
    text = str(job["spec"].get("nprocPerNode") or 1)
    return int(text) if text.isdigit() else None


def suspended(job: Object) -> bool:
    return bool((job.get("spec", {}).get("runPolicy") or {}).get("suspend"))


def is_local(job: Object) -> bool:
    """Is it a local job, without a cluster?"""
    return bool((job.get("status") or {}).get("local"))


def queue_name(job: Object) -> str:
    """The job's queue of Kueue; "": none."""
    return str((job["metadata"].get("labels") or {}).get(QUEUE) or "")


def volume_claims(pod_spec: Object) -> Iterator[tuple[str, str]]:
    """(volume, PersistentVolumeClaim) of a pod's spec."""
    for volume in pod_spec.get("volumes") or []:
        if "persistentVolumeClaim" in volume:
            yield volume["name"], volume["persistentVolumeClaim"]["claimName"]


def claim_at(pod_spec: Object, path: str) -> str:
    """The claim at this path in a pod's first container; "": none."""
    containers = pod_spec.get("containers") or [{}]
    mounts = {it["mountPath"]: it["name"] for it in containers[0].get("volumeMounts") or []}
    return dict(volume_claims(pod_spec)).get(mounts.get(path, ""), "")


def argument(pod_spec: Object, option: str) -> str:
    """The value of an option of the first container's program; "": none."""
    args = (pod_spec.get("containers") or [{}])[0].get("args") or []
    return str(args[args.index(option) + 1]) if option in args[:-1] else ""


# -- a pod ---------------------------------------------------------------------------------------


def role_and_index(pod: Object) -> tuple[str, int]:
    """("worker", 2)."""
    labels = pod["metadata"].get("labels") or {}
    role, _, index = pod["metadata"]["name"].rpartition("-")
    index = labels.get(_INDEX, index)
    return labels.get(_ROLE, role.rpartition("-")[2]), int(index) if index.isdigit() else 0


def short_name(pod: Object) -> str:
    """`w2` for worker 2."""
    role, index = role_and_index(pod)
    return f"{role[:1]}{index}"


def container_statuses(pod: Object) -> Iterator[Object]:
    """The status of every container, init containers first."""
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def is_ready(pod: Object) -> bool:
    """Does the pod run with every container ready, and is not being deleted?"""
    status = pod.get("status") or {}
    own = status.get("containerStatuses") or []
    running = status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    return running and bool(own) and all(c.get("ready") for c in own)


def has_ended(pod: Object) -> bool:
    """Will none of the pod's containers run again?"""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def has_log(pod: Object) -> bool:
    """Has any container of the pod started?"""
    states = [c.get(key) or {} for c in container_statuses(pod) for key in ("state", "lastState")]
    return any("running" in state or "terminated" in state for state in states)


def started(pod: Object) -> float:
    """Start time of the pod's newest running container, in unix seconds; 0: none runs."""
    states = [(c.get("state") or {}).get("running") or {} for c in container_statuses(pod)]
    return max((seconds(it.get("startedAt")) or 0.0 for it in states), default=0.0)


# -- any object ----------------------------------------------------------------------------------


def resource(kind: str, name: str) -> str:
    """kubectl's name for an object, such as `pytorchjob.kubeflow.org/demo`."""
    _, *group = ROUTES[kind][0].split("/")[:-1]  # of api/v1 or apis/GROUP/VERSION
    return ".".join([kind.lower(), *group]) + f"/{name}"


def condition(obj: Object, kind: str) -> Object | None:
    """The condition of a type, with any status."""
    found = (c for c in (obj.get("status") or {}).get("conditions") or [] if c["type"] == kind)
    return next(found, None)


def holds(obj: Object, kind: str) -> bool:
    """Is the condition of this type True?"""
    return (condition(obj, kind) or {}).get("status") == "True"


def seconds(text: str | None) -> float | None:
    """A time of the API as seconds since the epoch."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None


def age_s(obj: Object, now: float) -> float:
    created = seconds(obj["metadata"].get("creationTimestamp"))
    return max(0.0, now - created) if created else 0.0


def event_time(event: Mapping[str, Any]) -> float:
    """Time of an event's last occurrence, in seconds since the epoch."""
    series = event.get("series") or {}
    keys = ("lastTimestamp", "eventTime", "firstTimestamp")
    for text in (series.get("lastObservedTime"), *map(event.get, keys)):
        if (at := seconds(text)) is not None:
            return at
    return 0.0
