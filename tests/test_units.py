"""Numbers written for readers, and read back."""

import pytest

from gptddp.units import amount, duration, loss, many, number, percent, seconds, size


@pytest.mark.parametrize(
    ("given", "text"),
    [(0.004, "0.004 s"), (4.21, "4.2 s"), (45, "45 s"), (59.97, "1 min"), (134, "2 min 14 s"),
     (280, "4 min 40 s"), (11_100, "3 h 5 min"), (187_200, "2 d 4 h"), (float("inf"), "?")],
)  # fmt: skip
def test_durations_have_two_units_at_most(given, text):
    """Age, ETA, pause and elapsed time are written with two units at most."""
    assert duration(given) == text


@pytest.mark.parametrize("given", [0, 59, 60, 134, 3599, 11_100, 187_200])
def test_a_duration_is_read_back(given):
    """A duration is read back to the precision of its text."""
    assert seconds(duration(given)) == given


@pytest.mark.parametrize(
    ("given", "text"),
    [(0, "0"), (940, "940"), (9_000, "9.0 k"), (44_012, "44.0 k"), (999_960, "1.0 M"),
     (3.4e9, "3.4 B"), (2e12, "2.0 T")],
)  # fmt: skip
def test_an_amount_has_a_prefix_from_a_thousand_on_and_is_read_back(given, text):
    """Tokens, parameters and tokens a second are written alike."""
    assert amount(given) == text
    assert number(text) == pytest.approx(given, rel=0.01)


def test_sizes_percentages_losses_and_counts():
    """Sizes use powers of ten, a part is never shown as 0 % or 100 %, and a loss may be None."""
    assert [size(it) for it in (940, 4.6e6, 2e9)] == ["940 B", "4.6 MB", "2.0 GB"]
    assert [percent(it) for it in (0.974, 0.9999, 0.0001)] == ["97.4 %", "99.9 %", "< 0.1 %"]
    assert (loss(2.5), loss(None)) == ("2.5000", "not finite")
    assert (many(1, "rank"), many(1200, "rank")) == ("1 rank", "1,200 ranks")
