"""The structure of a PyTorchJob as the API server checks it: fields, types, what must be there.

`pytorchjob.json` has the types of the operator's CRD without its descriptions, each different one
once. It is made from the operator's module: tests/support/crd_types.py says how, and what it means.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gptddp.k8s.render import quantity
from gptddp.k8s.render.problem import Problem

Path_ = tuple[str | int, ...]  # keys and indices from the object to a value
Type = str | int  # a simple type's name, or the number of another one

_TABLE = Path(__file__).with_name("pytorchjob.json")
# The CRD's own pattern.
_QUANTITY = r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?(\d+(\.\d*)?|\.\d+))?"
_BOUNDS = {"int32": 2**31, "int64": 2**63, "integer": 2**63}
_MOST_KNOWN = 15  # fields that a message lists
_NEAR = 0.8  # how alike two names are of which one is surely meant for the other


def check(job: Mapping[str, Any]) -> list[Problem]:
    """Every field of a PyTorchJob that is unknown, missing, doubled or of another type."""
    return list(_check(len(_types()) - 1, job, ()))


def text(path: Sequence[str | int]) -> str:
    """A path as kubectl writes it: `spec.containers[0].name`, or `limits[nvidia.com/gpu]`."""
    plain = (isinstance(part, str) and re.fullmatch(r"[\w-]+|\[\]|\*", part) for part in path)
    parts = (f".{it}" if ok else f"[{it}]" for it, ok in zip(path, plain, strict=True))
    return "".join(parts).removeprefix(".")


@cache
def _types() -> list[Any]:
    types: list[Any] = json.loads(_TABLE.read_text("utf-8"))
    return types


def _fields(type: Type) -> dict[str, Type]:
    """The fields of an object's type, without their marks; none for any other type."""
    made = _types()[type] if isinstance(type, int) else None
    return {name.rstrip("!"): of for name, of in made.items()} if isinstance(made, dict) else {}


# -- the walk ------------------------------------------------------------------------------------


def _check(type: Type, value: Any, path: Path_) -> Iterator[Problem]:
    if isinstance(type, str):
        if wrong := _scalar(type, value):
            yield Problem("type", text(path), *wrong)
        return
    made = _types()[type]
    if isinstance(made, dict):
        yield from _object(type, value, path)
    elif made[0] == "map":
        if not isinstance(value, Mapping):
            yield Problem("type", text(path), *_wanted(value, "an object", "as in `key: value`"))
            return
        for key, item in value.items():
            if item is not None:
                yield from _check(made[1], item, (*path, key))
    else:
        yield from _list(made, value, path)


def _object(type: int, value: Any, path: Path_) -> Iterator[Problem]:
    """Its fields in their order; a null is as good as nothing, as for the API server."""
    fields = _fields(type)
    if not isinstance(value, Mapping):
        some = ", ".join(list(fields)[:4])
        yield Problem("type", text(path), *_wanted(value, "an object", f"its fields are {some}"))
        return
    for key, item in value.items():
        if key not in fields:
            field = text((*path, key))
            yield Problem("unknown-field", field, "unknown field", _meant(key, type, path))
        elif item is not None:
            yield from _check(fields[key], item, (*path, key))
    for name in _types()[type]:
        if name.endswith("!") and value.get(name[:-1]) is None:
            yield Problem("missing-field", text((*path, name[:-1])), "is missing", "add it")


def _list(made: Any, value: Any, path: Path_) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield Problem("type", text(path), *_wanted(value, "a list", _as_list(made, value)))
        return
    seen: dict[tuple[Any, ...], int] = {}
    for index, item in enumerate(value):
        yield from _check(made[1], item, (*path, index))
        if len(made) > 2 and isinstance(item, Mapping):
            named = {key: item.get(key, default) for key, default in made[2].items()}
            first = seen.setdefault(tuple(map(repr, named.values())), index)
            if first != index:
                what = ", ".join(f"{key} {value}" for key, value in named.items())
                rule = f"has the {what} of {text((*path, first))}"
                yield Problem("duplicate", text((*path, index)), rule, "remove or rename one")


def _as_list(made: Any, value: Any) -> str:
    if made[1] == "string" and isinstance(value, str):
        return f"write {json.dumps(value.split())}"
    keys = list(made[2]) if len(made) > 2 else [""]
    return f"begin each item with `- {keys[0]}{': ' if keys[0] else ''}`"


# -- one value -----------------------------------------------------------------------------------


