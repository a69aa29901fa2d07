"""PyYAML with the plain words of Go's YAML, which kubectl and the API server read.

PyYAML takes `12:30` for a number, a date for a date, and `1e3`, `0o17` and `y` for texts. To
kubectl they are two texts, two numbers and true: what is plain here is another thing there.
"""

import re
from typing import Any

import yaml

_MOST_DIGITS = 1000  # Python reads no number of some thousand
# Numbers and single letters as Go writes them.
_WORDS = (
    ("bool", r"[yYnN]", "yYnN"),
    ("int", r"[-+]?(0b[01_]+|0o?[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    ("float", r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     "-+0123456789."),
)  # fmt: skip


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Plain words become what Go's reader makes of them."""


class Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes a text that PyYAML or Go would read as anything else."""


# Of PyYAML's own words those that mean the same to kubectl.
Loader.yaml_implicit_resolvers = {
    first: [it for it in found if it[0].rpartition(":")[2] in ("bool", "null", "merge")]
    for first, found in Loader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in _WORDS:
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})$"), list(_first)
        )


def _number(loader: Any, node: Any) -> int | float:
    text = str(node.value).replace("_", "").lower().removeprefix("+")
    if len(text) > _MOST_DIGITS:
        raise yaml.constructor.ConstructorError(
            None, None, f"a number of {len(text)} digits", node.start_mark
        )
    if re.fullmatch(r"-?0o?[0-7]+", text):
        return int(text.replace("o", ""), 8)
    return int(text, 0) if re.fullmatch(r"-?(\d+|0[bx][0-9a-f]+)", text) else _float(text)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


Loader.add_constructor("tag:yaml.org,2002:int", _number)
Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: _float(node.value))
Loader.add_constructor(
    "tag:yaml.org,2002:bool", lambda loader, node: node.value.lower() in ("y", "yes", "true", "on")
)
