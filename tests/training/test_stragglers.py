"""Slow ranks are found by their busy time over many steps, for their part of the work."""

import numpy as np
import pytest

from gptddp.training import stragglers


def judge_of(slots: list[int]) -> stragglers.Stragglers:
    """A judge of ranks with the names 0, 1 ..."""
    return stragglers.Stragglers([str(rank) for rank in range(len(slots))], slots)


def named(judge, busy: list[float], seconds: float, step_s: float = 1.0) -> list[int]:
    """The named ranks after so many seconds of steps with these busy times."""
    for _ in range(round(seconds / step_s)):
        judge.add(step_s, np.array(busy))
    return sorted(judge.slow)


@pytest.mark.parametrize(
    ("slots", "busy", "slow"),
    [
        ([4, 4, 4, 4], [1.0, 1.0, 1.4, 1.0], [2]),
        ([4, 4, 4, 4], [1.0, 1.0, 1.25, 1.0], []),
        ([4, 4], [1.0, 1.4], [1]),  # of two, the faster is the measure
        ([4, 4], [1.0, 1.2], []),
        ([8], [9.0], []),
        ([3, 3, 2, 2, 2], [1.5, 1.5, 1.0, 1.0, 1.0], []),  # more lanes take longer
        ([3, 3, 2, 2, 2], [1.0, 1.0, 1.0, 1.0, 1.0], []),  # more lanes take no longer
        ([3, 3, 2, 2, 2], [2.1, 1.5, 1.0, 1.0, 2.1], [0, 4]),
        ([4, 4, 4], [0.0, 0.0, 0.0], []),
    ],
)
def test_a_rank_is_slow_above_1_3_times_the_median_for_its_part(slots, busy, slow):
    """A rank is compared by all its busy time, and by that of a slot: the larger median counts."""
    assert named(judge_of(slots), busy, 16) == slow


@pytest.mark.parametrize("step_s", [0.01, 1.0, 20.0])
def test_a_slow_rank_is_named_within_a_minute(step_s):
    """A slow rank is named within 60 s of steps, for any length of a step."""
    judge, seconds = judge_of([1, 1, 1]), 0.0
    named(judge, [1.0, 1.0, 1.0], 30, step_s)
    while not judge.slow:
        named(judge, [1.0, 2.0, 1.0], step_s, step_s)
        seconds += step_s
    assert seconds <= 60


@pytest.mark.parametrize(
    ("usual", "step_s", "one", "one_s"),
    [
        (1.0, 1.0, [1.0, 4.0, 1.0], 1.0),
        (0.1, 0.1, [0.1, 20.0, 0.1], 20.0),  # its process was stopped
        (1.0, 1.0, [0.1, 0.3, 0.1], 300.0),  # a step that has stalled, and was no rank's
    ],
)
def test_no_rank_is_named_for_one_long_step(usual, step_s, one, one_s):
    """One long step is no sign of a slow rank; it is reported as a stall."""
    judge = judge_of([1, 1, 1])
    named(judge, [usual] * 3, 15, step_s)
    judge.add(one_s, np.array(one))
    assert named(judge, [usual] * 3, 15, step_s) == []


def test_a_slow_rank_stays_named_for_a_minute_and_until_it_is_fast():
    """The ledger thus gets at most two events a minute; the ratio is always the current one."""
    judge = judge_of([1, 1, 1])
    assert named(judge, [1.0, 2.0, 1.0], 20) == [1]
    assert judge.shown == {"1": pytest.approx(2.0)}
    assert named(judge, [1.0, 1.0, 1.0], 30) == [1] and judge.shown == {}
    assert named(judge, [1.0, 1.2, 1.0], 60) == [1] and judge.shown == {"1": pytest.approx(1.2)}
    ((kind, about),) = [it for _ in range(20) for it in judge.add(1.0, np.ones(3))]
    assert (kind, about["rank"], judge.slow) == ("slow_end", 1, {})
    assert about["seconds"] > stragglers.HOLD_S