def _scalar(type: str, value: Any) -> tuple[str, str] | None:
    """(rule, fix) if a value is not of a simple type."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and (isinstance(value, int) or value.is_integer())
    if type == "any":
        return None
    if type == "string":
        return None if isinstance(value, str) else _wanted(value, "a string", _quote(value))
    if type == "boolean":
        return None if isinstance(value, bool) else _wanted(value, "true or false", _bare(value))
    if type == "time":
        good = isinstance(value, str) and _is_time(value)
        return None if good else _wanted(value, "a time", "as in 2026-01-31T12:00:00Z")
    if type in _BOUNDS:
        if not whole:
            return _wanted(value, "a whole number", _bare(value))
        if not -_BOUNDS[type] <= value < _BOUNDS[type]:
            return f"{value} does not fit into {type}", f"use less than {_BOUNDS[type]}"
        return None
    if isinstance(value, str):  # a quantity, or int-or-string
        if type == "quantity" and not (quantity.parse(value) or re.fullmatch(_QUANTITY, value)):
            return f"{_shown(value)} is no quantity", "use one such as 500m, 2 or 4Gi"
        return None
    if whole and abs(value) < _BOUNDS["int64"]:
        return None
    return _wanted(value, "a whole number or a string", _quote(value) if number else "")


def _is_time(text: str) -> bool:
    from datetime import datetime

    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _wanted(value: Any, what: str, how: str = "") -> tuple[str, str]:
    """(rule, fix) for a value of another type."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    kind = kinds.get(type(value), "null" if value is None else "a number")
    shown = kind if isinstance(value, dict | list) or value is None else f"{_shown(value)}, {kind},"
    return f"{shown} stands where {what} must be", how or f"write {what}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _quote(value: Any) -> str:
    """What to do with a plain word of YAML that is meant as text; `yes` reads as true."""
    if isinstance(value, bool):
        return "put it into quotes"
    return f'put it into quotes: "{json.dumps(value)}"' if isinstance(value, int | float) else ""


def _bare(value: Any) -> str:
    """What to write for a number or a truth value that stands in quotes."""
    plain = isinstance(value, str) and re.fullmatch(r"-?\d{1,18}|true|false", value)
    return f"write {value} without quotes" if plain else ""


# -- what was meant ------------------------------------------------------------------------------


def _meant(name: str, type: int, path: Path_) -> str:
    """The fix for an unknown field: another spelling, another place, or what there is."""
    import difflib  # of a mistake only

    known = list(_fields(type))
    lower = {field.lower(): field for field in known}
    near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=_NEAR)
    if near:
        return f"did you mean {lower[near[0]]!r}?"
    if place := _elsewhere(name, path):
        return f"it belongs to {place}"
    near = difflib.get_close_matches(name.lower(), lower, n=1)
    if near:
        return f"did you mean {lower[near[0]]!r}?"
    return f"known are {', '.join(known)}" if len(known) <= _MOST_KNOWN else "remove it"


def _elsewhere(name: str, path: Path_) -> str:
    """The nearest place that has a field of this name, above or below a path; empty for none."""
    places = [place for place in _places(len(_types()) - 1, (), frozenset()) if place[-1] == name]

    def distance(place: tuple[str, ...]) -> tuple[int, int]:
        shared = _shared(place, path)
        return len(place) - shared + len(path) - shared, len(place)

    near = min(places, key=distance, default=None)
    if near is None or _shared(near, path) < min(1, len(path)):
        return ""
    count = _shared(near, path)
    rest = ["Worker" if part == "*" else part for part in near[count:]]
    return text([*path[:count], *rest]).replace(".[]", "[]")


def _shared(place: Sequence[str], path: Path_) -> int:
    """How many steps a place of the table has in common with a path of a job."""
    count = 0
    for part, step in zip(place, path, strict=False):
        if part != step and part != ("[]" if isinstance(step, int) else "*"):
            break
        count += 1
    return count


def _places(type: Type, path: tuple[str, ...], above: frozenset[Type]) -> Iterator[tuple[str, ...]]:
    """Every field below a type, as a path in which `*` is any key and `[]` any index."""
    if isinstance(type, str) or type in above:
        return
    made = _types()[type]
    if isinstance(made, dict):
        for name, of in _fields(type).items():
            yield (*path, name)
            yield from _places(of, (*path, name), above | {type})
    else:
        step = "*" if made[0] == "map" else "[]"
        yield from _places(made[1], (*path, step), above | {type})
