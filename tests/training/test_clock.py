"""The clocks of ranks that meet: who waits for whom, and what is only the time of the sums."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from gptddp.training.clock import PHASES, PhaseClock, RankSeconds

LATE_S = 0.2


class Ranks:
    """Two ranks, each in a thread of its own; they meet as in an all-reduce."""

    def __init__(self, phase: str) -> None:
        worlds = [SimpleNamespace(rank=rank, world_size=2) for rank in range(2)]
        self.spent = [RankSeconds(PhaseClock(phase), world) for world in worlds]

    def step(self, before=(0.0, 0.0), sums=(0.0, 0.0)) -> None:
        """Each comes so late to the agreement; within the step behind it, it waits for the sums."""
        barrier, rows = threading.Barrier(2), [np.empty(0)] * 2

        def run(rank: int) -> None:
            time.sleep(before[rank])
            rows[rank] = self.spent[rank].mine()
            barrier.wait(10)
            self.spent[rank].take(sum(rows))
            time.sleep(sums[rank])
            self.spent[rank].waited(sums[rank])

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def told(self) -> dict[str, list[float]]:
        """The table, of which both ranks have the same."""
        first, second = (it.told() for it in self.spent)
        assert first == second
        return first


def test_the_table_has_the_wait_that_ends_when_it_is_made():
    """So its ranks have lived equally long: who is lost then, is not counted as formed later."""
    ranks = Ranks("step")
    ranks.step(before=(0.0, LATE_S))
    first, second = (sum(row[rank] for row in ranks.told().values()) for rank in range(2))
    assert first == pytest.approx(second, abs=0.05)
    assert ranks.told()["wait"] == pytest.approx([LATE_S, 0.0], abs=0.05)


def test_ranks_that_wait_for_each_other_in_one_step_both_wait():
    """One comes late to the agreement, the other to the sums."""
    ranks = Ranks("step")
    ranks.step(before=(0.0, LATE_S), sums=(0.0, LATE_S))
    ranks.step()
    assert ranks.told()["wait"] == pytest.approx([LATE_S, LATE_S], abs=0.05)


def test_what_all_wait_for_the_sums_is_of_the_phase_of_the_step():
    """A step done again does not become new by its transport; nobody was busy meanwhile."""
    ranks = Ranks("redo")
    ranks.step(sums=(LATE_S, LATE_S + 0.1))
    ranks.step()
    assert ranks.told()["wait"] == pytest.approx([0.0, 0.1], abs=0.05)
    assert ranks.told()["redo"] == pytest.approx([LATE_S + 0.1, LATE_S], abs=0.05)
    assert "step" not in ranks.told()
    assert ranks.spent[0].busy_s == pytest.approx([0.1, 0.0], abs=0.05)


def test_no_phase_ever_becomes_shorter():
    """A counter would refuse it, and the training end: not by a microsecond, in many steps."""
    ranks = Ranks("step")
    before = ranks.spent[0].micros
    for i in range(200):
        ranks.step(sums=(1e-5 * (i % 3), 1.7e-6))
        assert (ranks.spent[0].micros >= before).all()
        before = ranks.spent[0].micros
    clock = ranks.spent[0].clock
    assert round(1e6 * sum(clock.seconds.values())) == pytest.approx(clock.micros().sum(), rel=0.01)


def test_the_table_is_due_where_the_phase_changes():
    """So that of a life that nobody survives the steps done again end at a table."""
    ranks, due = Ranks("warmup"), []
    for phase in ("warmup", "redo", "redo", "step", "step"):
        for spent in ranks.spent:
            spent.clock.enter(phase)
        ranks.step()
        due.append(ranks.spent[0].is_due)
    assert due == [True, True, False, True, False]
    assert len(ranks.spent[0].micros[0]) == len(PHASES)
