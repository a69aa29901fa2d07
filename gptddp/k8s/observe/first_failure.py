"""The container that failed a job: the others end because of it, and later."""

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.observe import facts, why
from gptddp.k8s.observe.endings import ends, how_it_ended
from gptddp.k8s.observe.logs import Write, show
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.observe.watcher import Say


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
    first = next((end for end in ends(found.pods) if end.container == CONTAINER), None)
    if first is None:
        reason = why.why(found)
        told = f": {reason}" if reason else ""
        say(f"{name} is {why.state(found.job)}, and no pod that is there has failed{told}")
        return
    ended = first.terminated
    at = f" at {ended['finishedAt']}" if ended.get("finishedAt") else ""
    how = how_it_ended(first.pod, CONTAINER, ended)
    say(f"pod {first.pod['metadata']['name']} failed first{at}: {how}")
    pods, previous = [first.pod], first.previous
    show(cluster, pods, write, say, prefix=False, previous=previous, tail=tail, since_s=since_s)
