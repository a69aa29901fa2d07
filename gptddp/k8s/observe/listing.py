"""The jobs of a namespace, or of all: once, or again whenever one changes."""

import time
from collections.abc import Iterator
from typing import Any

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, age_s, is_ready, queue_name, replica_specs, wanted_pods
from gptddp.k8s.observe import queue, why
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.queue import Queue
from gptddp.k8s.observe.watcher import Say, transient
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

    Goes on through times without an API server. Raises ClusterError at the first look, and for
    what will not pass.
    """
    known: dict[tuple[str, str], Row] = {}
    first, away = True, False
    while True:
        try:
            found = {(row["namespace"], row["name"]): row for row in rows(cluster, everywhere)}
        except ClusterError as error:
            if first or not transient(error):
                raise
            if not away:
                say(f"the API server does not answer, trying on: {error}")
            away = True
        else:
            if away:
                say("the API server answers again")
            gone = [
                row | {"state": GONE, "ready": 0} for key, row in known.items() if key not in found
            ]
            news = [row for key, row in found.items() if _seen(row) != _seen(known.get(key))]
            if first or gone or news:
                yield [*gone, *news]
            known, first, away = found, False, False
        time.sleep(_POLL_S)


def _seen(row: Row | None) -> Row | None:
    return row and {key: value for key, value in row.items() if key not in _AGEING}
