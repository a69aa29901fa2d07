"""Brings a job's own code to its pods: in an immutable ConfigMap that is named after its hash.

Large code is in several ConfigMaps, which the pods see as one folder; nobody copies it to a volume.
The first argument of the pods names the code by its hash. So a job with other code is another job,
and a pod whose image is too old to know the argument fails instead of running the image's code.
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


def args(code: "Code | None") -> list[str]:
    """The launcher's arguments, before the trainer's."""
    return [OPTION, f"{MOUNT}/{code.sha256}{SUFFIX}"] if code else []


def volumes(job: str, code: "Code | None") -> list[Object]:
    """The volume with the code of the job of this name: one ConfigMap, or several as one folder."""
    if code is None:
        return []
    maps = [{"configMap": {"name": name}} for name in _names(job, code)]
    return [{"name": VOLUME, **(maps[0] if len(maps) == 1 else {"projected": {"sources": maps}})}]


def mounts(code: "Code | None") -> list[Object]:
    return [{"name": VOLUME, "mountPath": MOUNT, "readOnly": True}] if code else []


def objects(job: Object, code: "Code | None") -> list[Object]:
    """The ConfigMaps with the archive, which must exist before the job."""
    if code is None:
        return []
    meta = job["metadata"]
    place = {"namespace": meta["namespace"]} if "namespace" in meta else {}
    labels = {**meta["labels"], "app.kubernetes.io/component": COMPONENT}
    keys = bundle.names(code.sha256 + SUFFIX, len(code.parts))
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, **place, "labels": labels},
            "immutable": True,  # so nodes need not watch it
            "binaryData": {key: base64.b64encode(part).decode()},
        }
        for name, key, part in zip(_names(meta["name"], code), keys, code.parts, strict=True)
    ]


def _names(job: str, code: "Code") -> list[str]:
    """The ConfigMaps' names: they contain the hash, so an interrupted submit mixes no versions."""
    name, parts = f"{job}-code-{code.sha256[:10]}", len(code.parts)
    return [f"{name}-{part}" for part in range(parts)] if parts > 1 else [name]


def before_command(pod_spec: Mapping[str, Any]) -> list[str]:
    """The words before another program's command that make it run with the code of these pods.

    Empty if the pods have no own code.
    """
    archive = _archive_of(pod_spec)
    return ["python", "-m", "gptddp.launch.overlay", OPTION, str(archive)] if archive else []


def hash_of(job: Object) -> str | None:
    """The hash of a job's own code; None if it runs the image's."""
    archive = _archive_of(worker_pod_spec(job))
    return archive.name.removesuffix(SUFFIX) if archive else None


def _archive_of(pod_spec: Mapping[str, Any]) -> Path | None:
    containers = pod_spec.get("containers") or [{}]
    return bundle.split(containers[0].get("args") or [])[0]


def config_maps_of(job: Object) -> list[str]:
    """The names of the ConfigMaps with a job's code."""
    for volume in worker_pod_spec(job).get("volumes") or []:
        if volume["name"] == VOLUME:
            sources = (volume.get("projected") or {}).get("sources") or [volume]
            return [str(it["configMap"]["name"]) for it in sources if "configMap" in it]
    return []


def files_in(config_maps: Sequence[Object]) -> bundle.Files:
    """The files in the ConfigMaps of a job's code. Raises ValueError if they hold no archive."""
    found = {k: data for it in config_maps for k, data in (it.get("binaryData") or {}).items()}
    parts = [base64.b64decode(data, validate=True) for _, data in sorted(found.items())]
    return bundle.unpack(b"".join(parts))
