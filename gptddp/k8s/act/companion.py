"""Creates or updates one object beside a job, by server-side apply."""

from gptddp.errors import ConfigError
from gptddp.k8s.act.failure import REFUSED
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object, is_ours, resource
from gptddp.k8s.render import companions


def apply(
    cluster: Cluster, wanted: Object, owner: Object | None = None, *, dry_run: bool = False
) -> tuple[Object | None, Object]:
    """Apply the companion; returns it before and after. With an owner it is deleted with the job.

    Raises ConfigError, without a change, if it is not ours; ClusterError.
    """
    kind, name, meta = wanted["kind"], wanted["metadata"]["name"], wanted["metadata"]
    what, job = resource(kind, name), meta["labels"]["app.kubernetes.io/instance"]
    if owner is not None:
        wanted = {**wanted, "metadata": {**meta, "ownerReferences": [reference(owner)]}}
    try:
        live = cluster.get(kind, name)
        if live is not None and not is_ours(live, job):
            raise ConfigError(f"the {what} exists, not created by gptddp-k8s: use another --name")
        if live is not None and wanted.get("immutable"):
            # Its name is the hash of its content; another zlib may compress it to other bytes.
            wanted = {**wanted, "binaryData": live.get("binaryData")}
        made = cluster.apply(wanted, dry_run=dry_run)
    except ClusterError as error:
        if error.status not in REFUSED or kind not in companions.KINDS:
            raise
        without = f"or submit without it: --without {kind.lower()}"
        raise ClusterError(f"{error}; {without}", error.status) from None
    if "deletionTimestamp" in made["metadata"]:
        raise ClusterError(f"the {what} is being deleted: try again when it is gone")
    return live, made


def reference(job: Object) -> Object:
    """A job as the owner of an object: it does not block the job's deletion."""
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": JOB,
        "name": job["metadata"]["name"],
        "uid": job["metadata"]["uid"],
        "controller": False,
        "blockOwnerDeletion": False,
    }
