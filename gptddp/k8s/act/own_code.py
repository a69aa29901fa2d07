"""A job's own code on a cluster: which files differ from the running code."""

from collections.abc import Sequence

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object
from gptddp.k8s.render import code_volume
from gptddp.k8s.render.difference import NONE, Difference
from gptddp.launch import bundle

_OF_CODE = ("args[--code]", ".volumes[code].", ".volumeMounts[code].")
_DIGITS = 12  # shown of a hash


def differences(
    cluster: Cluster, live: Object, objects: Sequence[Object], found: Sequence[Difference]
) -> list[Difference]:
    """The differences `found` between two jobs, with the differing files after the code's hash.

    `objects`: the objects of the wanted job, the job last.
    """
    rest = [it for it in found if not any(part in it.path for part in _OF_CODE)]
    if not any(_OF_CODE[0] in it.path for it in found):
        return rest
    old, new = (code_volume.hash_of(job) for job in (live, objects[-1]))
    code = Difference("code", (old or NONE)[:_DIGITS], (new or NONE)[:_DIGITS])
    return [code, *_files(cluster, live, objects), *rest]


def _files(cluster: Cluster, live: Object, objects: Sequence[Object]) -> list[Difference]:
    """Each file that differs; empty if the code of the existing job cannot be read."""
    wanted = [it for it in objects if it["kind"] == "ConfigMap"]
    there = code_volume.config_maps_of(live)
    if not there or not wanted:
        return []
    try:
        old = code_volume.files_in([cluster.get("ConfigMap", name) or {} for name in there])
    except (ClusterError, ValueError):  # the list of files is optional
        return []
    new = code_volume.files_in(wanted)
    return [
        Difference(f"code[{path}]", _hash(old.get(path)), _hash(new.get(path)))
        for path in bundle.changes(old, new)
    ]


def _hash(file: bundle.File | None) -> str:
    return bundle.sha256({"": file})[:_DIGITS] if file else NONE
