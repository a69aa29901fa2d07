"""The clocks of ranks: their waits for each other, and the time of the sums."""

import time
from types import SimpleNamespace

import pytest

from gptddp.training import clock as module
from gptddp.training.clock import PhaseClock, RankSeconds


class Ranks:
    """Two ranks by one clock that the test sets; they meet as in an all-reduce."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
        self.now = 1000.0
        of_day = SimpleNamespace(
            monotonic=lambda: self.now,
            monotonic_ns=lambda: round(1e9 * self.now),
            time=time.time,
        )
        monkeypatch.setattr(module, "time", of_day)
        worlds = [SimpleNamespace(rank=rank, world_size=2, view=None) for rank in range(2)]
        self.spent = [RankSeconds(PhaseClock(phase), world) for world in worlds]

    def step(self, before=(0.0, 0.0), sums=(0.0, 0.0), phase="") -> None:
        """Each rank is late by `before` at the agreement, and waits for its `sums` at the end."""
        begin, rows = self.now, []
        for spent, late_s in zip(self.spent, before, strict=True):
            self.now = begin
            spent.clock.enter(phase or spent.clock.phase)
            self.now = begin + late_s
            rows.append(spent.mine())
        self.now = begin + max(before)
        for spent in self.spent:
            spent.take(sum(rows))
        self.now += max(sums)
        for spent, wait_s in zip(self.spent, sums, strict=True):
            spent.waited(wait_s)

    def by_phase(self) -> dict[str, list[float]]:
        """The table, after a check that both ranks have the same."""
        first, second = (it.by_phase() for it in self.spent)
        assert first == second
        return first


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks in a phase: ranks(phase)."""
    return lambda phase: Ranks(monkeypatch, phase)


def test_the_table_includes_the_wait_for_its_own_exchange(ranks):
    """The ranks thus have equal sums: a rank that is lost then does not count as formed later."""
    it = ranks("step")
    it.step(before=(0.0, 2.0))
    assert it.by_phase() == {"step": [0.0, 2.0], "wait": [2.0, 0.0]}
    it.step(before=(0.5, 0.0))
    assert it.by_phase() == {"step": [0.5, 2.0], "wait": [2.0, 0.5]}


def test_ranks_that_wait_for_each_other_in_one_step_both_wait(ranks):
    """One rank comes late to the agreement, the other to the sums: each has its wait."""
    it = ranks("step")
    it.step(before=(0.0, 2.0), sums=(0.0, 2.0))
    it.step()
    assert it.by_phase() == {"step": [2.0, 2.0], "wait": [2.0, 2.0]}


def test_a_common_wait_for_the_sums_counts_as_the_step(ranks):
    """The transport of a repeated step counts as repeated; no rank was busy meanwhile."""
    it = ranks("redo")
    it.step(sums=(2.0, 2.5))
    it.step(phase="step")
    assert it.by_phase() == {"redo": [2.5, 2.0], "wait": [0.0, 0.5]}
    assert it.spent[0].busy_s.tolist() == [0.5, 0.0]


def test_no_phase_ever_becomes_shorter(ranks):
    """No phase loses a microsecond in many steps, because a counter must not fall."""
    it = ranks("step")
    before, begin = it.spent[0].micros, it.now
    for i in range(200):
        it.step((1.3e-6 * (i % 5), 1.7e-6), (1.1e-6 * (i % 3), 1.7e-6))
        assert (it.spent[0].micros >= before).all()
        before = it.spent[0].micros
    for spent in it.spent:
        assert sum(spent.clock.seconds.values()) <= it.now - begin
        spent.clock.enter("other")
        assert sum(spent.clock.seconds.values()) == pytest.approx(it.now - begin, abs=1e-8)


def test_a_table_is_due_when_the_phase_changes(ranks):
    """The repeated steps of a life thus end at a table, even if no rank survives."""
    it, due = ranks("warmup"), []
    for phase in ("warmup", "redo", "redo", "step", "step"):
        it.step((0.1, 0.1), phase=phase)
        due.append(it.spent[0].is_due)
    assert due == [True, True, False, True, False]


def test_reading_a_clock_does_not_change_it():
    """The takeover's thread reads the clock while the main thread enters phases."""
    clock = PhaseClock()
    before = {**vars(clock), "_ns": {**clock._ns}}
    assert clock.micros().sum() >= 0 and vars(clock) == before
