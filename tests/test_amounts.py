"""Numbers and times as people write them."""

import re
import time

import pytest

from gptddp import amounts

LONG = "9" * 100_000


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("400", 400), ("1_000", 1000), ("10k", 10_000), ("10K", 10_000), ("1.5M", 1_500_000)),
        *(("2B", 2 * 10**9), ("1e3", 1000), ("1E+3", 1000), ("-1e3", -1000), ("2500e-2", 25)),
        *((".5k", 500), ("1.M", 10**6), ("9007199254.740993M", 9007199254740993)),
    ],
)
def test_a_whole_number_is_exact(text, number):
    """Whole numbers of any size are exact, as no float is in between."""
    found = amounts.whole(text)
    assert found == number and type(found) is int


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("90", 90), ("1.5", 1.5), ("1e3", 1000), ("45s", 45), ("10m", 600), ("1h30m", 5400)),
        *(("1.5h", 5400), ("1h1m1s", 3661), ("0", 0), ("0s", 0), ("-1", -1)),
    ],
)
def test_a_time_is_in_seconds(text, number):
    """A time has units in kubectl's order, or is a plain number of seconds."""
    assert amounts.seconds(text) == number


@pytest.mark.parametrize("read", [amounts.whole, amounts.seconds])
@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "x", "k", "m", ".", "1.2.3", "nan", "inf", "-inf", "1e400", "1e10000000"),
        *(LONG, f"{LONG}k", f"{LONG}h", f"1e{LONG}", f"1.{LONG}h", "1d", "5 m"),
    ],
)
def test_an_invalid_number_is_refused_at_once(read, text):
    """The error has the rule with examples. No text takes long, whatever its exponent or length."""
    began = time.perf_counter()
    with pytest.raises(ValueError, match="^it must be a .*, as in "):
        read(text)
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (amounts.whole, "5m", "1.5M (millions)"),
        (amounts.seconds, "5M", "10m (minutes)"),
        (amounts.whole, "1.5", "a whole number"),
        (amounts.whole, "0.0001k", "a whole number"),
        (amounts.seconds, "5m2h", "1h30m"),
    ],
)
def test_an_error_suggests_the_right_form(read, text, meant):
    """`m` (minutes) and `M` (a million) are never confused: the error shows a valid form."""
    with pytest.raises(ValueError, match=re.escape(meant)):
        read(text)
