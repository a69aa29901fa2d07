"""The PersistentVolumeClaims that pods need: looked at before the pods are created."""

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object, volume_claims
from gptddp.k8s.observe.watcher import Say

# What mounts a volume read-only on its node too.
_READ_ONLY = {
    "data": "readOnly: true in the persistentVolumeClaim of the volume data, by --patch",
    "source": "--read-only-source",
}


def check(cluster: Cluster, pod_spec: Object, count: int, say: Say) -> None:
    """Raise ConfigError for claims that no pod can use: `count` pods of this spec would wait.

    Volumes of ours are named as the option of their claim.
    """
    read_only = {
        volume["name"]
        for volume in pod_spec.get("volumes") or []
        if (volume.get("persistentVolumeClaim") or {}).get("readOnly")
    }
    missing, at = [], cluster.flags
    for volume, claim in volume_claims(pod_spec):
        try:
            found = cluster.get("PersistentVolumeClaim", claim)
        except ClusterError as error:
            if error.status != 403:
                raise
            say(f"warning: cannot see whether the claim {claim} exists: {error}")
            continue
        if found is None:
            missing.append(
                f"no claim {claim}{_option(volume)} in the namespace {cluster.namespace}"
            )
        elif broken := _broken(found):
            raise ConfigError(
                f"the claim {claim}{_option(volume)} {broken}: `kubectl describe pvc {claim}{at}`"
                " says more; make it anew, or name another"
            )
        elif cannot_write(found, pod_spec, volume):
            say(
                f"warning: the claim {claim}{_option(volume)} is ReadOnlyMany, and the pods write "
                "to it; use ReadWriteMany"
            )
        elif volume in _READ_ONLY and volume not in read_only and _read_only(found):
            say(
                f"warning: the claim {claim} is ReadOnlyMany, and much storage mounts that only "
                f"with {_READ_ONLY[volume]}: add it if the pods wait for the volume"
            )
        elif count > 1 and not is_shared(found, volume):
            say(
                f"warning: the claim {claim} is {'/'.join(found['spec']['accessModes'])}: pods on"
                " other nodes than the first cannot mount it; use ReadWriteMany"
            )
    if missing:
        raise ConfigError(
            f"there is {' and '.join(missing)}: make one that is ReadWriteMany, or name another by "
            f"its option; `kubectl get pvc -n {cluster.namespace}` lists those that are there"
        )


def _option(volume: str) -> str:
    """The option that named the claim; a volume of --patch has none."""
    return f" (--{volume})" if volume in ("data", "runs", "source") else ""


def _read_only(claim: Object) -> bool:
    return bool(claim["spec"].get("accessModes") == ["ReadOnlyMany"])


def cannot_write(claim: Object, pod_spec: Object, volume: str) -> bool:
    """Is the claim for reading only, and mounted to be written?"""
    mounts = [it for c in pod_spec["containers"] for it in c.get("volumeMounts") or []]
    written = any(it["name"] == volume and not it.get("readOnly") for it in mounts)
    return written and _read_only(claim)


def is_shared(claim: Object, volume: str) -> bool:
    """May pods on several nodes mount it? The dataset's, which is only read, also ReadOnlyMany."""
    modes = claim["spec"].get("accessModes") or []
    return "ReadWriteMany" in modes or (volume == "data" and "ReadOnlyMany" in modes)


def _broken(claim: Object) -> str:
    """Why no pod will ever get the claim's volume; empty where one may."""
    if (claim.get("status") or {}).get("phase") == "Lost":
        volume = (claim.get("spec") or {}).get("volumeName") or "that it had"
        return f"is Lost: its volume {volume} is gone, with what was on it"
    return "is being deleted" if "deletionTimestamp" in claim["metadata"] else ""
