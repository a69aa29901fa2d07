"""Reads and writes YAML for the whole package: PyYAML, adapted to Go's YAML.

kubectl and the API server read YAML with Go, where some of PyYAML's plain texts are not texts:
`1e3` and `0o17` are numbers, and `y` is true. The writer puts such texts in quotes. The reader
returns times of day and dates as texts, like kubectl: in YAML 1.1 `12:30` is a number.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

_STRING = "tag:yaml.org,2002:"
_DIGIT_FIRST = "-+0123456789."
# Go's numbers; Go ignores every `_`. PyYAML quotes longer texts by its own rules.
_GO_NUMBER = re.compile(
    r"(?=.{1,400}$)(?=.*\d)[-+]?_*"
    r"([\d_]*\.?[\d_]*([eE]_*[-+]?[\d_]+)?|0_*[xX][\da-fA-F_]+|0_*[oObB][\d_]+)$"
)
_INTEGER = re.compile(r"[-+]?(0b[01_]+|0[0-7_]*|[1-9][\d_]*|0x[\da-fA-F_]+)$")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]\d+)?$")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses duplicate keys, of which PyYAML silently uses the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = str(key.value)
            if name in lines:
                rule = f"{name} is in line {lines[name]} and again"
                raise yaml.constructor.ConstructorError(None, None, rule, key.start_mark)
            lines[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes texts that PyYAML or Go would read as another type; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {
    first: [it for it in found if it[0].rpartition(":")[2] in ("bool", "null", "merge")]
    for first, found in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_STRING}int", _INTEGER, list(_DIGIT_FIRST))
_Loader.add_implicit_resolver(f"{_STRING}float", _FLOAT, list(_DIGIT_FIRST))
_Dumper.add_implicit_resolver(f"{_STRING}float", _GO_NUMBER, list(_DIGIT_FIRST))
_Dumper.add_implicit_resolver(f"{_STRING}bool", re.compile("[yYnN]$"), list("yYnN"))


def dump(documents: Iterable[Mapping[str, Any]]) -> str:
    """One document per object, each after `---`; block style, keys in their order."""
    return str(
        yaml.dump_all(
            documents,
            Dumper=_Dumper,
            sort_keys=False,
            default_flow_style=False,
            explicit_start=True,
            width=4096,
            allow_unicode=True,
        )
    )


def load(text: str) -> dict[str, Any]:
    """The single table of a text, with JSON's types only. Raises ValueError with the reason."""
    try:
        found = list(yaml.load_all(text, Loader=_Loader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"is not YAML: {where}{error.problem}; correct it there") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: `!!int x`
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from None
    found = [it for it in found if it is not None]
    if len(found) != 1 or not isinstance(found[0], dict):
        what = f"{len(found)} objects" if len(found) != 1 else "no table"
        raise ValueError(f"has {what}: it must have one table, with keys and values")
    return plain(found[0])


def plain(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy with JSON's types only. Raises ValueError for a value of another type."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(tree, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"has a value that JSON does not have ({error}): put dates, nan and inf in quotes"
        ) from None
    return copy
