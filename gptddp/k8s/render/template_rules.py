"""What the API server refuses in pods, and not in the PyTorchJob that they are made from.

Such a job is created, and its pods never are: its status stays empty, and only events tell. Whether
a cluster takes a pod is not known here: quotas, Pod Security and names of other objects.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from gptddp.k8s.objects import Object, replica_specs
from gptddp.k8s.render import names, quantity
from gptddp.k8s.render.problem import REPLICAS, Found, job_rule, label_problems

_INSTANCE = "app.kubernetes.io/instance"  # of what gptddp-k8s makes, the name of the job
_PULL = ("Always", "IfNotPresent", "Never")
_EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
_DNS = ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None")


def _pods(job: Object) -> Iterator[tuple[str, Object]]:
    """(path, spec) of each template of pods."""
    for role, replica in replica_specs(job).items():
        yield f"{REPLICAS}.{role}.template.spec", replica["template"]["spec"]


def _containers(where: str, spec: Object) -> Iterator[tuple[str, Object]]:
    """(path, container) of a pod."""
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(spec.get(kind) or []):
            yield f"{where}.{kind}[{index}]", container


@job_rule
def _pod_names(job: Object) -> Iterator[Found]:
    """Containers, volumes and ports have names that the API takes."""
    label = "use up to 63 lower case letters, digits and '-'"
    for where, spec in _pods(job):
        containers = list(_containers(where, spec))
        yield from _twice((f"{path}.name", c.get("name")) for path, c in containers)
        for path, container in containers:
            name = str(container.get("name"))
            if not names.is_label(name):
                yield f"{path}.name", f"{name!r} is not the name of a container", label
            for index, port in enumerate(container.get("ports") or []):
                yield from _port(f"{path}.ports[{index}]", port)
        for index, volume in enumerate(spec.get("volumes") or []):
            name = str(volume.get("name"))
            if not names.is_label(name):
                field = f"{where}.volumes[{index}].name"
                yield field, f"{name!r} is not the name of a volume", label


def _twice(found: Iterable[tuple[str, Any]]) -> Iterator[Found]:
    """A name that stands twice where each must have its own."""
    seen: dict[Any, str] = {}
    for field, name in found:
        if name and seen.setdefault(name, field) != field:
            yield field, f"{name!r} is that of {seen[name]}", "use another name"


def _port(where: str, port: Object) -> Iterator[Found]:
    name, number = str(port.get("name") or "a"), port.get("containerPort")
    letter = any(it.isalpha() for it in name)
    if not (names.is_label(name) and len(name) <= 15 and letter and "--" not in name):
        fix = "use up to 15 lower case letters, digits and single '-', with a letter among them"
        yield f"{where}.name", f"{name!r} is not the name of a port", fix
    if isinstance(number, int) and not 1 <= number <= 65535:
        yield f"{where}.containerPort", f"{number} is no port", "use 1 to 65535"


@job_rule
def _pod_volumes(job: Object) -> Iterator[Found]:
    """A volume has one source, and what is mounted is there."""
    for where, spec in _pods(job):
        volumes = spec.get("volumes") or []
        known = [volume.get("name") for volume in volumes]
        for index, volume in enumerate(volumes):
            sources = [key for key, value in volume.items() if key != "name" and value is not None]
            field = f"{where}.volumes[{index}]"
            if len(sources) > 1:
                yield field, f"has {' and '.join(sources)}", "leave one of them"
        for path, container in _containers(where, spec):
            mounts = list(enumerate(container.get("volumeMounts") or []))
            for index, mount in mounts:
                field = f"{path}.volumeMounts[{index}]"
                if mount.get("name") not in known:
                    there = ", ".join(map(str, known)) or "none"
                    fix = f"add it to {where}.volumes, where there are {there}"
                    yield f"{field}.name", f"there is no volume {mount.get('name')!r}", fix


@job_rule
def _pod_resources(job: Object) -> Iterator[Found]:
    """Nobody asks for more than the limit, and devices are whole, and as many as the limit."""
    for where, spec in _pods(job):
        for path, container in _containers(where, spec):
            resources = container.get("resources") or {}
            limits, requests = (
                {k: v for k, v in (resources.get(part) or {}).items() if v is not None}
                for part in ("limits", "requests")
            )
            for part, table in (("limits", limits), ("requests", requests)):
                for name, amount in table.items():
                    field = f"{path}.resources.{part}[{name}]"
                    yield from _amount(field, name, amount, limits if part == "requests" else None)


def _amount(field: str, name: str, amount: Any, limits: Object | None) -> Iterator[Found]:
    """limits: those that a request must keep to; None for a limit itself."""
    size, device = quantity.parse(str(amount)), "/" in name
    if not device and name not in ("cpu", "memory", "ephemeral-storage") and not (
        name.startswith("hugepages-")
    ):  # fmt: skip
        yield (
            field,
            f"{name!r} is no resource",
            "use cpu, memory, or a device such as nvidia.com/gpu",
        )
        return
    if size is None:
        if str(amount).startswith("-"):
            yield field, f"{amount} is negative", "use 0 or more"
        return
    if device and size % 1:
        yield field, f"{amount} is not a whole number of devices", "use 1 or more"
    if limits is None or (name not in limits and not device):
        return
    limit = quantity.number(limits.get(name))
    if size > limit or (device and size != limit):
        there = f"the limit is {limits[name]}" if name in limits else "there is no limit"
        fix = f"set the limit to {amount}, or leave out the request: it is then the limit"
        yield field, f"{amount}, but {there}", fix


@job_rule
def _pod_env(job: Object) -> Iterator[Found]:
    """A variable has a name, and its value from one place."""
    for where, spec in _pods(job):
        for path, container in _containers(where, spec):
            for index, variable in enumerate(container.get("env") or []):
                field, source = f"{path}.env[{index}]", variable.get("valueFrom")
                name = str(variable.get("name") or "")
                if not name or "=" in name or not name.isprintable() or not name.isascii():
                    yield f"{field}.name", f"{name!r} is not the name of a variable", "use letters"
                if variable.get("value") and source is not None:
                    yield field, "has value and valueFrom", "leave one of them"
                elif source is not None and len([v for v in source.values() if v is not None]) != 1:
                    fix = "use one of fieldRef, secretKeyRef, configMapKeyRef and resourceFieldRef"
                    yield f"{field}.valueFrom", "names no source, or several", fix


@job_rule
def _pod_labels(job: Object) -> Iterator[Found]:
    """Labels and annotations have keys that the API takes, and labels such values."""
    metas = [("metadata", job["metadata"])]
    for role, replica in replica_specs(job).items():
        template = replica["template"]
        metas.append((f"{REPLICAS}.{role}.template.metadata", template.get("metadata") or {}))
        labels = {"labels": (template["spec"].get("nodeSelector") or {})}
        yield from _labels(f"{REPLICAS}.{role}.template.spec.nodeSelector", labels, node=True)
    name = str(job["metadata"].get("name"))
    for where, meta in metas:
        own = {} if names.is_label(name) else {_INSTANCE: name}  # the rule `name` says it
        labels = {k: v for k, v in (meta.get("labels") or {}).items() if own.get(k) != v}
        yield from _labels(where, {**meta, "labels": labels})


def _labels(where: str, meta: Object, node: bool = False) -> Iterator[Found]:
    for field in ("labels", "annotations"):
        for key, value in (meta.get(field) or {}).items():
            at = f"{where}[{key}]" if node else f"{where}.{field}[{key}]"
            for problem in label_problems(key, str(value or "") if field == "labels" else None):
                yield (at, *problem)


@job_rule
def _pod_choices(job: Object) -> Iterator[Found]:
    """Words of a pod that the CRD takes as free text, and an image that a node can pull."""
    for where, spec in _pods(job):
        found: list[tuple[str, Any, tuple[str, ...]]] = []
        found.append((f"{where}.dnsPolicy", spec.get("dnsPolicy"), _DNS))
        for index, it in enumerate(spec.get("tolerations") or []):
            at = f"{where}.tolerations[{index}]"
            found.append((f"{at}.operator", it.get("operator"), ("", "Exists", "Equal")))
            found.append((f"{at}.effect", it.get("effect"), _EFFECTS))
            if it.get("operator") == "Exists" and it.get("value"):
                yield f"{at}.value", "has no meaning with the operator Exists", "leave it out"
        for path, container in _containers(where, spec):
            found.append((f"{path}.imagePullPolicy", container.get("imagePullPolicy"), _PULL))
            found += [
                (f"{path}.ports[{i}].protocol", port.get("protocol"), ("TCP", "UDP", "SCTP"))
                for i, port in enumerate(container.get("ports") or [])
            ]
            image = str(container.get("image") or "")
            if image and not names.is_image(image):
                rule, fix = f"{image!r} is not an image", f"use {names.near_image(image)}"
                yield f"{path}.image", rule, fix
        for field, value, allowed in found:
            if value is not None and value not in allowed:
                yield field, f"{value!r} is unknown", f"use {' or '.join(filter(None, allowed))}"
