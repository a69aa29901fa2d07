"""A run that has come to its end: what is said of it, and what goes on."""

import itertools
import logging

from support.field_values import BEGUN

from gptddp.config import Config
from gptddp.files import write_json_atomic
from gptddp.run.history import history
from gptddp.run.in_force import is_finished, why_finished
from gptddp.training import life as training_life


def test_a_run_that_was_extended_and_stopped_is_not_finished(tmp_path):
    """Its marker is of the end before; more steps are wanted, given again or not."""
    asked = Config(run_dir=str(tmp_path))
    write_json_atomic(tmp_path / "finished.json", {"step": 3, "steps": 3})
    for steps in (3, 5):
        write_json_atomic(tmp_path / "config.json", {"config": BEGUN | {"steps": steps}})
        assert is_finished(asked) is (steps == 3)


def test_fewer_steps_than_are_done_are_no_way_back(life, tmp_path, caplog):
    """Trainer and launcher say field, rule and fix; exit code 0, and no step is undone."""
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    wanted = "steps is 2, but 3 steps are done, and none is undone: the run is finished; --steps"
    assert life(**BEGUN) == 0 and life(steps=2) == 0
    assert wanted in caplog.text and "changed after step 3: steps: 3 -> 2" in caplog.text
    assert "of 2" not in caplog.text
    assert why_finished(Config(run_dir=str(run))).startswith(wanted)
    assert why_finished(Config(run_dir=str(run), steps=1)).startswith("steps is 1, but 3")
    assert not why_finished(Config(run_dir=str(run), steps=4))
    assert life(steps=4) == 0 and [line["step"] for line in history(run)] == [1, 2, 3, 4]


def test_the_last_step_is_evaluated_where_it_was_not_meant_to_be_the_last(
    life, tmp_path, monkeypatch
):
    """A run that is stopped, and then ended by fewer steps than it has done: it has val_loss and
    state_fp, as every last step has."""
    agree, calls = training_life.agree, itertools.count()

    def stopped(batch, stop, *rest):
        return agree(batch, stop or next(calls) == 3, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(training_life, "agree", stopped)
        assert life(**BEGUN | {"steps": 100000, "eval_every": 100000}) == 143
    assert not {"val_loss", "state_fp"} & list(history(tmp_path / "run"))[-1].keys()
    assert life(steps=1) == 0
    lines = list(history(tmp_path / "run"))
    assert len(lines) == 3 and {"val_loss", "state_fp"} <= lines[-1].keys()


def test_time_that_is_used_up_is_said(life, tmp_path, caplog):
    """A run that its max_time has ended keeps it: another life ends at once and says the fix."""
    caplog.set_level(logging.INFO)
    assert life(**BEGUN | {"steps": 100000, "max_time": 0.05}) == 0
    steps = len(list(history(tmp_path / "run")))
    caplog.clear()
    assert life() == 0 and len(list(history(tmp_path / "run"))) == steps < 100000
    assert "max_time of 0.05 s is used up: a larger --max-time goes on" in caplog.text
    assert life(max_time=0.0, steps=steps + 1) == 0
    assert len(list(history(tmp_path / "run"))) == steps + 1


def test_a_run_that_is_done_says_how_it_goes_on(life, caplog):
    """Started again it does no step; what it prints is plain, of one rank too."""
    caplog.set_level(logging.INFO)
    assert life(**BEGUN) == 0
    assert "k parameters" in caplog.text and ", 1 rank;" in caplog.text
    assert "a larger --steps goes on" not in caplog.text
    assert life() == 0
    assert f"all {BEGUN['steps']} steps are done: a larger --steps goes on" in caplog.text
