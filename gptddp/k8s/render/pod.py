"""What a cluster asks of every pod that runs on it: options, and the fields that they become.

A job that gives none of them has none of the fields. `pod_rules` judges the values; here they are
taken to be right.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gptddp.k8s.objects import Object
from gptddp.k8s.render.fields import Kind, option

Pairs = tuple[tuple[str, str], ...]
Texts = tuple[str, ...]

OWN = "own"  # an --egress that allows nothing but DNS and the job's own pods
NONE = "none"  # a --fs-group
# What --without takes: the companion's kind in kubectl's small letters.
COMPANIONS = {k.lower(): k for k in ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")}
# KEY[=VALUE][:EFFECT], as kubectl writes a taint.
TOLERATION = r"([^=:\s]+)(?:=([^=:\s]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
# KEY[:DoNotSchedule]
SPREAD = r"([^=:\s]+)(?::(DoNotSchedule|ScheduleAnyway))?"
# NAME=OBJECT/KEY, or OBJECT: all its keys
ENV_FROM = r"(?:([^=/\s]+)=([^=/\s]+)/([^=/\s]+)|([^=/\s]+))"
# CIDR[:PORT], with brackets around an IPv6 CIDR that has a port
EGRESS = r"(?:\[([^\]\s]+)\]|([0-9.]+(?:/\d+)?))(?::(\d+))?|([0-9a-fA-F:.]+(?:/\d+)?)"
_MIG = r"nvidia\.com/mig-"


@dataclass(frozen=True)
class PodOptions:
    """What a cluster wants of its pods. Every field is a flag of `submit`, and a key of [job]."""

    service_account: str | None = option(
        None, "existing ServiceAccount of the pods [default: one of the job's own]", metavar="NAME"
    )
    image_pull_secret: Texts = option(
        (), "Secret of the image's registry; repeatable", Kind.LIST, "SECRET"
    )
    node_selector: Pairs = option(
        (), "label of the nodes to run on; repeatable", Kind.TABLE, "KEY=VALUE"
    )
    toleration: Texts = option(
        (),
        "taint that the pods tolerate; repeatable; those of its devices are tolerated anyway",
        Kind.LIST,
        "KEY[=VALUE][:EFFECT]",
    )
    affinity: Mapping[str, Any] | None = option(
        None, "YAML file with the pods' affinity; in job.toml also a table", Kind.TREE, "FILE"
    )
    spread: Texts = option(
        (),
        "spread the pods over the nodes' values of this label, if possible; repeatable",
        Kind.LIST,
        "KEY[:DoNotSchedule]",
    )
    label: Pairs = option((), "label of the job and its pods; repeatable", Kind.TABLE, "KEY=VALUE")
    annotation: Pairs = option(
        (), "annotation of the job and its pods; repeatable", Kind.TABLE, "KEY=VALUE"
    )
    resource: Pairs = option(
        (),
        "further resource a pod, as vpc.amazonaws.com/efa=4 or hugepages-2Mi=1Gi; repeatable",
        Kind.QUANTITIES,
        "NAME=AMOUNT",
    )
    ephemeral_storage: str | None = option(
        None, "disk of its node a pod may fill, request and limit", Kind.QUANTITY, "SIZE"
    )
    scratch: str | None = option(
        None, "size limit of /tmp, which holds the cache of tokenised data", Kind.QUANTITY, "SIZE"
    )
    runtime_class: str | None = option(None, "RuntimeClass of the pods", metavar="NAME")
    priority_class: str | None = option(None, "PriorityClass of the pods", metavar="NAME")
    env_from_secret: Texts = option(
        (),
        "environment variable from a key of a Secret, or one for each key; repeatable",
        Kind.LIST,
        "NAME=SECRET/KEY|SECRET",
    )
    env_from_configmap: Texts = option(
        (), "the same from a ConfigMap; repeatable", Kind.LIST, "NAME=CONFIGMAP/KEY|CONFIGMAP"
    )
    mount_secret: Pairs = option(
        (),
        "folder with a file for each key of a Secret; repeatable",
        Kind.TABLE,
        "SECRET=/DIR",
    )
    mount_configmap: Pairs = option(
        (), "the same of a ConfigMap; repeatable", Kind.TABLE, "CONFIGMAP=/DIR"
    )
    fs_group: str = option(
        "1000", "group that owns fresh volumes; none: the cluster's choice", Kind.QUANTITY, "GID"
    )
    read_only_data: bool = option(
        False, "mount the claim of --data read-only on its nodes: for ReadOnlyMany", Kind.SWITCH
    )
    no_istio: bool = option(False, "keep the pods out of an Istio mesh", Kind.SWITCH)
    egress: Texts = option(
        (),
        "let the pods out to DNS, each other and this network, and nowhere else; repeatable; "
        f"{OWN}: to no network",
        Kind.LIST,
        f"CIDR[:PORT]|{OWN}",
    )
    without: Texts = option(
        (),
        f"leave out a companion: {', '.join(COMPANIONS)}; repeatable",
        Kind.LIST,
        "KIND",
    )
    patch: Mapping[str, Any] | None = option(
        None,
        "YAML file to merge into the PyTorchJob (strategic merge); in job.toml also a table",
        Kind.TREE,
        "FILE",
    )


FIELDS = {f.name: f for f in dataclasses.fields(PodOptions)}
# What is of a PyTorchJob, its companions or its datasets alone, and not of any pod.
_OF_JOBS = ("resource", "spread", "read_only_data", "egress", "without")
OF_ANY_POD = {name: field for name, field in FIELDS.items() if name not in _OF_JOBS}


# What a process on this machine has too, with --local.
_OF_PROCESSES = (
    "label", "annotation", "env_from_secret", "env_from_configmap", "mount_secret",
    "mount_configmap", "patch",
)  # fmt: skip
NOTHING = PodOptions()


def of_any_pod(options: PodOptions) -> PodOptions:
    """The same, but for what has no meaning for a pod that is not of a PyTorchJob."""
    return PodOptions(**{name: getattr(options, name) for name in OF_ANY_POD})


def given(options: PodOptions) -> list[str]:
    """The names of the fields that are not as they are by default."""
    return [name for name in FIELDS if getattr(options, name) != getattr(NOTHING, name)]


def without_meaning_locally(options: PodOptions) -> list[str]:
    """The fields that are given, and have no meaning for a process on this machine."""
    return [name for name in given(options) if name not in _OF_PROCESSES]


def account(options: PodOptions, own: str | None) -> Object:
    """The pods' account: the given one, else `own` where there is one; else the namespace's."""
    name = options.service_account or (own if "serviceaccount" not in options.without else None)
    return {"serviceAccountName": name} if name else {}


def fs_group(options: PodOptions) -> int | None:
    return None if options.fs_group == NONE else int(options.fs_group)


def scheduling(options: PodOptions, selector: Mapping[str, str]) -> Object:
    """Where pods run and how they are pulled. `selector`: labels of the pods to be spread."""
    fields: Object = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secret],
        "nodeSelector": dict(options.node_selector),
        "affinity": dict(options.affinity or {}),
        "topologySpreadConstraints": [_spread(text, selector) for text in options.spread],
        "runtimeClassName": options.runtime_class,
        "priorityClassName": options.priority_class,
    }
    return {key: value for key, value in fields.items() if value}


def _spread(text: str, selector: Mapping[str, str]) -> Object:
    key, action = _match(SPREAD, text)
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": action or "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(selector)},
    }


def tolerations(options: PodOptions, devices: Iterable[str]) -> list[Object]:
    """The given tolerations, and those of the nodes that have these resources.

    Nodes with devices are kept free for pods that need them by a taint of the resource's name: by
    GKE, AKS, EKS with Karpenter and by hand. It is also what ExtendedResourceToleration adds.
    """
    found = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in _taints(devices)]
    for text in options.toleration:
        key, value, effect = _match(TOLERATION, text)
        wanted = {"key": key, "operator": "Exists" if value is None else "Equal"}
        wanted |= {} if value is None else {"value": value}
        wanted |= {"effect": effect} if effect else {}
        found += [wanted] if wanted not in found else []
    return found


def _taints(devices: Iterable[str]) -> Iterator[str]:
    for name in devices:
        yield name
        if re.match(_MIG, name):  # the taint is the whole GPU's
            yield "nvidia.com/gpu"


def devices(options: PodOptions) -> list[str]:
    """The further resources that are devices of a node, and not its memory."""
    return [name for name, _ in options.resource if "/" in name]


def resources(options: PodOptions) -> dict[str, str]:
    """What a container asks for beside CPU, memory and GPUs."""
    disk = {"ephemeral-storage": options.ephemeral_storage} if options.ephemeral_storage else {}
    return {**disk, **dict(options.resource)}


def env(options: PodOptions) -> list[Object]:
    """The variables that are one key each of a Secret or a ConfigMap."""
    return [
        {"name": name, "valueFrom": {source: {"name": of, "key": key}}}
        for source, texts in (
            ("secretKeyRef", options.env_from_secret),
            ("configMapKeyRef", options.env_from_configmap),
        )
        for name, of, key, _ in (_match(ENV_FROM, text) for text in texts)
        if name
    ]


def env_from(options: PodOptions) -> Object:
    """The field of a container for Secrets and ConfigMaps of which every key is a variable."""
    found = [
        {source: {"name": whole}}
        for source, texts in (
            ("secretRef", options.env_from_secret),
            ("configMapRef", options.env_from_configmap),
        )
        for *_, whole in (_match(ENV_FROM, text) for text in texts)
        if whole
    ]
    return {"envFrom": found} if found else {}


def volumes(options: PodOptions) -> list[Object]:
    """The volumes of mounted Secrets and ConfigMaps."""
    return [
        *(
            {"name": f"secret-{at}", "secret": {"secretName": name}}
            for at, (name, _) in enumerate(options.mount_secret)
        ),
        *(
            {"name": f"configmap-{at}", "configMap": {"name": name}}
            for at, (name, _) in enumerate(options.mount_configmap)
        ),
    ]


def mounts(options: PodOptions) -> list[Object]:
    """Where a container has them."""
    pairs = (("secret", options.mount_secret), ("configmap", options.mount_configmap))
    return [
        {"name": f"{kind}-{at}", "mountPath": path, "readOnly": True}
        for kind, mounted in pairs
        for at, (_, path) in enumerate(mounted)
    ]


def labels(options: PodOptions) -> dict[str, str]:
    """What a pod has beside the labels of its job."""
    out = {"sidecar.istio.io/inject": "false", "istio.io/dataplane-mode": "none"}
    return out if options.no_istio else {}


def egress(options: PodOptions) -> list[Object]:
    """The rules of a NetworkPolicy for each network that the pods may reach."""
    rules: list[Object] = []
    for text in options.egress:
        if text != OWN:
            network, port = network_and_port(text)
            ports = [{"protocol": "TCP", "port": port}] if port else []
            rules.append(
                {"to": [{"ipBlock": {"cidr": network}}], **({"ports": ports} if ports else {})}
            )
    return rules


def network_and_port(text: str) -> tuple[str, int | None]:
    """The network of an --egress in CIDR form, and its port; raises ValueError."""
    import ipaddress

    match = re.fullmatch(EGRESS, text)
    if not match:
        raise ValueError("it is not of the form CIDR or CIDR:PORT")
    bracketed, v4, port, v6 = match.groups()
    network = str(ipaddress.ip_network(bracketed or v4 or v6))
    if port and not 1 <= int(port) <= 65535:
        raise ValueError(f"the port {port} is not within 1 and 65535")
    return network, int(port) if port else None


def _match(pattern: str, text: str) -> tuple[Any, ...]:
    match = re.fullmatch(pattern, text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form {pattern}")
    return match.groups()
