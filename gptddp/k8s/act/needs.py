"""Checks objects that pods name and would silently wait for: claims, Secrets, ConfigMaps, account.

Runs before anything is created. Objects that this user may not read are not checked.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from gptddp.errors import ConfigError
from gptddp.k8s.cluster import Cluster, if_allowed
from gptddp.k8s.objects import Object, volume_claims
from gptddp.k8s.observe.watcher import Say

_MAKE = {
    "Secret": "kubectl create secret generic {name} --from-literal={key}=...",
    "ConfigMap": "kubectl create configmap {name} --from-literal={key}=...",
    "ServiceAccount": "kubectl create serviceaccount {name}",
}
_SOURCES = {  # fields of variables and of volumes -> kind of the object named there
    **dict.fromkeys(("secretKeyRef", "secretRef", "secret"), "Secret"),
    **dict.fromkeys(("configMapKeyRef", "configMapRef", "configMap"), "ConfigMap"),
}
# The fix that mounts a volume read-only on its node too.
_READ_ONLY = {"data": "--patch with readOnly: true in the persistentVolumeClaim of the volume data"}
_OPTIONS = ("data", "runs", "source")  # volumes whose claim is set by the option of the same name


class Lack(NamedTuple):
    """A problem and its fix; `fatal`: pods cannot start with it."""

    text: str
    fix: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.text}: {self.fix}"


def lacks(cluster: Cluster, pod_spec: Object, count: int, own: Sequence[Object] = ()) -> list[Lack]:
    """What `count` such pods lack; own: objects that will be created for them."""
    return [*_claims(cluster, pod_spec, count), *_references(cluster, pod_spec, own)]


def check(found: Sequence[Lack], say: Say) -> None:
    """Raise ConfigError for problems that keep pods from starting; warn of others."""
    if fatal := [str(it) for it in found if it.fatal]:
        raise ConfigError("; ".join(fatal))
    for it in found:
        say(f"warning: {it}")


# -- claims --------------------------------------------------------------------------------------


def _claims(cluster: Cluster, pod_spec: Object, count: int) -> Iterator[Lack]:
    """The problems of the pods' claims."""
    for volume, claim in volume_claims(pod_spec):
        found = if_allowed(partial(cluster.get, "PersistentVolumeClaim", claim), {})
        option = f" (--{volume})" if volume in _OPTIONS else ""  # a volume of --patch has none
        if found is None:
            yield Lack(
                f"there is no claim {claim}{option} in the namespace {cluster.namespace}",
                "create it as ReadWriteMany, or name another; `kubectl get pvc"
                f"{cluster.kubectl}` lists the existing claims",
            )
        elif found:
            yield from _claim(cluster, f"the claim {claim}{option}", found, pod_spec, volume, count)


def _claim(
    cluster: Cluster, what: str, claim: Object, pod_spec: Object, volume: str, count: int
) -> Iterator[Lack]:
    modes = claim["spec"].get("accessModes") or []
    shared = "ReadWriteMany" in modes or (volume == "data" and "ReadOnlyMany" in modes)
    if broken := _broken(claim):
        look = f"`kubectl describe pvc {claim['metadata']['name']}{cluster.kubectl}`"
        yield Lack(f"{what} {broken}", f"{look} says more; create it again, or name another")
    elif modes == ["ReadOnlyMany"] and _is_written(pod_spec, volume):
        yield Lack(f"{what} is ReadOnlyMany, and the pods write to it", "use ReadWriteMany", False)
    elif modes == ["ReadOnlyMany"] and volume in _READ_ONLY and not _read_only(pod_spec, volume):
        text = f"{what} is ReadOnlyMany, which many storage systems mount only as read-only"
        yield Lack(text, f"add {_READ_ONLY[volume]} if the pods wait for the volume", False)
    elif count > 1 and not shared:
        others = "other pods" if "ReadWriteOncePod" in modes else "pods on other nodes"
        text = f"{what} is {'/'.join(modes)}: {others} than the first cannot mount it"
        yield Lack(text, "use ReadWriteMany", False)


def _broken(claim: Object) -> str:
    """Why no pod can ever get the claim's volume; "" if a pod may."""
    if (claim.get("status") or {}).get("phase") == "Lost":
        volume = claim["spec"].get("volumeName") or "that it had"
        return f"is Lost: its volume {volume} is gone, with its data"
    return "is being deleted" if "deletionTimestamp" in claim["metadata"] else ""


def _is_written(pod_spec: Object, volume: str) -> bool:
    mounts = [it for c in pod_spec["containers"] for it in c.get("volumeMounts") or []]
    return any(it["name"] == volume and not it.get("readOnly") for it in mounts)


def _read_only(pod_spec: Object, volume: str) -> bool:
    """Is the whole volume mounted read-only on the node?"""
    found = next(it for it in pod_spec["volumes"] if it["name"] == volume)
    return bool(found["persistentVolumeClaim"].get("readOnly"))


# -- Secrets, ConfigMaps, the account ------------------------------------------------------------


def _references(cluster: Cluster, pod_spec: Object, own: Sequence[Object]) -> list[Lack]:
    """Missing objects that the pods name, each once; `own`: objects that will be created for them.

    A missing pull secret is not fatal: the nodes may have the image.
    """
    made = {(it["kind"], it["metadata"]["name"]) for it in own}
    found = [
        _reference(cluster, kind, str(name), key)
        for kind, name, key in dict.fromkeys(_named(pod_spec))
        if (kind, name) not in made
    ]
    for item in pod_spec.get("imagePullSecrets") or []:
        if lack := _reference(cluster, "Secret", str(item.get("name", "")), None):
            fix = "the image may need it; create it with `kubectl create secret docker-registry`"
            found.append(Lack(lack.text, fix, fatal=False))
    return [it for it in found if it]


def _reference(cluster: Cluster, kind: str, name: str, key: str | None) -> Lack | None:
    """Why pods cannot use the object; None if they can, or if this user may not read it."""
    found = if_allowed(lambda: cluster.get(kind, name), {})
    if found is None:
        command = _MAKE[kind].format(name=name, key=key or "KEY")
        text = f"there is no {kind} {name} in the namespace {cluster.namespace}"
        return Lack(text, f"`{command}{cluster.kubectl}`")
    if not found or key is None:
        return None
    keys = sorted({*(found.get("data") or {}), *(found.get("binaryData") or {})})
    if key in keys:
        return None
    return Lack(f"the {kind} {name} has no key {key}", f"it has {', '.join(keys) or 'none'}")


def _named(pod_spec: Object) -> Iterator[tuple[str, str, str | None]]:
    """(kind, name, key) of the objects that the pods require."""
    if account := pod_spec.get("serviceAccountName"):
        yield "ServiceAccount", account, None
    places: list[Object] = []
    for container in [*(pod_spec.get("initContainers") or []), *pod_spec["containers"]]:
        places += [item.get("valueFrom") or {} for item in container.get("env") or []]
        places += container.get("envFrom") or []
    for volume in pod_spec.get("volumes") or []:
        places += [volume, *((volume.get("projected") or {}).get("sources") or [])]
    for field, source in (it for place in places for it in place.items()):
        if (kind := _SOURCES.get(field)) and source and not source.get("optional"):
            name = source.get("name") or source.get("secretName") or ""
            for item in source.get("items") or [source]:
                yield kind, name, item.get("key")
