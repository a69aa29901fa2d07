"""A run that begins with the weights of a folder, and continues without it."""

import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.forked import TRAIN, ranks
from support.hf_folder import write_gpt2

from gptddp import train
from gptddp.audit import audit
from gptddp.checkpoint.run_state import configuration
from gptddp.config import PRESETS, Config
from gptddp.errors import AuditError
from gptddp.inference.export import export
from gptddp.inference.load_model import load
from gptddp.run.history import history, read_ledger
from gptddp.training import first_state

# `support.toy.SMALL` without the shape of the model.
FEW = [
    *("--lanes", "4", "--batch", "4", "--micro-batch", "2", "--warmup-steps", "2"),
    *("--precision", "fp32", "--device", "cpu", "--eval-tokens", "512", "--steps", "3"),
    *("--cache-dir", "none", "--threads", "1"),
]


@pytest.fixture
def gpt2(corpus, tmp_path):
    """A folder with the tokenizer of the dataset."""
    made = write_gpt2(tmp_path / "gpt2", n_embd=32)
    shutil.copy(corpus / "tokenizer.json", made)
    return made


@pytest.fixture
def begin(corpus, tmp_path, train_here):
    """begin(*flags, run=...): the exit code of a start."""
    return lambda *flags, run="run": train.main(
        [*FEW, "--data", str(corpus), "--run-dir", str(tmp_path / run), *map(str, flags)]
    )


def states(run):
    return [line["state_fp"] for line in history(run) if "state_fp" in line]


def test_a_run_begins_with_the_weights_and_shape_of_the_folder(gpt2, begin, tmp_path):
    """The first weights are those of the folder, not of a seed. Other fields come from config.json,
    and the peak rate is a tenth of the preset's."""
    assert begin("--init-from", gpt2, "--lr", 1e-9, "--steps", 1) == 0
    net, tokenizer, _ = load(tmp_path / "run")
    there = load_file(gpt2 / "model.safetensors")
    assert torch.allclose(net.wte.weight, there["transformer.wte.weight"], atol=1e-7)
    assert len(net.wte.weight) == tokenizer.vocab_size  # no extra rows
    config = configuration(tmp_path / "run")
    assert (config.n_layer, config.n_head, config.n_embd, config.seq_len) == (1, 2, 32, 32)
    assert begin("--init-from", gpt2, "--seq-len", 16, run="short") == 0
    config = configuration(tmp_path / "short")
    assert config.seq_len == 16 and config.lr == PRESETS["tiny"]["lr"] / 10
    assert config.init_sha256 == configuration(tmp_path / "run").init_sha256


def test_a_continued_run_does_not_need_the_folder(gpt2, begin, tmp_path):
    """A run continues with the same flags after the folder is deleted, without the flags, and with
    a copy of the folder elsewhere; it keeps its first weights."""
    assert begin("--init-from", gpt2, "--steps", 1) == 0
    begun = configuration(tmp_path / "run").init_sha256
    shutil.move(gpt2, tmp_path / "moved")
    assert begin("--init-from", gpt2, "--steps", 2) == 0
    assert begin("--steps", 3) == 0
    assert begin("--init-from", tmp_path / "moved", "--steps", 4) == 0
    assert [line["step"] for line in history(tmp_path / "run")] == [1, 2, 3, 4]
    assert configuration(tmp_path / "run").init_sha256 == begun


def flip(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.ln_1.bias"].view(torch.int32)[0] ^= 1
    save_file(tensors, folder / "model.safetensors")


def test_other_weights_are_refused_in_a_continued_run(gpt2, begin, tmp_path, capfd):
    """A folder with one other bit is refused, any folder if the run began from its seed, and a
    given hash that differs from the folder's."""
    assert begin("--init-from", gpt2) == 0
    other = shutil.copytree(gpt2, tmp_path / "other")
    flip(other)
    assert begin("--init-from", other, "--steps", 4) == 2
    assert "has other weights (sha256" in capfd.readouterr().err
    assert begin("--n-layer", 1, "--n-embd", 32, "--seq-len", 32, run="seed") == 0
    assert begin("--init-from", gpt2, "--steps", 4, run="seed") == 2
    assert "began with random weights: leave out --init-from" in capfd.readouterr().err
    mine = configuration(tmp_path / "run").init_sha256
    assert begin("--init-from", other, "--init-sha256", mine, run="new") == 2
    assert "has other weights (sha256" in capfd.readouterr().err
    assert begin("--init-from", gpt2, "--init-sha256", mine, run="new") == 0
    assert begin("--init-sha256", mine, run="newer") == 2
    assert "give --init-from again" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--n-layer", "2"], "n_layer is 2, but"),
        (["--seq-len", "64"], "seq_len is 64, but"),
        (["--depth", "4"], "depth is 4, but --init-from decides the model's shape"),
        (["--n-head", "4"], "leave out --n-head to train that model"),
    ],
)
def test_a_field_that_contradicts_the_folder_is_refused(gpt2, begin, tmp_path, capfd, flags, words):
    """The message has both values; no file of a run remains, so the right command can follow."""
    assert begin("--init-from", gpt2, *flags) == 2
    assert words in capfd.readouterr().err
    assert not list((tmp_path / "run").glob("*.json*"))
    assert begin("--init-from", gpt2) == 0


