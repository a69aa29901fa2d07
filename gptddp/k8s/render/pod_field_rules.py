"""Words and names deep in a pod that the CRD takes as free text, and the API server does not.

They are those that people get wrong in affinities, probes, volumes and security contexts. A job
with one of them is created, and its pods never are (`template_rules`).
"""

import re
from collections.abc import Iterator
from typing import Any

from gptddp.k8s.objects import Object, replica_specs
from gptddp.k8s.render import names
from gptddp.k8s.render.problem import REPLICAS, Found, job_rule

_SELECTORS = ("In", "NotIn", "Exists", "DoesNotExist")
_SECCOMP = ("RuntimeDefault", "Unconfined", "Localhost")
_TERMS = "affinity.nodeAffinity.{}.matchExpressions[].operator"
_NODES = "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[]"
_LIKED = "preferredDuringSchedulingIgnoredDuringExecution[]"
_OF_PODS = "affinity.{}.requiredDuringSchedulingIgnoredDuringExecution[].labelSelector"
# Fields of a pod and of its containers, with the words that they take.
_POD_WORDS: dict[str, tuple[str, ...]] = {
    "securityContext.seccompProfile.type": _SECCOMP,
    "securityContext.fsGroupChangePolicy": ("OnRootMismatch", "Always"),
    "topologySpreadConstraints[].whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway"),
    "volumes[].hostPath.type": (
        "", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice",
        "BlockDevice",
    ),
    _TERMS.format(_NODES): (*_SELECTORS, "Gt", "Lt"),
    _TERMS.format(f"{_LIKED}.preference"): (*_SELECTORS, "Gt", "Lt"),
    f"{_OF_PODS.format('podAffinity')}.matchExpressions[].operator": _SELECTORS,
    f"{_OF_PODS.format('podAntiAffinity')}.matchExpressions[].operator": _SELECTORS,
}  # fmt: skip
_CONTAINER_WORDS: dict[str, tuple[str, ...]] = {
    "securityContext.seccompProfile.type": _SECCOMP,
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "volumeMounts[].mountPropagation": ("None", "HostToContainer", "Bidirectional"),
}
# Fields that name other objects.
_POD_NAMES = (
    "serviceAccountName", "priorityClassName", "runtimeClassName", "volumes[].secret.secretName",
    "volumes[].configMap.name",
)  # fmt: skip
_CONTAINER_NAMES = (
    "env[].valueFrom.secretKeyRef.name", "env[].valueFrom.configMapKeyRef.name",
    "envFrom[].secretRef.name", "envFrom[].configMapRef.name",
)  # fmt: skip
_FIELD = (
    r"metadata\.(name|namespace|uid|(labels|annotations)\['.+'\])|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIPs?|podIPs?)"
)
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc")


def _parts(job: Object) -> Iterator[tuple[str, Object, bool]]:
    """(path, part, is it a pod?) of each template: the pod, and its containers."""
    for role, replica in replica_specs(job).items():
        where, spec = f"{REPLICAS}.{role}.template.spec", replica["template"]["spec"]
        yield where, spec, True
        for kind in ("initContainers", "containers"):
            for index, container in enumerate(spec.get(kind) or []):
                yield f"{where}.{kind}[{index}]", container, False


def _values(where: str, value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of what is there at a path below, in which `[]` is every item of a list."""
    key, _, rest = path.partition(".")
    below = (value or {}).get(key.removesuffix("[]"))
    if below is None:
        return
    field = f"{where}.{key.removesuffix('[]')}"
    found = [(f"{field}[{i}]", it) for i, it in enumerate(below)] if key[-1] == "]" else None
    for at, it in found if found is not None else [(field, below)]:
        yield from _values(at, it, rest) if rest else [(at, it)]


@job_rule
def _pod_words(job: Object) -> Iterator[Found]:
    """Affinities, spreads, volumes and security contexts use Kubernetes' own words."""
    for where, part, pod in _parts(job):
        for path, allowed in (_POD_WORDS if pod else _CONTAINER_WORDS).items():
            for field, value in _values(where, part, path):
                if value not in allowed:
                    yield (
                        field,
                        f"{value!r} is unknown",
                        f"use {' or '.join(filter(None, allowed))}",
                    )
        for path in _POD_NAMES if pod else _CONTAINER_NAMES:
            for field, value in _values(where, part, path):
                by_name = value == job["metadata"].get("name")  # which the rule `name` judges
                if value and not by_name and not names.is_subdomain(str(value)):
                    fix = "use lower case letters, digits, '-' and '.'"
                    yield field, f"{value!r} is not the name of an object", fix
        for field, value in _values(where, part, "env[].valueFrom.fieldRef.fieldPath"):
            if not re.fullmatch(_FIELD, str(value)):
                fix = "use one such as metadata.name, spec.nodeName or status.podIP"
                yield field, f"{value!r} is no field that a pod gives to its containers", fix


@job_rule
def _pod_handlers(job: Object) -> Iterator[Found]:
    """A probe and a hook do one thing, and what is privileged may gain privileges."""
    for where, part, pod in _parts(job):
        probes = [f"{kind}Probe" for kind in ("liveness", "readiness", "startup")]
        for path in () if pod else (*probes, "lifecycle.postStart", "lifecycle.preStop"):
            for field, probe in _values(where, part, path):
                known = (*_HANDLERS, "sleep") if "lifecycle" in path else _HANDLERS
                if len([key for key in known if probe.get(key) is not None]) != 1:
                    yield field, "does nothing, or several things", f"use one of {', '.join(known)}"
        context = {} if pod else part.get("securityContext") or {}
        if context.get("allowPrivilegeEscalation") is False and context.get("privileged"):
            field = f"{where}.securityContext.allowPrivilegeEscalation"
            yield field, "is false, and privileged is true", "leave one of them out"


@job_rule
def _pod_paths(job: Object) -> Iterator[Found]:
    """What is mounted is within its volume, and only NoExecute is tolerated for a time."""
    for where, part, pod in _parts(job):
        for field, value in () if pod else _values(where, part, "volumeMounts[].subPath"):
            if str(value).startswith("/") or ".." in str(value).split("/"):
                fix = "write a path from the root of the volume, without '/' before it and '..'"
                yield field, f"{value!r} leads out of the volume", fix
        for field, it in _values(where, part, "tolerations[]") if pod else ():
            if it.get("tolerationSeconds") is not None and it.get("effect") != "NoExecute":
                fix = "add effect: NoExecute, or leave it out"
                yield f"{field}.tolerationSeconds", "is for the effect NoExecute", fix
