"""Numbers and times as people write them: 10k, 1.5M, 1e3; 90, 5m, 1h30m. Standard library only."""

import math
import re

_NUMBER = r"(\d{1,99}(?:\.\d{0,99})?|\.\d{1,99})"
_WHOLE = re.compile(rf"([+-]?{_NUMBER}(?:[eE][+-]?\d\d?)?)([kKMB]?)")
_TIME = re.compile(rf"(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}


def whole(text: str) -> int:
    """Parse 400, 1_000, 10k, 1.5M, 2B or 1e3; ValueError, with the rule, for other text."""
    try:
        return int(text)
    except ValueError:  # also of thousands of digits
        from fractions import Fraction  # milliseconds of every start

        match = _WHOLE.fullmatch(text)
        if match and (number := Fraction(match[1]) * _FACTORS[match[3]]).denominator == 1:
            return int(number)
    raise ValueError("it must be a whole number, as in 400, 10k, 1.5M (millions), 2B or 1e3")


def seconds(text: str) -> float:
    """Parse 90, 1.5, 45s, 10m or 1h30m; ValueError, with the rule, for other text."""
    try:
        value = float(text)
    except ValueError:
        match = _TIME.fullmatch(text or "-")
        hours, minutes, rest = map(float, match.groups("0") if match else ["nan"] * 3)
        value = 3600 * hours + 60 * minutes + rest
    if not math.isfinite(value):
        raise ValueError("it must be a time, as in 90 (seconds), 45s, 10m (minutes) or 1h30m")
    return value
