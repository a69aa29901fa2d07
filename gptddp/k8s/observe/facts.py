"""What is known of a job at one moment: the PyTorchJob, its pods, and the events about them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import (
    Object,
    holds,
    is_ready,
    replica_count,
    replica_specs,
    role_and_index,
)
from gptddp.k8s.render.companions import JOB_NAME

_MOST_PODS = 5  # of those that are not ready: whose events are asked for


@dataclass(frozen=True)
class Facts:
    """A PyTorchJob, its pods by role and index, events about them, and when they were fetched."""

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
            for index in range(replica_count(spec))
        ]
        return [name for name in wanted if name not in there]

    def about(self, obj: Object, *reasons: str) -> list[Object]:
        """Events about this very object, not an older one of its name; all, or of these reasons."""
        meta = obj["metadata"]
        return [
            event
            for event in self.events
            if (not reasons or event.get("reason") in reasons)
            and event.get("involvedObject", {}).get("name") == meta["name"]
            and event["involvedObject"].get("uid", "") in ("", meta.get("uid", ""))
        ]


def fetch(cluster: Cluster, name: str) -> Facts | None:
    """The job, its pods, and the events about it and some of its pods that are not ready.

    None if there is no such job. Raises ClusterError.
    """
    job = cluster.get(JOB, name)
    if job is None:
        return None
    pods = pods_of(cluster, job)
    not_ready = [pod["metadata"]["name"] for pod in pods if not is_ready(pod)]
    abouts = [] if holds(job, "Succeeded") else [name, *not_ready[:_MOST_PODS]]
    told = [event for about in abouts for event in cluster.events(about)]
    return Facts(job, pods, told)


def pods_of(cluster: Cluster, job: Object) -> list[Object]:
    """The job's pods by role and index; those of an older job of its name are left out."""
    uid = job["metadata"].get("uid")
    pods = cluster.find("Pod", f"{JOB_NAME}={job['metadata']['name']}")
    return sorted((pod for pod in pods if _owner(pod) in (None, uid)), key=role_and_index)


def _owner(pod: Object) -> str | None:
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(o["uid"]) for o in owners if o.get("controller")), None)
