"""Rows for `list`: the jobs of a namespace, or of all namespaces."""

import time
from typing import Any

from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, age_s, is_ready, queue_name, replica_specs, wanted_pods
from gptddp.k8s.observe import facts, queue, why
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.queue import Queue
from gptddp.k8s.render.companions import OURS

Row = dict[str, Any]


def rows(cluster: Cluster, everywhere: bool = False) -> list[Row]:
    """One row per job, sorted by namespace and name. Raises ClusterError."""
    jobs = cluster.find(JOB, OURS, everywhere=everywhere)
    pods = cluster.find("Pod", OURS, everywhere=everywhere)
    queues, now = queue.of_jobs(cluster, jobs, everywhere), time.time()
    found = []
    for job in jobs:
        uid = job["metadata"].get("uid")
        own = [pod for pod in pods if facts.owner(pod) == uid]
        found.append(_row(job, own, queues.get(str(uid)), now))
    return sorted(found, key=lambda row: (row["namespace"], row["name"]))


def _row(job: Object, pods: list[Object], waits: Queue | None, now: float) -> Row:
    """The columns of the table, and the fields that only `-o wide`, json and yaml show."""
    templates = [role.get("template") or {} for role in replica_specs(job).values()]
    containers = [c for it in templates for c in (it.get("spec") or {}).get("containers") or []]
    return {
        "namespace": job["metadata"].get("namespace", ""),
        "name": job["metadata"]["name"],
        "state": why.state(job, waits),
        "ready": sum(map(is_ready, pods)),
        "desired": wanted_pods(job),
        "age_s": round(age_s(job, now)),
        "queue": queue_name(job) or None,
        "nodes": sorted({n for pod in pods if (n := pod.get("spec", {}).get("nodeName"))}),
        "image": next((c.get("image") for c in containers if c.get("name") == CONTAINER), None),
    }
