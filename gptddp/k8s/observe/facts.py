"""What is known of a job at one moment, and small questions to the raw objects of the API."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Object = dict[str, Any]

_INDEX = "training.kubeflow.org/replica-index"
_ROLE = "training.kubeflow.org/replica-type"


@dataclass(frozen=True)
class Facts:
    """A PyTorchJob, its pods by role and index, events about them, and the time of the look."""

    job: Object
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    now: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])

    @property
    def missing(self) -> list[str]:
        """Names of the pods that the job wants and that do not exist."""
        there = {pod["metadata"]["name"] for pod in self.pods}
        wanted = [
            f"{self.name}-{role.lower()}-{index}"
            for role, spec in replica_specs(self.job).items()
            for index in range(int(spec.get("replicas", 1)))
        ]
        return [name for name in wanted if name not in there]

    def about(self, obj: Object, *reasons: str) -> list[Object]:
        """Events about this object, and not about an older one of its name: all, or of reasons."""
        meta = obj["metadata"]
        return [
            event for event in self.events
            if (not reasons or event.get("reason") in reasons)
            and event.get("involvedObject", {}).get("name") == meta["name"]
            and event["involvedObject"].get("uid", "") in ("", meta.get("uid", ""))
        ]  # fmt: skip


def replica_specs(job: Object) -> dict[str, Object]:
    specs: dict[str, Object] = job.get("spec", {}).get("pytorchReplicaSpecs") or {}
    return specs


def replicas(job: Object) -> int:
    """The pods that the job wants now."""
    return sum(int(spec.get("replicas", 1)) for spec in replica_specs(job).values())


def suspended(job: Object) -> bool:
    return bool((job.get("spec", {}).get("runPolicy") or {}).get("suspend"))


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
    """When an event happened last."""
    series = event.get("series") or {}
    for text in (series.get("lastObservedTime"), event.get("lastTimestamp"),
                 event.get("eventTime"), event.get("firstTimestamp")):  # fmt: skip
        if (at := seconds(text)) is not None:
            return at
    return 0.0


def place(pod: Object) -> tuple[str, int]:
    """Role and index of a pod: ("worker", 2)."""
    labels = pod["metadata"].get("labels") or {}
    role, _, index = pod["metadata"]["name"].rpartition("-")
    index = labels.get(_INDEX, index)
    return labels.get(_ROLE, role.rpartition("-")[2]), int(index) if index.isdigit() else 0


def short(pod: Object) -> str:
    """`w2` for worker 2."""
    role, index = place(pod)
    return f"{role[:1]}{index}"


def containers(pod: Object) -> Iterator[Object]:
    """The status of every container, init containers first."""
    status = pod.get("status") or {}
    yield from status.get("initContainerStatuses") or []
    yield from status.get("containerStatuses") or []


def ready(pod: Object) -> bool:
    """Does the pod run, with every container ready, and is it not on its way out?"""
    status = pod.get("status") or {}
    own = status.get("containerStatuses") or []
    running = status.get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
    return running and bool(own) and all(c.get("ready") for c in own)


def ended(pod: Object) -> bool:
    """Will none of the pod's containers run again?"""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def condition(obj: Object, kind: str) -> Object | None:
    """The condition of a type; its status may be anything."""
    found = (c for c in (obj.get("status") or {}).get("conditions") or [] if c["type"] == kind)
    return next(found, None)


def holds(obj: Object, kind: str) -> bool:
    """Is the condition of this type True?"""
    return (condition(obj, kind) or {}).get("status") == "True"
