"""A finished run: its message, and how it continues."""

import itertools
import logging

import pytest
from support import ledgers
from support.field_values import BEGUN

from gptddp.checkpoint import run_state
from gptddp.config import Config
from gptddp.run.history import history, read_ledger
from gptddp.training import life as training_life


def test_a_run_is_finished_if_a_budget_has_ended_its_newest_life(tmp_path):
    """A run is not finished if a signal stopped it, if it is running, or if it got more budget."""
    asked = Config(run_dir=str(tmp_path))
    stop = {"event": "stop", "step": 3, "tokens": 7, "train_s": 2.0, "cause": "steps"}
    for more, finished in (
        ([stop], True),
        ([stop | {"cause": "stopped"}], False),
        ([stop, {"event": "start", "generation": 2, "config": BEGUN}], False),
        ([stop | {"step": 2}], False),
        ([stop | {"step": 2, "tokens": 400000, "cause": "max_tokens"}], True),
        ([stop | {"step": 2, "train_s": 4000.0, "cause": "max_time"}], True),
        ([stop | {"step": "x"}], False),
    ):
        ledgers.begun(tmp_path, BEGUN, *more)
        assert bool(run_state.why_finished(asked)) == finished, more
    ledgers.begun(tmp_path, BEGUN, stop)
    assert run_state.why_finished(asked)
    (tmp_path / "log.2.jsonl").touch()  # a later life, which the ledger lacks
    assert not run_state.why_finished(asked)
    (tmp_path / "log.2.jsonl").unlink()
    assert not run_state.why_finished(Config(run_dir=str(tmp_path), steps=4))
    assert not run_state.why_finished(Config(run_dir=str(tmp_path), seed=8))  # the trainer refuses
    assert not run_state.why_finished(Config(run_dir=str(tmp_path), from_scratch=True))
    assert not run_state.why_finished(Config())


def test_a_last_step_that_was_not_planned_is_evaluated(life, tmp_path, monkeypatch):
    """A stopped run that is ended by a smaller --steps has val_loss and state_fp at its last step,
    as every run has."""
    agree, calls = training_life.agree, itertools.count()

    def stopped(batch, said, *rest):
        return agree(batch, (said[0] or next(calls) == 3, *said[1:]), *rest)

    with monkeypatch.context() as patch:
        patch.setattr(training_life, "agree", stopped)
        assert life(**BEGUN | {"steps": 100000, "eval_every": 100000}) == 143
    assert not {"val_loss", "state_fp"} & list(history(tmp_path / "run"))[-1].keys()
    assert life(steps=1) == 0
    lines = list(history(tmp_path / "run"))
    assert len(lines) == 3 and {"val_loss", "state_fp"} <= lines[-1].keys()
    assert run_state.why_finished(Config(run_dir=str(tmp_path / "run"))).startswith(
        "steps is 1, but"
    )


@pytest.mark.parametrize(
    ("budget", "said", "more"),
    [
        ({"steps": 3}, "all 3 steps are done; to continue, give a larger --steps", {"steps": 4}),
        (
            {"steps": 100000, "max_time": 0.05},
            "max_time of 0.05 s is used up; to continue, give a larger --max-time",
            {"max_time": 0.0},
        ),
    ],
)
def test_a_start_that_has_no_step_to_do_does_nothing(life, tmp_path, caplog, budget, said, more):
    """The start prints how to continue. The ledger gets no event, so no seconds are counted."""
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert life(**BEGUN | budget) == 0
    steps, events = len(list(history(run))), read_ledger(run)
    caplog.clear()
    assert life() == 0
    assert said in caplog.text and read_ledger(run) == events
    assert life(**more | {"steps": steps + 1}) == 0 and len(list(history(run))) == steps + 1
