"""Kubernetes quantities, such as `500m` CPU and `2Gi` of memory."""

import math
import re

_SUFFIX = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip
_PATTERN = r"(?a:\+?(\d+(?:\.\d*)?|\.\d+)(?:([eE][-+]?\d+)|([numkMGTPE]|[KMGTPE]i)?))"


def parse(text: str) -> float | None:
    """The value of a quantity; None if the text is no quantity."""
    match = re.fullmatch(_PATTERN, text)
    if not match:
        return None
    number, exponent, suffix = match.groups()
    return float(number + (exponent or "")) * _SUFFIX[suffix or ""]


def number(text: object) -> float:
    """The value of a quantity; 0 if it is none."""
    return parse(str(text)) or 0.0


def gibibytes(size_bytes: float) -> str:
    """A size rounded up to whole Gi."""
    return f"{math.ceil(size_bytes / 2**30)}Gi"
