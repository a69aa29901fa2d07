"""Pods that have a node and do not train: images, configuration, commands, crashes, sidecars."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from gptddp.k8s import exit_codes
from gptddp.k8s.objects import Object, condition, container_statuses, event_time, seconds
from gptddp.k8s.observe import node_causes
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER

PULL_S = 10.0  # a pull that takes longer is worth a line
_PROBE = re.compile(r"(Liveness|Readiness|Startup) probe (?:failed|errored)(?:: )?(.*)", re.S)


class _Said(NamedTuple):
    """A pattern of a message, and the cause that it is."""

    pattern: str
    id: str


_IMAGE = (
    _Said(r"InvalidImageName|couldn't parse image|invalid reference format", "image-name"),
    _Said(r"ErrImageNeverPull", "image-never"),
    _Said(r"no match for platform|does not match the specified platform", "image-platform"),
    _Said(r"\b401\b|\b403\b|[Uu]nauthorized|denied|no basic auth|authentication", "image-denied"),
    _Said(
        r"no such host|dial tcp|i/o timeout|connection refused|TLS handshake|x509|"
        r"network is unreachable|context deadline exceeded|server misbehaving",
        "image-unreachable",
    ),
)
_CREATE = (
    _Said(r'secret "(?P<object>[^"]+)" not found', "secret-missing"),
    _Said(r'configmap "(?P<object>[^"]+)" not found', "configmap-missing"),
    _Said(
        r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) [^/\s]+/(?P<object>\S+)",
        "key-missing",
    ),
    _Said(r"runAsNonRoot and image|non-numeric user|run as root", "run-as-root"),
    _Said(r"missing value for|subPath|container init: mkdir|chdir to cwd", "container"),
    _Said(r"executable file not found|no such file or directory.*unknown|exec: ", "command"),
)
_CRASH = (
    _Said(r"exec format error", "image-platform"),
    _Said(r"executable file not found|exec: ", "command"),
    _Said(r"[Rr]ead-only file system", "read-only"),
    _Said(r"No space left on device|Disk quota exceeded", "disk-full"),
    _Said(r"Permission denied|Operation not permitted", "permission"),
)
_HINTS = {  # the field that has to change
    "image-name": "mend spec.containers[].image",
    "image-never": "its imagePullPolicy is Never: load it onto the node, or let it be pulled",
    "image-denied": "spec.imagePullSecrets has to name a Secret with a right to it",
    "image-platform": "build it for the node's processor, or set spec.nodeSelector",
    "command": "mend spec.containers[].command or the image",
    "run-as-root": "set securityContext.runAsUser to a number that is not 0",
    "read-only": "mount a volume there that can be written, as an emptyDir",
    "permission": "set securityContext.fsGroup or runAsUser to the volume's owner",
    "disk-full": "make room, or raise the volume's or the emptyDir's size",
}
_FIELDS = (  # of what the message is about
    (r"missing value for|subPath", "mend spec.containers[].volumeMounts[], its subPath"),
    (r"container init: mkdir|chdir to cwd", "mend spec.containers[].workingDir"),
)


def hinted(id: str, text: str) -> str:
    """The sentence with the field that has to change."""
    about = (hint for pattern, hint in _FIELDS if id == "container" and re.search(pattern, text))
    hint = _HINTS.get(id) or next(about, "")
    return f"{text}; {hint}" if hint else text


def _match(table: tuple[_Said, ...], text: str) -> tuple[str, dict[str, str]] | None:
    for it in table:
        if found := re.search(it.pattern, text, re.S):
            return it.id, found.groupdict()
    return None


# -- before a container runs ---------------------------------------------------------------------


def waiting(facts: Facts) -> Iterator[Cause]:
    """Containers that cannot start: image, configuration, back-off."""
    for pod in facts.pods:
        for status in container_statuses(pod):
            held = (status.get("state") or {}).get("waiting") or {}
            reason, message = held.get("reason", ""), held.get("message", "")
            if "Image" in reason or reason == "RegistryUnavailable":
                yield _image(facts, pod, status, reason, message)
            elif reason.startswith("CreateContainer") or reason == "RunContainerError":
                yield _not_created(facts, pod, status, reason, message)
            elif reason == "CrashLoopBackOff" or reason.startswith("Init:"):
                last = (status.get("lastState") or {}).get("terminated") or {}
                count = status.get("restartCount", 0)
                id, ending = ended(facts, pod, status["name"], last, "crash-loop")
                text = f"crashed {count} times and waits to start again: {ending}"
                yield _of(facts, pod, status["name"], id, text)


def _image(facts: Facts, pod: Object, status: Object, reason: str, message: str) -> Cause:
    spec = pod.get("spec", {})
    both = [*spec.get("initContainers", []), *spec.get("containers", [])]
    images = {c["name"]: c.get("image") for c in both}
    image = images.get(status["name"]) or status.get("image")
    told = message
    if reason == "ImagePullBackOff":  # it has the reason in its older events only
        tried = facts.about(pod, "Failed")
        told = next((str(e["message"]) for e in tried if "ulling" in e.get("message", "")), message)
    found = _match(_IMAGE, f"{reason}: {told}")
    id = found[0] if found else "image"
    text = f"cannot get the image {image}: {reason}" + (f": {message}" if message else "")
    return cause(facts, id, hinted(id, text), pod=pod)


def _not_created(facts: Facts, pod: Object, status: Object, reason: str, message: str) -> Cause:
    id, names = _match(_CREATE, message) or ("container", {})
    names["kind"] = (names.get("kind") or "").lower()
    text = f"cannot start its container {status['name']}: {reason}: {message}"
    return cause(facts, id, hinted(id, text), pod=pod, named=names)


def pulling(facts: Facts) -> Iterator[Cause]:
    """A node that has been pulling an image for a while."""
    for pod in facts.pods:
        statuses = list(container_statuses(pod))
        reasons = [((c.get("state") or {}).get("waiting") or {}).get("reason") for c in statuses]
        if not any(reason in ("ContainerCreating", "PodInitializing") for reason in reasons):
            continue
        told = facts.about(pod, "Pulling", "Pulled", "Failed", "Created", "BackOff")
        if told and max(told, key=event_time)["reason"] == "Pulling":
            event = max(told, key=event_time)
            since_s = facts.now - event_time(event)
            image = re.search(r'"([^"]+)"', str(event.get("message", "")))
            if since_s >= PULL_S:
                text = (
                    f"its node {pod['spec'].get('nodeName')} has been pulling the image "
                    f"{image[1] if image else ''} for {since_s:.0f} s"
                )
                yield cause(facts, "pulling", text, pod=pod)


def initialising(facts: Facts) -> Iterator[Cause]:
    """An init container that still runs, as the operator's, which waits for the Master's name."""
    for pod in facts.pods:
        init = pod.get("spec", {}).get("initContainers") or []
        sidecars = {c["name"] for c in init if c.get("restartPolicy") == "Always"}
        for status in (pod.get("status") or {}).get("initContainerStatuses") or []:
            state, name = status.get("state") or {}, status["name"]
            over = state.get("terminated") or {}
            if over.get("exitCode"):
                text = f"its init container {name} {how_it_ended(pod, name, over)}"
                yield cause(facts, "init", text, pod=pod, named={"container": name})
            elif "running" in state and name not in sidecars:
                what = " (it waits for the Master)" if name == "init-pytorch" else ""
                text = f"its init container {name} has not ended{what}"
                yield cause(facts, "init", text, pod=pod, named={"container": name})


# -- once it runs --------------------------------------------------------------------------------


def crashed(facts: Facts) -> Iterator[Cause]:
    """Containers that have ended badly."""
    for pod in facts.pods:
        status = pod.get("status") or {}
        if status.get("phase") == "Failed" and status.get("reason"):
            continue  # the node ended it: see node_causes
        for container in status.get("containerStatuses") or []:
            over = (container.get("state") or {}).get("terminated") or {}
            if over.get("exitCode"):
                id, text = ended(facts, pod, container["name"], over, "crash")
                yield _of(facts, pod, container["name"], id, text)


def _of(facts: Facts, pod: Object, container: str, id: str, text: str) -> Cause:
    """A cause that is about a container, which is named if it is not that of the training."""
    text = text if container == CONTAINER else f"its container {container} {text}"
    return cause(facts, id, hinted(id, text), pod=pod, named={"container": container})


def sidecar(facts: Facts) -> Iterator[Cause]:
    """The training has ended, and a container beside it has not: the operator waits for the pod."""
    for pod in facts.pods:
        statuses = (pod.get("status") or {}).get("containerStatuses") or []
        main = [c for c in statuses if c["name"] == CONTAINER]
        over = ((main[0].get("state") or {}).get("terminated") or {}) if main else {}
        others = [c["name"] for c in statuses if "running" in (c.get("state") or {})]
        if over and others and CONTAINER not in others:
            code = exit_codes.meaning(int(over.get("exitCode", 0)))
            text = (
                f"its container {CONTAINER} has ended with {code}, and {', '.join(others)} keeps "
                "the pod alive: make it a native sidecar (spec.initContainers with restartPolicy "
                "Always), or leave it out"
            )
            yield cause(facts, "sidecar", text, pod=pod, named={"container": others[0]})


def probes(facts: Facts) -> Iterator[Cause]:
    """A container that runs and is not ready, or is about to be ended, by a probe."""
    for pod in facts.pods:
        statuses = (pod.get("status") or {}).get("containerStatuses") or []
        idle = [c for c in statuses if "running" in (c.get("state") or {}) and not c.get("ready")]
        if idle and (failed := _failed_probe(facts, pod)):
            yield cause(facts, "probe", failed, pod=pod)


def _failed_probe(facts: Facts, pod: Object) -> str:
    """What the newest failed probe of a pod says, with the field; or ""."""
    for event in reversed(facts.about(pod, "Unhealthy", "ProbeError")):
        if found := _PROBE.search(str(event.get("message", ""))):
            field = f"spec.containers[].{found[1].lower()}Probe"
            said = found[2].strip()[:300] or "it says no more"
            return f"its {found[1].lower()} probe fails ({field}): {said}"
    return ""


def gated(facts: Facts) -> Iterator[Cause]:
    """A pod whose containers are ready, and who has to say so has not."""
    for pod in facts.pods:
        ready = condition(pod, "Ready") or {}
        if ready.get("reason") == "ReadinessGatesNotReady":
            text = (
                "it is not ready, so that the other pods do not find its name: a readiness gate "
                f"(spec.readinessGates) is not met: {ready.get('message', '')}"
            )
            yield cause(facts, "readiness-gate", text, pod=pod)


# -- how a container ended -----------------------------------------------------------------------


def ended(
    facts: Facts, pod: Object, container: str, terminated: Object, other: str
) -> tuple[str, str]:
    """The cause and the sentence of a bad end; `other`: the cause if it is none in particular.

    The exit code of a container that was killed does not say by whom: events do, for an hour.
    """
    killed = int(terminated.get("exitCode") or 0) >= exit_codes.FIRST_RETRYABLE
    at = seconds(terminated.get("finishedAt"))
    by_limit = terminated.get("reason") == "OOMKilled"
    name = str(pod["metadata"]["name"])
    if killed and at and not by_limit and (outside := node_causes.before(facts, name, at)):
        return outside
    return ending_id(terminated, other), how_it_ended(pod, container, terminated)


def _limit_of(pod: Object, container: str) -> str:
    """The memory limit of a pod's container; empty if it has none."""
    spec = pod.get("spec") or {}
    for it in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        if it["name"] == container:
            return str(((it.get("resources") or {}).get("limits") or {}).get("memory") or "")
    return ""


