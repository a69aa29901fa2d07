"""The same job again, from the one on the cluster: its run goes on, or a new one begins."""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptddp import flags
from gptddp.errors import ConfigError
from gptddp.k8s.act import lifecycle
from gptddp.k8s.act.queueing import as_submitted
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, worker_pod_spec
from gptddp.k8s.observe import queue, why
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render import companions, manifest
from gptddp.k8s.render.difference import SERVER_SIDE
from gptddp.k8s.render.manifest import SPEC_HASH
from gptddp.launch import bundle

_KEPT = ("name", "namespace", "labels", "annotations")  # of metadata
_RUN_DIR = flags.flag("run_dir")
_NAMES = ("app.kubernetes.io/instance", companions.JOB_NAME, "serviceAccountName")


def objects(
    cluster: Cluster, name: str, new_name: str, args: Sequence[str], image: str | None
) -> list[Object]:
    """The objects of a job that exists, as a job of the new name, or of the same; the job is last.

    `args`: of the trainer, over those that it has. Raises NotFoundError, ConfigError for one that
    is not ours, or for arguments that it cannot have; ClusterError.
    """
    live = cluster.job(name)
    if not lifecycle.is_ours(live, name):
        raise ConfigError(
            f"the PyTorchJob {name} was not made by gptddp-k8s: `kubectl get pytorchjob {name} -n "
            f"{cluster.namespace} -o yaml` prints it, to be changed and created again"
        )
    found = [_cleaned(it) for it in [*_beside(cluster, live), as_submitted(cluster, live)]]
    job = found[-1]
    changed = bool(args or image or new_name != name)
    (container, *_), settings = worker_pod_spec(job)["containers"], container_args(job, args)
    if args:
        container["args"] = settings
    if image:
        container["image"] = image
    if new_name != name:
        found = [_renamed(it, name, new_name) for it in found]
    if changed:
        found[-1] = _stamped_anew(found[-1])
    return found


def _stamped_anew(job: Object) -> Object:
    """The job with the hash, and the rendezvous, of what it is now."""
    meta, policy = job["metadata"], job["spec"]["elasticPolicy"]
    notes = {k: v for k, v in (meta.pop("annotations", None) or {}).items() if k != SPEC_HASH}
    meta |= {"annotations": notes} if notes else {}
    policy.pop("rdzvId", None)
    return manifest.stamp(job)


def _beside(cluster: Cluster, job: Object) -> Iterator[Object]:
    """What goes with the job: its companions, and the ConfigMaps that its pods have code from."""
    name = job["metadata"]["name"]
    mounted = str(worker_pod_spec(job).get("volumes") or [])
    for it in cluster.find("ConfigMap", lifecycle.ours(name)):
        if repr(it["metadata"]["name"]) in mounted:
            yield {**it, "apiVersion": "v1", "kind": "ConfigMap"}
    for kind in companions.KINDS:
        live = cluster.get(kind, name)
        if live is not None and lifecycle.is_ours(live, name):
            yield live


def container_args(job: Object, args: Sequence[str]) -> list[str]:
    """The arguments of the job's pods, with others of the trainer over them."""
    given = list(worker_pod_spec(job)["containers"][0].get("args") or [])
    archive, own = bundle.split(given)
    asked = flags.from_args(args, prog="gptddp-k8s rerun ... --")
    for field in ("data", "run_dir"):
        if getattr(asked, field):
            fix = "--name begins another run" if field == "run_dir" else "submit takes --data"
            raise ConfigError(f"{flags.flag(field)} after --: the job decides where it lies; {fix}")
    made = flags.from_args([*own, *args], prog="gptddp-k8s rerun ... --")
    return [*given[: len(given) - len(own)], *flags.to_args(flags.given(made))]


# -- from a live object to one that can be created ------------------------------------------------


def _cleaned(live: Object) -> Object:
    """An object without what the server and the controllers have written into it."""
    it = copy.deepcopy({key: live[key] for key in live if key != "status"})
    meta = {key: it["metadata"][key] for key in _KEPT if it["metadata"].get(key)}
    notes = meta.get("annotations") or {}
    meta["annotations"] = {k: v for k, v in notes.items() if not k.startswith("kubectl.")}
    it["metadata"] = {key: value for key, value in meta.items() if value}
    if it["kind"] == JOB:
        it["spec"].get("runPolicy", {}).pop("suspend", None)
        return dict(_without_defaults(it))
    if it["kind"] == "ServiceAccount":
        it.pop("secrets", None)
        it.pop("imagePullSecrets", None)
    return it


def _without_defaults(value: Any) -> Any:
    """Without what the server fills in: then the job has the hash of the same options."""
    if isinstance(value, dict):
        return {
            key: _without_defaults(item)
            for key, item in value.items()
            if not (key in SERVER_SIDE and SERVER_SIDE[key] == item)
        }
    return [_without_defaults(item) for item in value] if isinstance(value, list) else value


def _renamed(value: Any, old: str, new: str, key: str = "") -> Any:
    """The same with the job's name wherever it is the job's, and not a claim's or a label's."""
    if isinstance(value, dict):
        made = {k: _renamed(item, old, new, k) for k, item in value.items()}
        if key in ("metadata", "secretKeyRef") and made.get("name") == old:
            made["name"] = new
        if key in ("metadata", "configMap") and _is_code(made.get("name"), old):
            made["name"] = new + made["name"][len(old) :]
        return made
    if isinstance(value, list):
        items = [_renamed(item, old, new, key) for item in value]
        if key == "args" and _RUN_DIR in items[:-1]:
            at = items.index(_RUN_DIR) + 1
            items[at] = f"{items[at].rpartition('/')[0]}/{new}"
        return items
    return new if key in _NAMES and value == old else value


def _is_code(name: Any, job: str) -> bool:
    return isinstance(name, str) and name.startswith(f"{job}-code-")


# -- instead of the one that is there ------------------------------------------------------------


def check_ended(cluster: Cluster, name: str, args: Sequence[str]) -> None:
    """Raise ConfigError for a job that cannot make room: it has not ended, or has no more to do."""
    job, at = cluster.job(name), cluster.flags
    state, another = (
        why.state(job, queue.fetch(cluster, job)),
        "`--name NEW` begins a run of its own with the same settings",
    )
    if state == why.SUSPENDED:
        raise ConfigError(f"the job {name} is suspended: `gptddp-k8s resume {name}{at}`; {another}")
    if state not in why.FINAL:
        raise ConfigError(
            f"the job {name} is {state}: `gptddp-k8s delete {name}{at}` ends it first; {another}"
        )
    if state == why.SUCCEEDED and not args:
        raise ConfigError(
            f"the job {name} has succeeded, and its run is at its end: `gptddp-k8s rerun {name}{at}"
            f" -- --steps N` goes on with it; {another}"
        )


def make_room(cluster: Cluster, objects: Sequence[Object], say: Say) -> Path:
    """Delete the job; the objects that are to take its place are kept in a file until they are.

    Whoever is killed in between has lost nothing: the file is named first.
    """
    name = objects[-1]["metadata"]["name"]
    with tempfile.NamedTemporaryFile(
        "w", prefix=f"{name}-", suffix=".yaml", delete=False, encoding="utf-8"
    ) as file:
        file.write(manifest.to_yaml(objects))
    say(f"until the job is there again, {file.name} has it, for `kubectl create -f`")
    for _ in lifecycle.delete(cluster, name, cluster.job(name), say):
        pass
    return Path(file.name)
