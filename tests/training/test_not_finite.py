"""Steps whose loss or gradient is not finite, with each optimizer."""

import math

import pytest
import torch

from gptddp.checkpoint.load import load_newest
from gptddp.presets import OPTIMIZERS
from gptddp.run.history import history


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_that_stay_non_finite_end_the_run_with_exit_code_3(run, tmp_path, capfd, optimizer):
    """A skipped step is logged without a loss, and never saved as trained; the number of skipped
    steps is bounded. Fields at their largest values cause such steps."""
    worst = ("--lr", "1e30", "--weight-decay", "1e3", "--final-lr", "1", "--optimizer", optimizer)
    assert run("--steps", "50", *worst, "--warmup-steps", "0", "--max-skipped", "3") == 3
    assert "not finite 4 times in a row" in capfd.readouterr().err
    lines = list(history(tmp_path / "run"))
    assert [line["loss"] for line in lines[-4:]] == [None] * 4
    assert all(line["batch_fp"] for line in lines)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(run, tmp_path, monkeypatch, optimizer):
    """Weights, momentum and moments stay, also if the optimizer has prepared a step; the next step
    is done, and the state in the end is finite."""
    clip, states = torch.nn.utils.clip_grad_norm_, []

    def third_is_nan(params, *rest):
        params = list(params)
        if len(states) == 2:
            params[5].grad.fill_(math.nan)
        states.append(None)
        return clip(params, *rest)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", third_is_nan)
    monkeypatch.setattr("gptddp.training.life.CHECK_EVERY", 1)
    assert run("--steps", "5", "--optimizer", optimizer) == 0
    lines = list(history(tmp_path / "run"))
    assert [line["loss"] is None for line in lines] == [False, False, True, False, False]
    prints = [line["state_fp"] for line in lines]
    assert prints[2] == prints[1] and len(set(prints)) == 4
    state = load_newest(tmp_path / "run").tensors
    assert all(tensor.isfinite().all() for tensor in state.values())
