"""Lists the differences between an existing object and the wanted one, for a reader."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

_IDENTITY = ("name", "key", "mountPath", "containerPort")  # fields that identify items of a list
_LEFT_OUT = ("rdzvId", "suspend")  # a hash of the rest; a state that no option sets
# Fields that a server adds: no difference if the wanted job does not have them.
_SERVER_SIDE = {"protocol": "TCP", "creationTimestamp": None}
NONE = "(none)"


class Difference(NamedTuple):
    """One field that differs; `NONE`: that side does not have it."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Each field of labels and spec that differs, in the order of the new object."""
    before, after = dict(_leaves(_compared(old))), dict(_leaves(_compared(new)))
    return [
        Difference(path, str(before.get(path, NONE)), str(after.get(path, NONE)))
        for path in {**after, **before}
        if before.get(path, NONE) != after.get(path, NONE)
        and (field := path.rpartition(".")[2]) not in _LEFT_OUT
        and not (path not in after and before[path] == _SERVER_SIDE.get(field, NONE))
    ]


def scales_to(found: Sequence[Difference]) -> str:
    """The wanted number of pods if `scale` can set it on the old job, else "".

    `scale` changes neither bound, and the number must be within the old bounds.
    """
    size = {it.path.rpartition(".")[2]: it for it in found if it.path.lower().endswith("replicas")}
    wanted = size.get("replicas")
    if wanted is None or len(size) < len(found):
        return ""
    count = wanted.new
    low, high = (size[it].old if it in size else count for it in ("minReplicas", "maxReplicas"))
    return count if NONE not in (low, high) and int(low) <= int(count) <= int(high) else ""


def _compared(job: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: job[key] for key in job if key not in ("apiVersion", "kind", "status")}
    return {**rest, "metadata": {"labels": job["metadata"].get("labels") or {}}}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its path; items of a list by name if they have one, else by index."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for key, item in _flags(value) if path.endswith(".args") else _items(value):
            if item in ({}, []):  # not nothing: a NetworkPolicy's rule `{}` allows everything
                yield f"{path}[{key}]", item
            yield from _leaves(item, f"{path}[{key}]")
    elif value not in ({}, []) or path.endswith("emptyDir"):
        yield path, value


def _items(values: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for identity in _IDENTITY:
        if all(isinstance(item, Mapping) and identity in item for item in values):
            keys = [item[identity] for item in values]
            if len(set(keys)) == len(keys):
                return zip(keys, values, strict=True)
    return iter(enumerate(values))


def _flags(args: Sequence[str]) -> Iterator[tuple[Any, str]]:
    """`--flag value` pairs, so that an additional flag does not shift the others."""
    flags, values = args[::2], args[1::2]
    if len(flags) == len(values) and all(flag.startswith("--") for flag in flags):
        return zip(flags, values, strict=True)
    return iter(enumerate(args))
