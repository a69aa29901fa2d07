"""PyYAML with the plain words of Go's YAML, which kubectl and the API server read.

PyYAML takes `12:30` for a number, a date for a date, and `1e3`, `0o17` and `y` for texts. To
kubectl they are two texts, two numbers and true: what is plain here is another thing there.
"""

import math
import re
from typing import Any

import yaml

_D, _X = r"(_*\d)+", r"(_*[\da-fA-F])+"  # Go leaves out every `_` first
_SHORT = r"(?=.{1,100}$)"  # what is longer is none, and takes long to look through
# Numbers and single letters as Go writes them.
_WORDS = (
    ("bool", r"[yYnN]", "yYnN"),
    ("int", rf"[-+]?_*(0_*[bB](_*[01])+|0(_*[oO])?(_*[0-7])+|0|[1-9]({_D})?|0_*[xX]{_X})_*",
     "-+0123456789"),
    ("float", rf"[-+]?_*(\d_*({_D})?(_*\.({_D})?)?|\.{_D})_*([eE]_*[-+]?{_D})?_*", "-+0123456789."),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
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
            f"tag:yaml.org,2002:{_tag}", re.compile(rf"{_SHORT}(?:{_pattern})$"), list(_first)
        )


def _number(loader: Any, node: Any) -> int | float | str:
    """What does not fit into 64 bits, or into a float without a prefix, stays a text."""
    text = str(node.value).replace("_", "").lower().removeprefix("+")
    if re.fullmatch(r"-?0o?[0-7]+|-?0[bx][0-9a-f]+", text):
        octal = re.fullmatch(r"-?0o?[0-7]+", text)
        value = int(text.replace("o", ""), 8) if octal else int(text, 0)
        return value if -(2**63) <= value < 2**64 else str(node.value)
    if not math.isfinite(float(text)):
        return str(node.value)
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _float(loader: Any, node: Any) -> float | str:
    text = str(node.value).replace("_", "").lower()
    if text.lstrip("+-") in (".inf", ".nan"):
        rule = f"{node.value}, which JSON does not have"
        raise yaml.constructor.ConstructorError(None, None, rule, node.start_mark)
    value = float(text)
    return value if math.isfinite(value) else str(node.value)


Loader.add_constructor("tag:yaml.org,2002:int", _number)
Loader.add_constructor("tag:yaml.org,2002:float", _float)
Loader.add_constructor(
    "tag:yaml.org,2002:bool", lambda loader, node: node.value.lower() in ("y", "yes", "true", "on")
)
