"""How the pods of a job get its own code: from an immutable ConfigMap that is named after its hash.

The job names the code by its hash, in the first argument of its pods. So other code is another job,
and a pod whose image is too old to know the argument ends with an error, not with the image's code.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptddp.k8s.objects import Object, worker_pod_spec
from gptddp.launch import bundle
from gptddp.launch.bundle import OPTION, SUFFIX

if TYPE_CHECKING:
    from gptddp.k8s.render.code import Code

MOUNT = "/code"
VOLUME = "code"
COMPONENT = "code"  # label
_MOST_TO_APPLY = 250 << 10  # `kubectl apply` keeps it in an annotation, which has 256 KiB at most
_DIGITS = 10  # of the hash, in a name


def args(code: "Code | None") -> list[str]:
    """What the launcher is told, before the trainer's arguments."""
    return [OPTION, f"{MOUNT}/{code.sha256}{SUFFIX}"] if code else []


def volumes(name: str, code: "Code | None") -> list[Object]:
    """The volume of a job of this name."""
    return [{"name": VOLUME, "configMap": {"name": _name(name, code)}}] if code else []


def mounts(code: "Code | None") -> list[Object]:
    return [{"name": VOLUME, "mountPath": MOUNT, "readOnly": True}] if code else []


def objects(job: Object, code: "Code | None") -> list[Object]:
    """What has to be there before the job: the ConfigMap with the archive."""
    if code is None:
        return []
    meta = job["metadata"]
    namespace = {"namespace": meta["namespace"]} if "namespace" in meta else {}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": _name(meta["name"], code),
                **namespace,
                "labels": {**meta["labels"], "app.kubernetes.io/component": COMPONENT},
            },
            "immutable": True,  # no node has to watch it
            "binaryData": {code.sha256 + SUFFIX: base64.b64encode(code.archive).decode()},
        }
    ]


def _name(job: str, code: "Code") -> str:
    return f"{job}-code-{code.sha256[:_DIGITS]}"


def notes(objects: Sequence[Object]) -> list[str]:
    """What whoever pipes the objects into kubectl has to know."""
    sizes = [len(data) for it in objects for data in (it.get("binaryData") or {}).values()]
    if not any(size > _MOST_TO_APPLY for size in sizes):
        return []
    return [
        f"the ConfigMap with the code has {max(sizes) >> 10} KiB, too many for `kubectl apply`: "
        "pipe this into `kubectl apply --server-side -f -`, or `kubectl create -f -`"
    ]


def of_pods(pod_spec: Mapping[str, Any]) -> tuple[list[str], list[Object], list[Object]]:
    """What another program needs to run on the code of these pods: the words before its command,
    its volumes and its mounts; nothing where they have none."""
    if (archive := _archive_of(pod_spec)) is None:
        return [], [], []
    (container, *_), of = pod_spec["containers"], pod_spec["volumes"]
    return (
        ["python", "-m", "gptddp.launch.overlay", OPTION, str(archive)],
        [volume for volume in of if volume["name"] == VOLUME],
        [mount for mount in container["volumeMounts"] if mount["name"] == VOLUME],
    )


def hash_of(job: Object) -> str | None:
    """The hash of the code that a job runs; None for the image's own."""
    archive = _archive_of(worker_pod_spec(job))
    return archive.name.removesuffix(SUFFIX) if archive else None


def _archive_of(pod_spec: Mapping[str, Any]) -> Path | None:
    containers = pod_spec.get("containers") or [{}]
    return bundle.split(containers[0].get("args") or [])[0]


def config_map_of(job: Object) -> str | None:
    """The name of the ConfigMap that a job has its code from."""
    for volume in worker_pod_spec(job).get("volumes") or []:
        if volume["name"] == VOLUME and "configMap" in volume:
            return str(volume["configMap"]["name"])
    return None


def files_in(config_map: Object) -> bundle.Files:
    """The files in a ConfigMap of code. Raises ValueError where it holds no such archive."""
    data = config_map.get("binaryData") or {}
    if len(data) != 1:
        raise ValueError(f"it has {len(data)} fields in binaryData instead of one")
    return bundle.unpack(base64.b64decode(next(iter(data.values())), validate=True))
