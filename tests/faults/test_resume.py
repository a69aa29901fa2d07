"""The same run in many lives of one process: dropout and accumulation included, to the bit."""

import random

import pytest
import torch
from support.faulty_jobs import SHORT, Fault
from support.toy import SMALL

from gptddp import train
from gptddp.checkpoint.load import load_newest
from gptddp.run.history import history
from gptddp.training import life


@pytest.mark.fault(31)
@pytest.mark.usefixtures("train_here")
def test_fifty_resumes_at_random_steps_are_the_same_run(corpus, tmp_path, measured, monkeypatch):
    """Stopped and resumed fifty times, a run has the losses and the bits of one without a stop."""
    lives = 5 if SHORT else 50
    flags = [*SMALL, "--data", str(corpus), "--steps", str(lives * 4), "--dropout", "0.1"]
    flags += ["--eval-every", "100000", "--run-dir"]
    assert train.main([*flags, str(tmp_path / "whole")]) == 0

    agree = life.agree
    left = [0]  # steps until this life is asked to stop

    def agree_or_stop(batch, stop, *rest):
        left[0] -= 1
        return agree(batch, left[0] < 0 or stop, *rest)

    random.seed(31)
    monkeypatch.setattr(life, "agree", agree_or_stop)
    stops = 0
    for _ in range(lives):
        left[0] = random.randint(1, 4)
        stops += train.main([*flags, str(tmp_path / "parts")]) == 143
    left[0] = lives * 4
    assert train.main([*flags, str(tmp_path / "parts")]) == 0
    assert stops > lives / 2
    runs = [load_newest(tmp_path / name) for name in ("whole", "parts")]
    losses = [[line["loss"] for line in history(tmp_path / n)] for n in ("whole", "parts")]
    assert losses[0] == losses[1] and runs[0] and runs[1]
    assert runs[0].tensors.keys() == runs[1].tensors.keys()
    assert all(torch.equal(t, runs[1].tensors[name]) for name, t in runs[0].tensors.items())
    measured(f"stopped and resumed at {lives} random steps", Fault(), "the same bits")
