"""Numbers as a reader takes them in."""

import math
import time
from typing import Any


def duration(seconds: float) -> str:
    """`0.004 s`, `4.2 s`, `2 min 14 s`, `3 h 5 min`, `2 d 4 h`."""
    if not seconds < 1e12:  # of a clock that nobody set
        return "?"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 0.1 or not seconds else f"{seconds:.2g} s"
    s = round(seconds)
    for big, small, name, rest in ((86400, 3600, "d", "h"), (3600, 60, "h", "min")):
        if s >= big:
            return f"{s // big} {name} {s % big // small} {rest}"
    return f"{s // 60} min {s % 60} s"


def clock(unix: float) -> str:
    """A moment, in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix))
    except (OverflowError, ValueError, OSError):
        return "?"


def amount(number: float) -> str:
    """`940`, `21.0 k`, `2.1 M`, `3.4 B`: of tokens."""
    for limit, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(number) >= max(limit, 1e4):
            return f"{number / limit:.1f}{unit}"
    return f"{number:,.0f}"


def value(number: Any, digits: int = 4) -> str:
    """A figure of the log; `-` where there is none."""
    if not isinstance(number, int | float) or isinstance(number, bool) or not math.isfinite(number):
        return "-"
    if isinstance(number, int) or (number.is_integer() and abs(number) < 1e15):
        return f"{int(number):,}"
    if abs(number) < 1e-3 or abs(number) >= 1e7:
        return f"{number:.{digits - 1}e}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.{digits}f}"


def percent(part: float) -> str:
    """`93.4 %`; never 100 where something is left, nor 0 where something is."""
    text = f"{100 * part:.1f}"
    if text == "100.0" and part < 1:
        text = "99.9"
    if text == "0.0" and part > 0:
        text = "< 0.1"
    return f"{text} %"


def many(number: int, word: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number:,} {word}{'s' * (number != 1)}"
