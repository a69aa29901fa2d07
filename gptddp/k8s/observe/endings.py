"""How containers ended: by themselves, with an exit code and a message, or from outside."""

from collections.abc import Iterable
from typing import NamedTuple

from gptddp.k8s import exit_codes
from gptddp.k8s.objects import Object, container_statuses, event_time, seconds
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER

AROUND_S = 90.0  # maximum time between the end of a pod and the events about it
# Reasons of events about a pod that is ended from outside.
_FROM_OUTSIDE = (
    "Evicted", "Preempted", "TaintManagerEviction", "NodeNotReady", "NodeShutdown", "Terminated",
    "DeadlineExceeded", "Unhealthy", "FailedPostStartHook",
)  # fmt: skip


class End(NamedTuple):
    """A bad end of a container; `previous`: the container has restarted since, or will."""

    pod: Object
    status: Object  # the container's
    terminated: Object
    previous: bool

    @property
    def container(self) -> str:
        return str(self.status["name"])

    @property
    def by_node(self) -> bool:
        """Did the node end the pod? Then the pod's status has the reason."""
        return bool((self.pod.get("status") or {}).get("reason"))


def ends(pods: Iterable[Object]) -> list[End]:
    """Bad ends of containers; the first is the cause of the others.

    Order: exits before kills, an error reported by a rank before the ends of its peers, then time.
    """
    found = [
        End(pod, status, terminated, key == "lastState")
        for pod in pods
        for status in container_statuses(pod)
        for key in ("state", "lastState")
        if (terminated := (status.get(key) or {}).get("terminated"))
        and int(terminated.get("exitCode") or 0)
    ]
    return sorted(found, key=lambda it: _order(it.terminated))


def _order(terminated: Object) -> tuple[bool, bool, float]:
    by_rank = "gptddp.launch: rank" in str(terminated.get("message") or "")
    return _killed(terminated), not by_rank, seconds(terminated.get("finishedAt")) or 0.0


def _killed(terminated: Object) -> bool:
    """Did a signal end the container?"""
    return int(terminated.get("exitCode") or 0) >= exit_codes.FIRST_RETRYABLE


def end_in_words(facts: Facts, end: End) -> str:
    """How a container ended, and what killed it if known."""
    at = seconds(end.terminated.get("finishedAt")) or 0.0
    outside = from_outside(facts, str(end.pod["metadata"]["name"]), end.terminated, at)
    text = outside or how_it_ended(end.pod, end.container, end.terminated)
    return text if end.container == CONTAINER else f"its container {end.container} {text}"


def how_it_ended(pod: Object, container: str, terminated: Object) -> str:
    """How a container of a pod (or of a pod template) ended, with its exit code and message."""
    if terminated.get("reason") == "OOMKilled":
        spec = pod.get("spec") or {}
        containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
        limits = {it["name"]: (it.get("resources") or {}).get("limits") or {} for it in containers}
        limit = limits.get(container, {}).get("memory")
        first = container == CONTAINER or bool(containers) and container == containers[0]["name"]
        return (
            f"killed for using more than its memory{f' of {limit}' if limit else ''} "
            f"(resources.limits.memory): give it more{' with --memory' if first else ''}"
        )
    code = exit_codes.meaning(int(terminated.get("exitCode") or 0))
    said = exit_codes.reason(str(terminated.get("message") or ""))
    return f"exited with {code}" + (f": {said}" if said else "")


def from_outside(facts: Facts, pod_name: str, terminated: Object, at: float) -> str:
    """What ended a container at this time, in the words of its pod's events; "" if not known.

    The exit code of a killed container does not say what killed it; events do, for an hour.
    """
    if not _killed(terminated) or terminated.get("reason") == "OOMKilled":
        return ""
    for event in reversed(facts.ever_about(pod_name, *_FROM_OUTSIDE)):
        message = str(event.get("message", "")).strip().rstrip(":. ")
        if abs(event_time(event) - at) < AROUND_S and not message.startswith("Readiness"):
            code = exit_codes.described(int(terminated["exitCode"]))
            return f"exited with {code}: {event['reason']}: {message}"
    return ""
