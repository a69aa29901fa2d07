"""Own code of a job on a cluster: what differs from the code that runs, and what is left of old."""

from collections.abc import Sequence

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.act import lifecycle
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object
from gptddp.k8s.render import code_volume
from gptddp.k8s.render.difference import NONE, Difference
from gptddp.launch import bundle

_KIND = "ConfigMap"
_SELECTOR = f"app.kubernetes.io/component={code_volume.COMPONENT}"
_OF_CODE = ("args[--code]", ".volumes[code].", ".volumeMounts[code].")
_DIGITS = 12  # of a hash that is shown


def differences(
    cluster: Cluster, live: Object, objects: Sequence[Object], found: Sequence[Difference]
) -> list[Difference]:
    """What differs between two jobs (`found`), with the files in the place of the code's hash.

    `objects`: those of the job that is wanted, which is the last.
    """
    rest = [it for it in found if not any(part in it.path for part in _OF_CODE)]
    if not any(_OF_CODE[0] in it.path for it in found):
        return list(found)
    old, new = (code_volume.hash_of(job) for job in (live, objects[-1]))
    return [
        Difference("code", (old or NONE)[:_DIGITS], (new or NONE)[:_DIGITS]),
        *_files(cluster, live, objects),
        *rest,
    ]


def _files(cluster: Cluster, live: Object, objects: Sequence[Object]) -> list[Difference]:
    """Each file that differs; nothing where the code of the job that exists cannot be seen."""
    wanted = [it for it in objects if it["kind"] == _KIND]
    there = code_volume.config_maps_of(live)
    if not there or not wanted:
        return []
    try:
        found = [cluster.get(_KIND, name) or {} for name in there]
        old, new = code_volume.files_in(found), code_volume.files_in(wanted)
    except (ClusterError, ValueError):  # they are only a help
        return []
    return [
        Difference(f"code[{path}]", _hash(old.get(path)), _hash(new.get(path)))
        for path in bundle.changes(old, new)
    ]


def _hash(file: bundle.File | None) -> str:
    return bundle.sha256({"": file})[:_DIGITS] if file else NONE


def check(cluster: Cluster, live: Object, wanted: Object) -> None:
    """Raise ConfigError for a ConfigMap of this name that holds something else.

    The bytes of an archive may differ where the files do not, as another zlib has packed them.
    """
    try:
        same = live.get("binaryData") == wanted["binaryData"] or (
            code_volume.files_in([live]) == code_volume.files_in([wanted])
        )
    except ValueError:  # a part, or no archive
        same = False
    if not same:
        name = live["metadata"]["name"]
        raise ConfigError(
            f"the ConfigMap {name} does not hold the code that it is named after: `kubectl delete "
            f"configmap {name} -n {cluster.namespace}`, and submit again"
        )


def sweep(cluster: Cluster, job: Object) -> None:
    """Delete the code of earlier submits of this job's name that have come to no job.

    What this user may not see or delete stays: it is in nobody's way.
    """
    if not (keep := code_volume.config_maps_of(job)):
        return
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    try:
        for it in cluster.find(_KIND, f"{lifecycle.ours(name)},{_SELECTOR}"):
            owners = [owner["uid"] for owner in it["metadata"].get("ownerReferences") or []]
            if it["metadata"]["name"] not in keep and uid not in owners:
                cluster.delete(_KIND, it["metadata"]["name"])
    except ClusterError as error:
        if error.status != 403:
            raise
