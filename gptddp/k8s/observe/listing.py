"""The jobs of a namespace, or of all: once, or again whenever one changes."""

import time
from collections.abc import Iterator
from typing import Any

from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, age_s, is_ready, queue_name, replica_specs, wanted_pods
from gptddp.k8s.observe import queue, why
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.queue import Queue
from gptddp.k8s.observe.watcher import Say, Watcher
from gptddp.k8s.render.companions import OURS

Row = dict[str, Any]
GONE = "Gone"
_POLL_S = 2.0  # all jobs and their pods are asked for each time
_AGEING = ("age_s",)  # of a row: no news


def rows(cluster: Cluster, everywhere: bool = False) -> list[Row]:
    """What `list` shows of each job, by namespace and name. Raises ClusterError."""
    jobs = cluster.find(JOB, OURS, everywhere=everywhere)
    pods = cluster.find("Pod", OURS, everywhere=everywhere)
    queues, now = queue.of_jobs(cluster, jobs, everywhere), time.time()
    found = []
    for job in jobs:
        uid = job["metadata"].get("uid")
        own = [pod for pod in pods if uid in _owners(pod)]
        found.append(_row(job, own, queues.get(str(uid)), now))
    return sorted(found, key=lambda row: (row["namespace"], row["name"]))


def _owners(pod: Object) -> list[Any]:
    return [owner.get("uid") for owner in pod["metadata"].get("ownerReferences") or []]


def _row(job: Object, pods: list[Object], waits: Queue | None, now: float) -> Row:
    """The columns of a table, and what only `-o wide` and programs get."""
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


def watch(cluster: Cluster, say: Say, everywhere: bool = False) -> Iterator[list[Row]]:
    """All rows, then again and again those that have changed; the last of a job is `Gone`.

    Goes on through times without an API server. Raises ClusterError for what will not pass.
    """
    watcher = Watcher(lambda: rows(cluster, everywhere), say)
    known: dict[tuple[str, str], Row] | None = None
    while True:
        found = {(row["namespace"], row["name"]): row for row in watcher.poll()}
        old = known or {}
        gone = [row | {"state": GONE, "ready": 0} for key, row in old.items() if key not in found]
        news = [row for key, row in found.items() if _seen(row) != _seen(old.get(key))]
        if known is None or gone or news:
            yield [*gone, *news]
        known = found
        time.sleep(_POLL_S)


def _seen(row: Row | None) -> Row | None:
    return row and {key: value for key, value in row.items() if key not in _AGEING}
