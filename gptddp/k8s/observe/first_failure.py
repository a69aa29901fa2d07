"""The container that failed a job: the others end because of it, and later."""

from typing import NamedTuple

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object, container_statuses
from gptddp.k8s.observe import facts, why
from gptddp.k8s.observe.container_causes import ending_order, how_it_ended
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.logs import Write, show
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.watcher import Say


class Failure(NamedTuple):
    """A pod, how its container ended, and whether another one has been started in it since."""

    pod: Object
    terminated: Object
    previous: bool


def find(found: Facts) -> Failure | None:
    """The first container with an error of its own, or that was killed if none has one."""
    ends = []
    for pod in found.pods:
        for status in container_statuses(pod):
            for key in ("state", "lastState"):
                ended = (status.get(key) or {}).get("terminated") or {}
                if int(ended.get("exitCode") or 0) and status.get("name") == CONTAINER:
                    failure = Failure(pod, ended, key == "lastState")
                    ends.append((ending_order(ended), failure))
    return min(ends, key=lambda end: end[0])[1] if ends else None


def show_log(
    cluster: Cluster,
    name: str,
    write: Write,
    say: Say,
    *,
    tail: int | None = None,
    since_s: float | None = None,
) -> None:
    """Write the log of the container that failed first, and say how it ended.

    Raises NotFoundError and ClusterError.
    """
    found = facts.of_job(cluster, name)
    failure = find(found)
    if failure is None:
        reason = why.why(found)
        told = f": {reason}" if reason else ""
        say(f"{name} is {why.state(found.job)}, and no pod that is there has failed{told}")
        return
    pod, ended, previous = failure
    at = f" at {ended['finishedAt']}" if ended.get("finishedAt") else ""
    how = how_it_ended(pod, CONTAINER, ended)
    say(f"pod {pod['metadata']['name']} failed first{at}: {how}")
    show(cluster, [pod], write, say, prefix=False, previous=previous, tail=tail, since_s=since_s)
