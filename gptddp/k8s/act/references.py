"""The Secrets, ConfigMaps and the account that pods name: looked at before the pods are created.

Without one of them a pod would wait for it, or not be made, and never say which option it was.
"""

from collections.abc import Iterator, Sequence

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object
from gptddp.k8s.observe.watcher import Say

_Reference = tuple[str, str, str | None]  # kind, name, key that it must have
_MAKE = {
    "Secret": "kubectl create secret generic {name} --from-literal={key}=...",
    "ConfigMap": "kubectl create configmap {name} --from-literal={key}=...",
    "ServiceAccount": "kubectl create serviceaccount {name}",
}


def check(cluster: Cluster, pod_spec: Object, own: Sequence[Object], say: Say) -> None:
    """Raise ConfigError for what is not there; `own`: what will be made for the pods.

    What this user may not see is left to the pods. A pull secret that is not there is a warning:
    the nodes may have the image, or a right to it.
    """
    if found := missing(cluster, pod_spec, own):
        raise ConfigError("; ".join(found))
    for item in pod_spec.get("imagePullSecrets") or []:
        if problem := _problem(cluster, "Secret", str(item.get("name", "")), None):
            fix = "`kubectl create secret docker-registry` makes one"
            say(f"warning: {problem.partition(':')[0]}, and the image may need it; {fix}")


def missing(cluster: Cluster, pod_spec: Object, own: Sequence[Object]) -> list[str]:
    """`what is not there: what helps`, of what the pods cannot do without, each once."""
    made = {(it["kind"], it["metadata"]["name"]) for it in own}
    found = [
        _problem(cluster, kind, name, key)
        for kind, name, key in _references(pod_spec)
        if (kind, name) not in made
    ]
    return list(dict.fromkeys(filter(None, found)))


def _problem(cluster: Cluster, kind: str, name: str, key: str | None) -> str:
    """Why pods cannot use the object; empty where they can, or where nobody knows."""
    try:
        found = cluster.get(kind, name)
    except ClusterError as error:
        if error.status != 403:
            raise
        return ""
    place = f" -n {cluster.namespace}"
    if found is None:
        command = _MAKE[kind].format(name=name, key=key or "KEY") + place
        return f"there is no {kind} {name} in the namespace {cluster.namespace}: `{command}`"
    keys = sorted({*(found.get("data") or {}), *(found.get("binaryData") or {})})
    if key is not None and key not in keys:
        return f"the {kind} {name} has no key {key}: it has {', '.join(keys) or 'none'}"
    return ""


def _references(pod_spec: Object) -> Iterator[_Reference]:
    """What the pods cannot do without."""
    if account := pod_spec.get("serviceAccountName"):
        yield "ServiceAccount", str(account), None
    for container in [*(pod_spec.get("initContainers") or []), *pod_spec["containers"]]:
        for item in container.get("env") or []:
            source = item.get("valueFrom") or {}
            for kind, field in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                yield from _needed(kind, source.get(field), with_key=True)
        for item in container.get("envFrom") or []:
            yield from _needed("Secret", item.get("secretRef"))
            yield from _needed("ConfigMap", item.get("configMapRef"))
    for volume in pod_spec.get("volumes") or []:
        yield from _needed("Secret", volume.get("secret"), name="secretName")
        yield from _needed("ConfigMap", volume.get("configMap"))


def _needed(
    kind: str, reference: Object | None, name: str = "name", with_key: bool = False
) -> Iterator[_Reference]:
    if reference and not reference.get("optional"):
        yield kind, str(reference.get(name, "")), reference.get("key") if with_key else None
