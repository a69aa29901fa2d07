"""Number formats of logs, commands and pages; two of them can be parsed again."""

import math
import re
import time
from typing import Any

_SECONDS = {"d": 86_400, "h": 3600, "min": 60, "s": 1}
_TIMES = {"T": 1e12, "B": 1e9, "G": 1e9, "M": 1e6, "k": 1e3, "": 1.0}


def duration(seconds: float) -> str:
    """`0.004 s`, `4.2 s`, `2 min 14 s`, `3 h 5 min`, `2 d 4 h`; an int shows no fraction."""
    if not seconds < 1e12:  # the clock is not set
        return "?"
    if seconds < 59.95:
        if isinstance(seconds, int):
            return f"{seconds} s"
        return f"{seconds:.1f} s" if seconds >= 0.1 or not seconds else f"{seconds:.2g} s"
    units, s = list(_SECONDS.items()), round(seconds)
    at = next(i for i, (_, unit_s) in enumerate(units) if s >= unit_s)
    (big, big_s), (small, small_s) = units[at : at + 2]
    rest = s % big_s // small_s
    return f"{s // big_s} {big}" + f" {rest} {small}" * (rest > 0)


def seconds(text: str) -> int:
    """Parse a `duration`, to its precision."""
    parts = re.findall(r"([\d.]+) (d|h|min|s)\b", text)
    return round(sum(float(number) * _SECONDS[unit] for number, unit in parts))


def clock(unix: float) -> str:
    """A moment, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))
    except (OverflowError, ValueError, OSError):
        return "?"


def amount(number: float, prefixes: str = "TBMk") -> str:
    """`940`, `21.0 k`, `2.1 M`, `3.4 B`: of tokens, parameters, tokens a second."""
    for prefix in prefixes:
        if abs(number) >= 0.99995 * _TIMES[prefix]:
            return f"{number / _TIMES[prefix]:.1f} {prefix}"
    return f"{number:.0f}"


def size(nbytes: float) -> str:
    """`21.0 kB`, `2.1 MB`, `3.4 GB`."""
    text = amount(nbytes, "TGMk")
    return text + "B" if " " in text else f"{text} B"


def number(text: str) -> float:
    """Parse an `amount`, to its precision; version 0.1.0 wrote `21.0k`."""
    digits = text.rstrip(" kMBT")
    return float(digits) * _TIMES[text[len(digits) :].strip()]


def loss(nats: float | None) -> str:
    """Format a loss; None: the step was skipped."""
    return "not finite" if nats is None else f"{nats:.4f}"


def value(number: Any, digits: int = 4) -> str:
    """Format a figure of the log; `-` if it has none."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
        return "-"
    if isinstance(number, int) or (number.is_integer() and abs(number) < 1e15):
        return f"{int(number):,}"
    if abs(number) < 1e-3 or abs(number) >= 1e7:
        return f"{number:.{digits - 1}e}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.{digits}f}"


def percent(part: float) -> str:
    """`93.4 %`; 100 and 0 only if exact."""
    text = f"{100 * part:.1f}"
    if text == "100.0" and part < 1:
        text = "99.9"
    if text == "0.0" and part > 0:
        text = "< 0.1"
    return f"{text} %"


def many(number: int, word: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number:,} {word}{'s' * (number != 1)}"
