"""The budgets of a run, and the learning rate that depends on them."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gptddp import budget
from gptddp.config import Config, with_preset
from gptddp.data.loader import Batch
from gptddp.model.schedule import lr_at
from gptddp.training.agree import Agreed, agree
from gptddp.training.clock import PhaseClock, RankSeconds


def closed(**fields) -> Config:
    base = {"lr": 1.0, "steps": 1000, "warmup_steps": 10, "final_lr": 0.1}
    return with_preset(Config(**base | fields), accelerator=False)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_never_rises_after_the_warm_up(schedule):
    """However long steps take, the rate never rises after the warm-up, and ends at final_lr."""
    draw = random.Random(1)
    for _ in range(20):
        budgets = {"max_tokens": draw.randint(5000, 90000), "max_time": draw.uniform(50, 900)}
        c = closed(steps=500, schedule=schedule, **budgets)
        step, tokens, train_s, last = 0, 0, 0.0, 1.0
        while not budget.used_up(c, step, tokens, train_s):
            rate = lr_at(step, c, tokens, train_s)
            assert step < 10 or rate <= last * (1 + 1e-12)
            last = rate if step >= 10 else 1.0
            step, tokens = step + 1, tokens + draw.randint(1, 256)
            train_s += draw.expovariate(1.0)
        assert lr_at(step, c, tokens, train_s) == pytest.approx(0.1)


def test_a_run_ends_with_the_first_budget_that_is_used_up():
    """The first budget used up ends the run. 0 means no budget; steps are always limited."""
    c = closed(steps=9, max_tokens=100, max_time=2.0)
    assert budget.used_up(c, 8, 99, 1.9) == ""
    assert budget.used_up(c, 9, 100, 2.0) == "steps"
    assert budget.used_up(c, 8, 100, 2.0) == "max_tokens"
    assert budget.used_up(c, 8, 99, 2.0) == "max_time"
    assert budget.used_up(closed(steps=9), 8, 10**9, 1e9) == ""


def test_the_last_step_is_shown():
    """An estimated last step is marked with ~, and is never before the current step."""
    assert budget.shown(closed(steps=400), 12, 99, 9.0) == "12/400"
    c = closed(steps=400, max_tokens=1000)
    assert [budget.shown(c, 12, tokens) for tokens in (0, 140, 1000, 9999)] == [
        *("12/400", "12/~86", "12/~12", "12/~12")
    ]


# -- the same on all ranks -----------------------------------------------------------------------


def on_all_ranks(*train_s: float) -> list[Agreed]:
    """The result of `agree` on each rank, called one after the other with a real sum."""
    row = np.zeros((1, 2), dtype=np.int64)
    cursors = np.ones((2, 3), dtype=np.int64)
    batch = Batch(row, row.astype(bool), [0], 1, fp=2**64 - 1, cursors=cursors, wait_s=0.0)
    sent: list[torch.Tensor] = []

    def send(mine: torch.Tensor) -> torch.Tensor:
        sent.append(mine.clone())
        return mine

    def each(all_reduce) -> list[Agreed]:
        made = []
        for rank, seconds in enumerate(train_s):
            about = {"rank": rank, "world_size": len(train_s), "view": None}
            world = SimpleNamespace(**about, all_reduce=all_reduce)
            spent = RankSeconds(PhaseClock(), world)
            said, of_0 = (False, False, False, True), (3, 7, seconds)
            made.append(agree(batch, said, of_0, spent, world))
        return made

    each(send)
    total = torch.stack(sent).sum(0)
    return each(lambda mine: total.clone())


def test_all_ranks_take_the_rate_of_rank_0s_clock():
    """Each rank has its own clock. After the all-reduce all have exactly rank 0's seconds."""
    c, draw = closed(max_time=3600.0), random.Random(2)
    for _ in range(200):
        clocks = [draw.uniform(0, 3600) for _ in range(5)]
        agreed = on_all_ranks(*clocks)
        (train_s,) = {it.train_s for it in agreed}
        assert train_s == round(clocks[0], 6) and json.loads(json.dumps(train_s)) == train_s
        assert len({lr_at(99, c, 0, it.train_s) for it in agreed}) == 1
        again = on_all_ranks(train_s, 0.0)  # the step is repeated
        assert {it.train_s for it in again} == {train_s}
    found = {(it.targets, it.generation, it.logged, it.save, it.stop, it.bad) for it in agreed}
    assert found == {(5, 3, 7, True, 0, False)}


def test_impossible_training_seconds_do_not_overflow():
    """A state edited by hand may have any number of seconds: it is limited to 2**40."""
    assert on_all_ranks(1e300, 0.0)[1].train_s == 2.0**40


def test_linear_decays_in_a_line_and_wsd_at_the_end_of_the_run():
    """Linear and wsd decay after the warm-up; a warmdown of 0 never decays, one of 1 at once."""
    fields = dict(lr=1.0, steps=100, warmup_steps=10, final_lr=0.1)
    line = closed(**fields, schedule="linear")
    assert [lr_at(step, line) for step in (9, 10, 55, 100)] == pytest.approx([1, 1, 0.55, 0.1])
    wsd = closed(**fields, schedule="wsd", warmdown=0.4)
    found = [lr_at(step, wsd) for step in (4, 10, 60, 80, 100, 200)]
    assert found == pytest.approx([0.5, 1, 1, 0.55, 0.1, 0.1])
    assert lr_at(99, closed(**fields, schedule="wsd", warmdown=0.0)) == 1.0
    assert lr_at(50, closed(**fields, schedule="wsd", warmdown=1.0)) == pytest.approx(0.55)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_a_budget_of_tokens_or_time_has_the_rates_of_as_many_steps(schedule):
    """If all steps are alike, every rate is that of a run with as many steps as fit the budget."""
    fields = dict(lr=1.0, warmup_steps=10, schedule=schedule, warmdown=0.5)
    steps = closed(**fields, steps=100)
    tokens = closed(**fields, steps=1000, max_tokens=6400)
    seconds = closed(**fields, steps=1000, max_time=50.0)
    for step in range(101):
        wanted = pytest.approx(lr_at(step, steps), rel=1e-12)
        assert lr_at(step, tokens, 64 * step, 9.0 * step) == wanted
        assert lr_at(step, seconds, 64 * step, 0.5 * step) == wanted
    assert lr_at(100, tokens, 6400) == lr_at(100, seconds, 0, 50.0) == pytest.approx(0.1)
