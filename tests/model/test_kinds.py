"""Whole runs of each kind of model: it learns, and neither world size nor kills change a bit."""

import pytest
from click.testing import CliRunner
from support.forked import TRAIN, train
from support.same_bits import check_same_bits
from support.toy import SMALL
from support.waiting import until

from gptddp.checkpoint import store
from gptddp.cli import cli
from gptddp.run.history import history

STEPS = 18
# In SMALL's shape; one has a document mask, the other windows and dropout.
KINDS = {
    "modern-tiny": ["--kv-heads", "1", "--mask", "document"],
    "autoresearch": ["--windows", "SL", "--dropout", "0.1"],
}
REST = ["--lr", "1e-2", "--steps", str(STEPS), "--eval-every", "6", "--keep-every", "4"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request, corpus, tmp_path_factory):
    """The flags of a kind of model, and its run in one process."""
    flags = [*SMALL, "--data", str(corpus), "--preset", request.param, *KINDS[request.param], *REST]
    folder = tmp_path_factory.mktemp(request.param) / "run"
    train(1, *flags, "--run-dir", str(folder))
    return flags, folder


def test_each_kind_of_model_learns(kind):
    """The validation loss falls at each evaluation."""
    losses = [line["val_loss"] for line in history(kind[1]) if "val_loss" in line]
    assert len(losses) == 3 and losses == sorted(losses, reverse=True)
    first, *_, last = history(kind[1])
    assert last["loss"] < first["loss"] - 0.7 and losses[-1] < losses[0] - 0.1


def test_a_world_size_and_a_kill_change_no_bit(kind, forked, tmp_path):
    """One process is killed within the run, and three finish it with the undisturbed bits."""
    (flags, undisturbed), world = kind, 3
    run = tmp_path / "run"
    process = forked(TRAIN, *flags, "--run-dir", str(run), "--checkpoint-every", "0")
    log = run / "log.1.jsonl"
    until(lambda: log.read_text().count("\n") >= 5 and store.names(run), poll_s=0.002)
    process.kill()
    process.wait(60)
    assert not (run / "finished.json").exists()
    train(world, *flags, "--run-dir", str(run))
    lines = list(history(run))
    assert {line["world_size"] for line in lines} == {1, world}
    check_same_bits(run, undisturbed)


def test_a_kind_is_sampled_and_exported_if_transformers_has_it(kind):
    """transformers lacks the parts of autoresearch: exit code 2, with the required fields."""
    flags, run = kind[0], str(kind[1])
    sampled = CliRunner().invoke(cli, ["sample", run, "--tokens", "40"])  # beyond a row's 32
    assert sampled.exit_code == 0 and sampled.output.strip()
    refused = CliRunner().invoke(cli, ["checkpoints", run, "--export", f"{run}.out"])
    if "modern-tiny" in flags:
        assert refused.exit_code == 0
        return
    assert refused.exit_code == 2 and "has activation relu2, softcap 15.0, " in refused.output
    assert "train one with activation swiglu, softcap 0.0, extras none" in refused.output
