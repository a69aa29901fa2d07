"""Kubernetes quantities, such as `500m` CPU and `2Gi` of memory."""

import re

_SUFFIX = {
    "": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "E": 1e18, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
    "Ei": 2.0**60,
}  # fmt: skip
_PATTERN = r"(?a:\+?(\d+(?:\.\d*)?|\.\d+)(?:([eE][-+]?\d+)|([numkMGTPE]|[KMGTPE]i)?))"


def number(text: object) -> float:
    """The value of a quantity; 0 if it is none."""
    match = re.fullmatch(_PATTERN, str(text))
    if not match:
        return 0.0
    digits, exponent, suffix = match.groups()
    return float(digits + (exponent or "")) * _SUFFIX[suffix or ""]