def ending_id(terminated: Object, other: str) -> str:
    """The cause that an ending is, `other` if it is none in particular."""
    if terminated.get("reason") == "OOMKilled":
        return "out-of-memory"
    message = str(terminated.get("message") or "")
    if terminated.get("reason") in ("StartError", "ContainerCannotRun"):
        return (_match(_CREATE, message) or _match(_CRASH, message) or ("container", {}))[0]
    if int(terminated.get("exitCode") or 0) in (exit_codes.NOT_EXECUTABLE, 127):
        return (_match(_CRASH[:1], message) or ("command", {}))[0]
    found = _match(_CRASH, exit_codes.reason(message))
    return found[0] if found else other


def ending_order(terminated: Object) -> tuple[bool, bool, float]:
    """Of bad ends the least is the one that the others follow from.

    An error of the container's own goes before its being killed, one that a rank has reported
    before the ends of its peers, then the first in time.
    """
    killed = int(terminated.get("exitCode") or 0) >= exit_codes.FIRST_RETRYABLE
    by_rank = "gptddp.launch: rank" in str(terminated.get("message") or "")
    return killed, not by_rank, seconds(terminated.get("finishedAt")) or 0.0


def how_it_ended(pod: Object, container: str, terminated: Object) -> str:
    """How a container of a pod, or of a template of pods, ended: with the reason it gave last."""
    if terminated.get("reason") == "OOMKilled":
        of = f" of {limit}" if (limit := _limit_of(pod, container)) else ""
        ours = [it["name"] for it in (pod.get("spec") or {}).get("containers", [])[:1]]
        how = " with --memory" if container in (CONTAINER, *ours) else ""
        return (
            f"killed for using more than its memory{of} (resources.limits.memory): give it more"
            f"{how}"
        )
    said = exit_codes.reason(str(terminated.get("message") or ""))
    code = exit_codes.meaning(int(terminated.get("exitCode", 0)))
    return f"exited with {code}" + (f": {said}" if said else "")
