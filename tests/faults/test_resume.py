"""A run of one process keeps its bits over many lives, with dropout and accumulation."""

import random

import pytest
from support.faulty_jobs import SHORT, Fault
from support.same_bits import check_same_bits
from support.toy import SMALL

from gptddp import train
from gptddp.training import life


@pytest.mark.fault(31)
@pytest.mark.usefixtures("train_here")
def test_fifty_resumes_at_random_steps_change_no_bit(corpus, tmp_path, measured, monkeypatch):
    """Stopped and resumed fifty times, a run has the losses and bits of one without a stop."""
    lives = 5 if SHORT else 50
    flags = [*SMALL, "--data", str(corpus), "--steps", str(lives * 4), "--dropout", "0.1"]
    flags += ["--eval-every", "100000", "--run-dir"]
    assert train.main([*flags, str(tmp_path / "whole")]) == 0

    agree = life.agree
    left = [0]  # steps until this life is asked to stop

    def agree_or_stop(batch, said, *rest):
        left[0] -= 1
        return agree(batch, (left[0] < 0 or said[0], *said[1:]), *rest)

    random.seed(31)
    monkeypatch.setattr(life, "agree", agree_or_stop)
    stops = 0
    for _ in range(lives):
        left[0] = random.randint(1, 4)
        stops += train.main([*flags, str(tmp_path / "parts")]) == 143
    left[0] = lives * 4
    assert train.main([*flags, str(tmp_path / "parts")]) == 0
    assert stops > lives / 2
    check_same_bits(tmp_path / "parts", tmp_path / "whole")
    measured(f"stopped and resumed at {lives} random steps", Fault(), "the same bits")
