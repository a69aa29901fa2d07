"""The comparison of bits that fault tests end with: it sees what a tolerance would pass."""

import shutil
from pathlib import Path

import pytest
from support.toy import SMALL, training_here
from support.waiting_writer import Writer

from gptddp import train
from gptddp.checkpoint import run_state
from gptddp.checkpoint.load import load_newest
from gptddp.model.sums import ExactSums
from gptddp.run.history import history
from gptddp.training import life

pytestmark = pytest.mark.usefixtures("train_here")
FLAGS = ["--steps", "6", "--final-lr", "1"]  # the rate does not depend on the number of steps


@pytest.fixture(scope="module")
def here(corpus):
    """here(folder, *flags): train six steps in this process."""

    def go(folder: Path, *flags: str) -> Path:
        fixed = [*SMALL, "--data", str(corpus), "--run-dir", str(folder), *FLAGS]
        with training_here():
            assert train.main([*fixed, *flags]) == 0
        return folder

    return go


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_that_is_skipped_leaves_the_state_as_it_was(here, tmp_path, monkeypatch, optimizer):
    """Its grids too, of the tensors whose gradients are numbers; one slot of one step has a NaN."""
    add, calls = ExactSums._add, []

    def spoilt(self, numbers):
        calls.append(1)
        if len(calls) == 30:
            self._params[0].grad[0, 0] = float("nan")
        add(self, numbers)

    monkeypatch.setattr(ExactSums, "_add", spoilt)
    monkeypatch.setattr(life, "CHECK_EVERY", 1)
    lines = list(history(here(tmp_path / "run", "--optimizer", optimizer)))
    (skipped,) = (line["step"] for line in lines if line["loss"] is None or not line["grad_norm"])
    states = [line["state_fp"] for line in lines]
    assert 1 < skipped < 6 and states[skipped - 1] == states[skipped - 2]
    assert len(set(states)) == len(states) - 1


def test_a_state_that_was_saved_with_another_fingerprint_is_not_gone_on_from(
    here, corpus, tmp_path, capfd
):
    """Its bytes are as they were written, and one number is not that of the run: exit code 4."""
    run = here(tmp_path / "run", "--steps", "4")
    loaded = load_newest(run)
    shutil.rmtree(run / "checkpoints" / loaded.name)
    tensors = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    tensors["model.wte.weight"][3, 3] += 1
    run_id = run_state.read(run).run_id
    assert Writer(run, 1, keep=9, run_id=run_id).save(4, tensors, loaded.meta).error is None
    fixed = [*SMALL, "--data", str(corpus), "--run-dir", str(run)]
    assert train.main([*fixed, *FLAGS]) == 4
    assert "and was saved with" in capfd.readouterr().err
