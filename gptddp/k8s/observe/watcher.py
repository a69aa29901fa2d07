"""Looking at a job on a cluster: once, or again and again while the API server comes and goes."""

import time
from collections.abc import Callable

from gptddp.k8s.cli.command import note
from gptddp.k8s.cluster import JOB, Cluster, ClusterError
from gptddp.k8s.observe.facts import Facts, Object, holds, place, ready
from gptddp.k8s.render.companions import JOB_NAME

OURS = "app.kubernetes.io/name=gptddp"
EVERY_S = 1.0
_MOST_PODS = 5  # of those that are not ready: whose events are asked for


def look(cluster: Cluster, name: str) -> Facts | None:
    """The job, its pods, and the events about it and some of its pods that are not ready.

    None if there is no such job. Raises ClusterError.
    """
    job = cluster.get(JOB, name)
    if job is None:
        return None
    pods = pods_of(cluster, job)
    troubled = [pod["metadata"]["name"] for pod in pods if not ready(pod)]
    abouts = [] if holds(job, "Succeeded") else [name, *troubled[:_MOST_PODS]]
    told = [event for about in abouts for event in cluster.events(about)]
    return Facts(job, pods, told)


def pods_of(cluster: Cluster, job: Object) -> list[Object]:
    """The job's pods by role and index; those of an older job of its name are left out."""
    uid = job["metadata"].get("uid")
    pods = cluster.find("Pod", f"{JOB_NAME}={job['metadata']['name']}")
    return sorted((pod for pod in pods if _owner(pod) in (None, uid)), key=place)


def _owner(pod: Object) -> str | None:
    owners = pod["metadata"].get("ownerReferences") or []
    return next((str(o["uid"]) for o in owners if o.get("controller")), None)


class Watcher:
    """Looks at one job until it gets an answer; says once that the API server is away."""

    def __init__(self, cluster: Cluster, name: str, say: Callable[[str], None] = note) -> None:
        self.cluster, self.name, self.say = cluster, name, say
        self._answered = False

    def look(self, end: float | None = None) -> Facts | None:
        """What there is now, None if there is no job; waits for an API server that was there.

        Raises TimeoutError at `end` (of time.monotonic), ClusterError for what will not pass, and
        for anything at the first look.
        """
        failures = 0
        while True:
            try:
                facts = look(self.cluster, self.name)
            except ClusterError as error:
                if not self._answered or not passing(error):
                    raise
                failures += 1
                if failures == 2:  # one alone may be a connection that had gone stale
                    self.say(f"{self.name}: the API server does not answer, trying on: {error}")
            else:
                self._answered = True
                if failures > 1:
                    self.say(f"{self.name}: the API server answers again")
                return facts
            if end is not None and time.monotonic() >= end:
                raise TimeoutError
            time.sleep(EVERY_S)


def passing(error: ClusterError) -> bool:
    """Can the same request succeed a little later?"""
    return error.status in (0, 408, 429) or error.status >= 500