def test_two_ranks_begin_with_the_weights_that_rank_0_reads(gpt2, begin, tmp_path, corpus):
    """Rank 1 has no folder; the state after each step has the same bits as with one rank. An
    unusable folder ends both with exit code 2."""
    alone = "import os\nif os.environ['RANK'] == '1': sys.argv[-1] += '-of-another-machine'\n"
    flags = [*FEW, "--data", str(corpus), "--run-dir", str(tmp_path / "two")]
    code = "import sys\n" + alone + TRAIN
    found = ranks(2, *flags, "--init-from", str(gpt2), code=code)
    assert [it.wait(60) for it in found] == [0, 0], found[0].stderr.read()
    assert begin("--init-from", gpt2) == 0
    assert states(tmp_path / "two") == states(tmp_path / "run") != []
    (gpt2 / "model.safetensors").unlink()
    flags[flags.index(str(tmp_path / "two"))] = str(tmp_path / "three")
    found = ranks(2, *flags, "--init-from", str(gpt2), code=code)
    assert [it.wait(60) for it in found] == [2, 2]


KILLED = """
import os, signal
from gptddp.training import {module} as it
inner = it.{name}
def killed(*args, **kwargs):
    {before}os.kill(os.getpid(), signal.SIGKILL)
it.{name} = killed
"""


@pytest.mark.parametrize(
    ("module", "name", "after"),
    [
        ("opening", "first_state", True),
        ("recorder", "recover", True),
        ("life", "agree", False),  # the event of the start is on the disk
    ],
)
def test_a_first_start_that_is_killed_is_begun_again(
    gpt2, begin, tmp_path, corpus, module, name, after
):
    """After a kill at any place, the same command begins with the same weights. Without the folder
    it asks for it, and it refuses another folder."""
    before = "inner(*args, **kwargs); " if after else ""
    code = KILLED.format(module=module, name=name, before=before) + TRAIN
    flags = [*FEW, "--data", str(corpus), "--run-dir", str(tmp_path / "run")]
    (found,) = ranks(1, *flags, "--init-from", str(gpt2), code=code)
    assert found.wait(60) == -signal.SIGKILL
    assert begin("--init-from", gpt2, run="whole") == 0
    if name == "agree":
        assert begin() == 2
        other = shutil.copytree(gpt2, tmp_path / "other")
        flip(other)
        assert begin("--init-from", other) == 2
    assert begin("--init-from", gpt2) == 0
    assert states(tmp_path / "run") == states(tmp_path / "whole") != []


def test_an_audit_from_the_first_step_needs_the_folder(gpt2, begin, tmp_path):
    """The audit has the same bits, or names a missing or other folder; a later audit needs none."""
    assert begin("--init-from", gpt2, "--checkpoint-every", 0) == 0
    assert begin("--steps", 5, "--checkpoint-every", 0) == 0  # the newest life got no folder
    run = tmp_path / "run"
    report = audit(run, "", True)
    assert (report.begin, report.end, report.exit_code) == (0, 5, 0)
    moved = shutil.move(gpt2, tmp_path / "moved")
    with pytest.raises(AuditError, match="the run's weights: .*gpt2/config.json does not exist"):
        audit(run, "", True)
    assert audit(run, "", False).exit_code == 0
    flip(shutil.move(moved, gpt2))
    with pytest.raises(AuditError, match="has other weights"):
        audit(run, "", True)


def test_an_exported_run_begins_another_with_the_same_bits(gpt2, begin, tmp_path, corpus):
    """A run that begins with an exported run has all its weights, and so all its logits."""
    assert begin("--n-layer", 2, "--n-head", 2, "--n-embd", 32, "--seq-len", 32) == 0
    assert export(tmp_path / "run", tmp_path / "folder") == 3
    folder = tmp_path / "folder"
    config = first_state.with_fields_of_folder(Config(init_from=str(folder)))
    assert (config.n_layer, config.seq_len) == (2, 32)
    assert begin("--init-from", folder, "--steps", 1, "--lr", 0, run="next") == 0
    (a, tokenizer, _), (b, _, _) = load(tmp_path / "run"), load(tmp_path / "next")
    ids = torch.arange(tokenizer.vocab_size)[None, :32]
    with torch.no_grad():
        hidden = a.hidden(ids), b.hidden(ids)
    assert hidden[0].equal(hidden[1])
    n = tokenizer.vocab_size
    assert a.wte.weight[:n].equal(b.wte.weight[:n])
    (event,) = [it for it in read_ledger(tmp_path / "next") if it["event"] == "start"]
    assert event["config"]["init_sha256"] == configuration(tmp_path / "next").init_sha256 != ""
    assert json.loads((folder / "config.json").read_text())["model_type"] == "gpt2"
