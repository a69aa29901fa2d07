"""`--patch`: a part of a PyTorchJob that is merged into the rendered one.

Objects are merged by key, and null removes a key. Lists whose items have a name are merged by it
(`mountPath` of mounts, `key` of tolerations); any other list is replaced, also by an empty list.
"""

from collections.abc import Mapping
from typing import Any

from gptddp.errors import ConfigError
from gptddp.k8s.objects import Object
from gptddp.k8s.render.problem import Problem

_KEYS = ("mountPath", "name", "key")  # keys of list items; mountPath first: mounts have names too
_WORKER = "spec.pytorchReplicaSpecs.Worker"
# Fields that a patch cannot change: an option sets and checks them, or they are always the same.
_FIXED = {
    "apiVersion": "leave it out",
    "kind": "leave it out",
    "metadata.name": "use --name",
    "metadata.namespace": "use --namespace",
    "spec.nprocPerNode": "use --nproc-per-node",
    "spec.elasticPolicy.minReplicas": "use --min",
    "spec.elasticPolicy.maxReplicas": "use --max",
    f"{_WORKER}.replicas": "use --replicas",
    f"{_WORKER}.template.spec.containers.pytorch.image": "use --image",
    f"{_WORKER}.template.spec.containers.pytorch.args": "use the options after --",
}


def apply(job: Object, patch: Mapping[str, Any]) -> Object:
    """Merge the patch into the PyTorchJob; raises ConfigError if that is impossible."""
    merged: Object = _merge(job, patch, "")
    for path, fix in _FIXED.items():
        if value_at(merged, path) != value_at(job, path):
            raise _refused(path, "a patch cannot change it", fix)
    if not isinstance(merged["metadata"].get("annotations", {}), dict):
        raise _refused("metadata.annotations", "it is not a table", "use keys and values")
    labels = merged["metadata"].get("labels") or {}
    for key, value in job["metadata"]["labels"].items():
        if labels.get(key) != value:
            raise _refused(f"metadata.labels.{key}", "gptddp-k8s finds its jobs by it", "keep it")
    return merged


def _merge(old: Any, new: Any, path: str) -> Any:
    for kind, word in ((dict, "a table"), (list, "a list"), ((str, int), "one value")):
        if isinstance(old, kind) and not isinstance(new, kind):
            raise _refused(path, f"it is {word}, and the patch has {new!r}", f"use {word}")
    if isinstance(new, Mapping):
        return _merge_tables(old or {}, new, path)
    if isinstance(new, list):
        return _merge_lists(old or [], new, path)
    return new


def _merge_tables(old: Object, new: Mapping[str, Any], path: str) -> Object:
    merged = dict(old)
    for key, value in new.items():
        where = f"{path}.{key}".removeprefix(".")
        if key.startswith("$"):
            raise _refused(where, "a patch has no directives", "use null to remove a key")
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(old.get(key), value, where)
    return merged


def _merge_lists(old: list[Any], new: list[Any], path: str) -> list[Any]:
    items = [*old, *new]
    named = (key for key in _KEYS if all(isinstance(it, dict) and key in it for it in items))
    key = next(named, None) if old and new else None
    merged = [] if key is None else list(old)
    for item in new:
        same = (at for at, it in enumerate(old) if key is not None and it[key] == item[key])
        at = next(same, len(merged))
        before = merged[at] if at < len(merged) else None
        where = f"{path}[{at}]" if key is None else f"{path}.{item[key]}"
        merged[at : at + 1] = [_merge(before, item, where)]
    for item in merged if old and "name" in old[0] else ():
        if not (isinstance(item, dict) and "name" in item):
            raise _refused(path, f"{item!r} has no name to merge it by", "add its name")
    return merged


def value_at(job: Mapping[str, Any], path: str) -> Any:
    """The value at a path, with list items by name; None if there is none."""
    value: Any = job
    for part in path.split("."):
        if isinstance(value, list):
            tables = (item for item in value if isinstance(item, Mapping))
            value = next((item for item in tables if item.get("name") == part), None)
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _refused(field: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(str(Problem("patch", f"--patch {field}", rule, fix)))
