"""A job's place in a queue of Kueue: labels of the job, annotations of its pods."""

from gptddp.k8s.objects import PRIORITY, QUEUE

UNCONSTRAINED = "unconstrained"
# What --topology begins with: the annotation that it becomes.
TOPOLOGY = {
    kind: f"kueue.x-k8s.io/podset-{kind}-topology"
    for kind in ("required", "preferred", UNCONSTRAINED)
}


def labels(queue: str | None, priority: str | None) -> dict[str, str]:
    """The labels by which Kueue knows a job. It suspends such a job when it is created."""
    return {
        key: value for key, value in ((QUEUE, queue), (PRIORITY, priority)) if value is not None
    }


def annotations(wish: str | None) -> dict[str, str]:
    """The annotations of pods for a --topology."""
    return topology(wish) or {} if wish is not None else {}


def topology(wish: str) -> dict[str, str] | None:
    """The annotation of a --topology; None for one that cannot be read."""
    kind, given, value = wish.partition("=")
    if kind not in TOPOLOGY or bool(given) == (kind == UNCONSTRAINED):
        return None
    return {TOPOLOGY[kind]: value or "true"} if value or kind == UNCONSTRAINED else None
