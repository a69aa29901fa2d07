"""Options for a cluster's requirements of its pods, and the fields that they set.

Without an option its field is not set. Fields without an option are set by `--patch`.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gptddp.k8s.objects import Object
from gptddp.k8s.render import forms
from gptddp.k8s.render.fields import Kind, option
from gptddp.k8s.render.forms import COMPANIONS as COMPANIONS  # exported with the options

Pairs = tuple[tuple[str, str], ...]
Texts = tuple[str, ...]

_MIG = r"nvidia\.com/mig-"


@dataclass(frozen=True)
class PodOptions:
    """A cluster's requirements of its pods. Each field is a flag of `submit` and a key of [job]."""

    service_account: str | None = option(
        None, "existing ServiceAccount of the pods [default: `submit` creates one]", metavar="NAME"
    )
    image_pull_secret: Texts = option(
        (), "Secret of the image's registry; repeatable", Kind.LIST, "SECRET"
    )
    node_selector: Pairs = option(
        (), "label of the nodes to run on; repeatable", Kind.TABLE, "KEY=VALUE"
    )
    toleration: Texts = option(
        (),
        "taint that the pods tolerate, besides those of their devices; repeatable",
        Kind.LIST,
        "KEY[=VALUE][:EFFECT]",
    )
    resource: Pairs = option(
        (),
        "more resources per pod: vpc.amazonaws.com/efa=4 or hugepages-2Mi=1Gi; repeatable",
        Kind.QUANTITIES,
        "NAME=AMOUNT",
    )
    priority_class: str | None = option(None, "PriorityClass of the pods", metavar="NAME")
    env_from_secret: Texts = option(
        (),
        "environment variable from a key of a Secret, or one for each key; repeatable",
        Kind.LIST,
        "NAME=SECRET/KEY|SECRET",
    )
    without: Texts = option(
        (),
        f"do not create an object beside the job: {', '.join(COMPANIONS)}; repeatable",
        Kind.LIST,
        "KIND",
    )
    patch: Mapping[str, Any] | None = option(
        None,
        "YAML file with a part of the PyTorchJob to merge into it; in job.toml also a table",
        Kind.TREE,
        "FILE",
    )


FIELDS = {f.name: f for f in dataclasses.fields(PodOptions)}
# Fields for a PyTorchJob or its companions; the pods of short Jobs do not take them.
_OF_JOBS = ("resource", "without")
OF_ANY_POD = {name: field for name, field in FIELDS.items() if name not in _OF_JOBS}
_OF_PROCESSES = ("env_from_secret", "patch")  # fields with an effect on processes, with --local
NOTHING = PodOptions()


def of_any_pod(options: PodOptions) -> PodOptions:
    """The options that have a meaning for a pod of a short Job."""
    return PodOptions(**{name: getattr(options, name) for name in OF_ANY_POD})


def without_meaning_locally(options: PodOptions) -> list[str]:
    """The given fields that have no meaning for a process on this machine."""
    given = [name for name in FIELDS if getattr(options, name) != getattr(NOTHING, name)]
    return [name for name in given if name not in _OF_PROCESSES]


# -- fields of the pod's spec --------------------------------------------------------------------


def account(options: PodOptions, own: str | None) -> Object:
    """The pods' account: the given one, else `own`, else (no field) the namespace's default."""
    name = options.service_account or (own if "serviceaccount" not in options.without else None)
    return {"serviceAccountName": name} if name else {}


def scheduling(options: PodOptions) -> Object:
    """Fields for nodes, priority and image pulls."""
    fields: Object = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secret],
        "nodeSelector": dict(options.node_selector),
        "priorityClassName": options.priority_class,
    }
    return {key: value for key, value in fields.items() if value}


def tolerations(options: PodOptions, devices: Iterable[str]) -> list[Object]:
    """The given tolerations, and tolerations for nodes with these devices.

    A taint of the resource's name keeps nodes with devices free for pods that need them: on GKE,
    AKS, EKS with Karpenter and by hand. ExtendedResourceToleration adds the same.
    """
    found = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in _taints(devices)]
    for text in options.toleration:
        key, value, effect = _match(forms.TOLERATION, text)
        wanted = {"key": key, "operator": "Exists" if value is None else "Equal"}
        wanted |= {} if value is None else {"value": value}
        wanted |= {"effect": effect} if effect else {}
        found += [wanted] if wanted not in found else []
    return found


def _taints(devices: Iterable[str]) -> Iterator[str]:
    for name in devices:
        yield name
        if re.match(_MIG, name):  # the taint has the name of the whole GPU
            yield "nvidia.com/gpu"


def devices(options: PodOptions) -> list[str]:
    """The names of further resources that are devices of a node, not its memory."""
    return [name for name, _ in options.resource if "/" in name]


def env(options: PodOptions) -> list[Object]:
    """The variables from one key of a Secret each."""
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
        for name, secret, key, _ in (
            _match(forms.ENV_FROM, text) for text in options.env_from_secret
        )
        if name
    ]


def env_from(options: PodOptions) -> Object:
    """The field of a container for Secrets whose keys all become variables."""
    secrets = [text for text in options.env_from_secret if "=" not in text]
    return {"envFrom": [{"secretRef": {"name": it}} for it in secrets]} if secrets else {}


def _match(pattern: str, text: str) -> tuple[Any, ...]:
    match = re.fullmatch(pattern, text)
    assert match, f"{text!r} is not of the form {pattern}"  # the option's form has been checked
    return match.groups()
