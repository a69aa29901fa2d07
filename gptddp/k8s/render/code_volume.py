"""How the pods of a job get its own code: from an immutable ConfigMap that is named after its hash.

Large code is in several, which the pods see as one folder: none has to bring it to a volume first.
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


def args(code: "Code | None") -> list[str]:
    """What the launcher is told, before the trainer's arguments."""
    return [OPTION, f"{MOUNT}/{code.sha256}{SUFFIX}"] if code else []


def volumes(job: str, code: "Code | None") -> list[Object]:
    """The volume of a job of this name: its ConfigMap, or several as one folder."""
    if code is None:
        return []
    maps = [{"configMap": {"name": name}} for name in _names(job, code)]
    return [{"name": VOLUME, **(maps[0] if len(maps) == 1 else {"projected": {"sources": maps}})}]


def mounts(code: "Code | None") -> list[Object]:
    return [{"name": VOLUME, "mountPath": MOUNT, "readOnly": True}] if code else []


def objects(job: Object, code: "Code | None") -> list[Object]:
    """What has to be there before the job: the ConfigMaps with the archive."""
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
            "immutable": True,  # no node has to watch it
            "binaryData": {key: base64.b64encode(part).decode()},
        }
        for name, key, part in zip(_names(meta["name"], code), keys, code.parts, strict=True)
    ]


def _names(job: str, code: "Code") -> list[str]:
    """Of the ConfigMaps: a changed code has others, and so a half-done submit mixes nothing."""
    name, parts = f"{job}-code-{code.sha256[:10]}", len(code.parts)
    return [f"{name}-{part}" for part in range(parts)] if parts > 1 else [name]


def before_command(pod_spec: Mapping[str, Any]) -> list[str]:
    """The words that let another program run on the code of these pods; none where they have none.

    They stand before its own command.
    """
    archive = _archive_of(pod_spec)
    return ["python", "-m", "gptddp.launch.overlay", OPTION, str(archive)] if archive else []


def hash_of(job: Object) -> str | None:
    """The hash of the code that a job runs; None for the image's own."""
    archive = _archive_of(worker_pod_spec(job))
    return archive.name.removesuffix(SUFFIX) if archive else None


def _archive_of(pod_spec: Mapping[str, Any]) -> Path | None:
    containers = pod_spec.get("containers") or [{}]
    return bundle.split(containers[0].get("args") or [])[0]


def config_maps_of(job: Object) -> list[str]:
    """The names of the ConfigMaps that a job has its code from."""
    for volume in worker_pod_spec(job).get("volumes") or []:
        if volume["name"] == VOLUME:
            sources = (volume.get("projected") or {}).get("sources") or [volume]
            return [str(it["configMap"]["name"]) for it in sources if "configMap" in it]
    return []


def files_in(config_maps: Sequence[Object]) -> bundle.Files:
    """The files in the ConfigMaps of one code. Raises ValueError where they hold no archive."""
    found = {k: data for it in config_maps for k, data in (it.get("binaryData") or {}).items()}
    parts = [base64.b64decode(data, validate=True) for _, data in sorted(found.items())]
    return bundle.unpack(b"".join(parts))
