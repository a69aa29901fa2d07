"""Kubernetes' strategic merge: a part of an object laid over the whole.

As `kubectl patch --type strategic` does it with the objects that kubectl knows: tables are merged,
null removes a key, and lists whose items have a name are merged by it. `$patch: delete` removes an
item, `$patch: replace` takes the patch alone, of a table or, as an item of its own, of a list.
`$retainKeys` keeps no other keys; `$setElementOrder` is read over, as a list keeps its order here.
What the patch wants to remove has to be there.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from gptddp.errors import ConfigError
from gptddp.flags import did_you_mean
from gptddp.k8s.objects import Object
from gptddp.k8s.render import names
from gptddp.k8s.render.names import JOB_ENV
from gptddp.k8s.render.problem import Problem

# The key of a list's items, by the list's field; any other list is replaced as a whole.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}
# Lists of which an item is its key and one source: another source takes the place of the old one.
_ONE_SOURCE = ("volumes", "env")
_DIRECTIVE, _RETAIN, _ORDER = "$patch", "$retainKeys", "$setElementOrder/"
_WORKER = "spec.pytorchReplicaSpecs.Worker"
# What has a flag that checks it, and that the rest of the manifest follows.
_FLAGS = {
    "metadata.name": "--name",
    "metadata.namespace": "--namespace",
    "spec.nprocPerNode": "--nproc-per-node",
    "spec.elasticPolicy.minReplicas": "--min",
    "spec.elasticPolicy.maxReplicas": "--max",
    f"{_WORKER}.replicas": "--replicas",
    f"{_WORKER}.template.spec.containers.pytorch.image": "--image",
    f"{_WORKER}.template.spec.containers.pytorch.args": "the options after --",
}
_MISSING = object()


def apply(job: Object, patch: Mapping[str, Any]) -> Object:
    """The PyTorchJob with the patch merged into it; raises ConfigError for what cannot be."""
    for key in ("apiVersion", "kind"):
        if patch.get(key, job[key]) != job[key]:
            raise _refused(key, f"it patches {patch[key]!r}", f"leave it out, or use {job[key]}")
    for key in patch:
        if key not in job:
            near = did_you_mean(key, job)
            fix = "begin it with metadata or spec, as the PyTorchJob does"
            raise _refused(key, f"a PyTorchJob has no {key!r}{near}", fix)
    merged: Object = _merge(job, patch, "")
    for path, flag in _FLAGS.items():
        if _at(merged, path) != _at(job, path):
            raise _refused(path, "it has an option of its own", f"use {flag}")
    if not isinstance(merged["metadata"].get("annotations", {}), dict):
        raise _refused("metadata.annotations", "it is no table", "use keys and values")
    for key, value in job["metadata"]["labels"].items():
        if merged["metadata"].get("labels", {}).get(key) != value:
            raise _refused(f"metadata.labels.{key}", "gptddp-k8s finds its jobs by it", "keep it")
    _check_variables(job, merged)
    return merged


def _check_variables(job: Object, merged: Object) -> None:
    """No variable by which a pod knows its part in the job, and no secret as plain text."""
    old, made = _variables(job), _variables(merged)
    for container, name in sorted(old.keys() - made.keys()):
        if re.fullmatch(JOB_ENV, name):
            rule = "the launcher needs it, and the patch removes it"
            raise _refused(f"{container}.env.{name}", rule, "keep it")
    for (container, name), item in made.items():
        where = f"{container}.env.{name}"
        if item == old.get((container, name)):
            continue
        if names.is_reserved(name):
            rule = "the operator, the launcher or the manifest sets it"
            raise _refused(where, rule, "leave it out")
        if "value" in item and names.is_secret(name, str(item["value"])):
            rule = "looks like a secret, which anyone may read in a manifest"
            raise _refused(where, rule, "use valueFrom.secretKeyRef, or --env-from-secret")


def _variables(job: Object) -> dict[tuple[str, str], Object]:
    """The variables of all containers, by container and name."""
    spec = _at(job, f"{_WORKER}.template.spec")
    return {
        (str(container.get("name")), item["name"]): item
        for field in ("initContainers", "containers")
        for container in spec.get(field) or []
        if isinstance(container, dict)
        for item in container.get("env") or []
        if isinstance(item, dict) and isinstance(item.get("name"), str)
    }


def _merge(old: Any, new: Any, path: str) -> Any:
    if isinstance(old, dict) and isinstance(new, Mapping):
        return _merge_tables(old, new, path)
    key = _KEYS.get(path.rpartition(".")[2])
    if isinstance(old, list) and isinstance(new, Sequence) and not isinstance(new, str) and key:
        return _merge_lists(old, new, path, key)
    for kind, word in ((dict, "a table"), (list, "a list")):
        if isinstance(old, kind) and not isinstance(new, kind):
            raise _refused(path, f"it is {word}, and the patch has {new!r}", f"use {word}")
    return _cleaned(new, path)


def _merge_tables(old: Object, new: Mapping[str, Any], path: str) -> Object:
    directive = new.get(_DIRECTIVE)
    if directive is not None and directive != "replace":
        fix = "use replace, or delete in an item of a list; null removes a key"
        raise _refused(f"{path}.{_DIRECTIVE}", f"{directive!r} has no meaning here", fix)
    if directive:
        return dict(_cleaned(new, path))
    result = dict(old)  # what the patch leaves alone is shared with the job
    for key, value in _fields(new, path).items():
        where = f"{path}.{key}" if path else key
        if value is not None:
            result[key] = _merge(old.get(key), value, where)
        elif key in result:
            del result[key]
        else:
            raise _nothing_to_remove(where, key, result)
    kept = new.get(_RETAIN)
    if kept is None:
        return result
    given = {key for key, value in _fields(new, path).items() if value is not None}
    if not isinstance(kept, list) or not given <= {*map(str, kept)}:
        fix = "list the keys that are to stay, those of the patch too"
        raise _refused(f"{path}.{_RETAIN}", f"{kept!r} is no list of them", fix)
    return {key: value for key, value in result.items() if key in kept}


def _fields(new: Mapping[str, Any], path: str) -> Object:
    """What a table of the patch says without its directives; raises ConfigError for one unknown."""
    fields = {k: v for k, v in new.items() if k not in (_DIRECTIVE, _RETAIN)}
    fields = {k: v for k, v in fields.items() if not k.startswith(_ORDER)}
    if odd := next((key for key in fields if key.startswith("$")), None):
        fix = f"known are {_DIRECTIVE}, {_RETAIN} and {_ORDER}LIST; give such a list as a whole"
        raise _refused(f"{path}.{odd}", "no such directive", fix)
    return fields


def _merge_lists(old: list[Any], new: Sequence[Any], path: str, key: str) -> list[Any]:
    result = {item.get(key): item for item in old}
    if {_DIRECTIVE: "replace"} in new:
        result, new = {}, [item for item in new if item != {_DIRECTIVE: "replace"}]
    for item in new:
        if not isinstance(item, Mapping) or not isinstance(item.get(key), str | int):
            raise _refused(path, f"an item of it has no {key}", f"add `{key}:` to each of them")
        name = item[key]
        where = f"{path}.{name}"
        if item.get(_DIRECTIVE) != "delete":
            before = result.get(name)
            if before and path.rpartition(".")[2] in _ONE_SOURCE:
                before = _of_one_source(before, _fields(item, where), key)
            result[name] = _merge(before, item, where)
        elif name in result:
            del result[name]
        else:
            raise _nothing_to_remove(where, str(name), {str(known): 0 for known in result})
    return list(result.values())


def _of_one_source(before: Object, item: Object, key: str) -> Object:
    """The old item, or where the new one has another source what the new one names to remove."""
    if before.keys() >= item.keys():
        return before
    return {k: v for k, v in before.items() if k == key or (k in item and item[k] is None)}


def _cleaned(new: Any, path: str) -> Any:
    """A part of the patch that is laid over nothing."""
    if isinstance(new, Mapping):
        if new.get(_DIRECTIVE) not in (None, "replace"):
            raise _refused(path, f"there is nothing to {new[_DIRECTIVE]}", "leave it out")
        kept = {key: value for key, value in _fields(new, path).items() if value is not None}
        return {key: _cleaned(value, f"{path}.{key}") for key, value in kept.items()}
    if not isinstance(new, list):
        return new
    return [_cleaned(item, path) for item in new if item != {_DIRECTIVE: "replace"}]


def _at(job: Object, path: str) -> Any:
    """The value at a path, whose list items are named by their key."""
    value: Any = job
    for part in path.split("."):
        if isinstance(value, list):
            value = next((item for item in value if item.get("name") == part), _MISSING)
        else:
            value = value.get(part, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _nothing_to_remove(where: str, name: str, there: Mapping[str, Any]) -> ConfigError:
    near = did_you_mean(name, there)
    return _refused(where, f"there is nothing to remove{near}", "`render` shows what there is")


def _refused(field: str, rule: str, fix: str) -> ConfigError:
    return ConfigError(str(Problem("patch", f"--patch {field}", rule, fix)))
