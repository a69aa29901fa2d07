"""Which ranks are slow: by how long each is busy over many steps, and for its part of them."""

import numpy as np
import pytest

from gptddp.training import stragglers
from gptddp.training.stragglers import Stragglers


def named(judge: Stragglers, busy: list[float], seconds: float, step_s: float = 1.0) -> list[int]:
    """The ranks that are named after so many seconds of steps in which each was busy so long."""
    for step in range(round(seconds / step_s)):
        judge.add(step, step_s, np.array(busy))
    return sorted(judge.slow)


@pytest.mark.parametrize(
    ("slots", "busy", "slow"),
    [
        ([4, 4, 4, 4], [1.0, 1.0, 1.4, 1.0], [2]),
        ([4, 4, 4, 4], [1.0, 1.0, 1.25, 1.0], []),
        ([4, 4], [1.0, 1.4], [1]),  # of two, the faster is the measure
        ([4, 4], [1.0, 1.2], []),
        ([8], [9.0], []),
        ([3, 3, 2, 2, 2], [1.5, 1.5, 1.0, 1.0, 1.0], []),  # more lanes: as long as they take
        ([3, 3, 2, 2, 2], [1.0, 1.0, 1.0, 1.0, 1.0], []),  # and where they take no time
        ([3, 3, 2, 2, 2], [2.1, 1.5, 1.0, 1.0, 2.1], [0, 4]),
        ([4, 4, 4], [0.0, 0.0, 0.0], []),
    ],
)
def test_a_rank_is_slow_that_takes_over_1_3_times_the_median_for_its_part(slots, busy, slow):
    """Of what is the same for all, and of its slots; whichever of the two allows more."""
    assert named(Stragglers(slots), busy, 16) == slow


def test_it_is_named_within_a_minute_and_not_for_one_long_step():
    """After 15 s of steps, however long each is; of a single one, which stalled, others tell."""
    for step_s in (0.01, 1.0, 20.0):
        judge, seconds = Stragglers([1, 1, 1]), 0.0
        named(judge, [1.0, 1.0, 1.0], 30, step_s)
        while not judge.slow:
            named(judge, [1.0, 2.0, 1.0], step_s, step_s)
            seconds += step_s
        assert seconds <= 60
    judge = Stragglers([1, 1, 1])
    named(judge, [1.0, 1.0, 1.0], 15)
    assert named(judge, [1.0, 4.0, 1.0], 1) == []
    judge = Stragglers([1, 1, 1])
    named(judge, [0.1, 0.1, 0.1], 15, 0.1)
    judge.add(99, 20.0, np.array([0.1, 20.0, 0.1]))  # its process was stopped
    assert named(judge, [0.1, 0.1, 0.1], 15, 0.1) == []
    judge = Stragglers([1, 1, 1])
    named(judge, [1.0, 1.0, 1.0], 15)
    judge.add(99, 300.0, np.array([0.1, 0.3, 0.1]))  # one that has stalled, and was no rank's
    assert judge.slow == {}


def test_it_stays_named_for_a_minute_and_until_it_is_clearly_not_slow():
    """So the ledger has two events a minute at most; the ratio is always the present one."""
    judge = Stragglers([1, 1, 1])
    assert named(judge, [1.0, 2.0, 1.0], 20) == [1]
    assert judge.slow[1].ratio == pytest.approx(2.0)
    assert named(judge, [1.0, 1.0, 1.0], 30) == [1] and judge.slow[1].ratio == pytest.approx(1.0)
    assert judge.shown == []
    assert named(judge, [1.0, 1.2, 1.0], 60) == [1] and judge.shown == [judge.slow[1]]
    new, over = [], []
    for step in range(20):
        more = judge.add(step, 1.0, np.ones(3))
        new, over = new + more[0], over + more[1]
    assert (new, [it.rank for it in over], judge.slow) == ([], [1], {})
    assert over[0].seconds > stragglers.HOLD_S
