"""The jobs of a namespace, or of all: once, or again whenever one changes."""

import time
from collections.abc import Iterator
from typing import Any

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, queue_name, replica_specs
from gptddp.k8s.observe import queue, status
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.watcher import Say, transient
from gptddp.k8s.render.companions import JOB_NAME, OURS

Row = dict[str, Any]
GONE = "Gone"
_POLL_S = 2.0  # all jobs and their pods are asked for each time
_AGEING = ("age_s",)  # of a row: no news


def rows(cluster: Cluster, everywhere: bool = False) -> list[Row]:
    """What `list` shows of each job, by namespace and name. Raises ClusterError."""
    jobs = cluster.find(JOB, OURS, everywhere=everywhere)
    pods = cluster.find("Pod", OURS, everywhere=everywhere)
    by_name = {(it["metadata"].get("namespace", ""), it["metadata"]["name"]): it for it in jobs}
    found = status.rows(jobs, pods, time.time(), queue.of_jobs(cluster, jobs, everywhere))
    return [row | _more(by_name[row["namespace"], row["name"]], pods) for row in found]


def _more(job: Object, pods: list[Object]) -> Row:
    """What only `-o wide` and programs get."""
    meta = job["metadata"]
    of = (meta.get("namespace"), meta["name"])
    own = [pod for pod in pods if _job_of(pod) == of]
    templates = [role.get("template") or {} for role in replica_specs(job).values()]
    containers = [c for it in templates for c in (it.get("spec") or {}).get("containers") or []]
    return {
        "queue": queue_name(job) or None,
        "nodes": sorted({n for pod in own if (n := pod.get("spec", {}).get("nodeName"))}),
        "image": next((c.get("image") for c in containers if c.get("name") == CONTAINER), None),
    }


def _job_of(pod: Object) -> tuple[str | None, str | None]:
    meta = pod["metadata"]
    return meta.get("namespace"), (meta.get("labels") or {}).get(JOB_NAME)


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
