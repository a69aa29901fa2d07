"""`gptddp eval`: the numbers of the run's own evaluations, on any dataset of the same tokenizer."""

import json
import math
import shutil

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from support.forked import ranks
from support.hf_folder import write_gpt2
from support.toy import SMALL, training_here
from torch.nn import functional as F

from gptddp import train
from gptddp.cli import cli
from gptddp.data.dataset import open_dataset
from gptddp.data.loader import eval_rows
from gptddp.inference.load_model import load
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
from gptddp.run.history import history

MAIN = "from gptddp.cli import cli; cli()"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """Two steps, and two more: each evaluated and saved at its end."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    where = ["--data", str(corpus), "--run-dir", str(folder), "--lr", "0.01"]
    with training_here():
        for steps in ("2", "4"):
            assert train.main([*SMALL, *where, "--steps", steps]) == 0
    return folder


def invoke(*args):
    with training_here():
        return CliRunner().invoke(cli, ["eval", *map(str, args)])


def evaluated(*args):
    result = invoke(*args, "-o", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_eval_gives_the_numbers_of_the_runs_own_evaluation(run, corpus):
    """With as many tokens `eval` gives every bit of the log's val_loss and val_bpb, for the newest
    checkpoint and for a given step; the printed line has the same numbers."""
    by_step = {line["step"]: line for line in history(run)}
    newest = evaluated(run, corpus, "--tokens", 512)
    assert (newest["step"], newest["split"]) == (4, "val")
    assert (newest["loss"], newest["bpb"]) == (by_step[4]["val_loss"], by_step[4]["val_bpb"])
    second = evaluated(run, corpus, "--tokens", 512, "--step", 2)
    assert (second["loss"], second["bpb"]) == (by_step[2]["val_loss"], by_step[2]["val_bpb"])
    assert second["loss"] != newest["loss"]
    line = invoke(run, corpus, "--tokens", 512).stdout
    assert f"loss {newest['loss']:.4f} nats a token, {newest['bpb']:.4f} bits a byte" in line


def test_a_given_step_is_sampled_and_exported(run, tmp_path):
    """`--step 2` uses the checkpoint of step 2, by default the newest. A step without a checkpoint
    is refused with a list of steps, and `checkpoints` takes --step only with --export."""
    for step in (2, 4):
        args = ["checkpoints", str(run), "--export", str(tmp_path / f"{step}")]
        args += ["--step", "2"] * (step == 2)
        exported = CliRunner().invoke(cli, args)
        assert exported.exit_code == 0 and f"step {step} is exported" in exported.stderr
        net, *_ = load(run, step=step)
        weights = load_file(tmp_path / f"{step}/model.safetensors")
        assert weights["transformer.wpe.weight"].equal(net.wpe.weight)
    assert not load(run, step=2)[0].wpe.weight.equal(net.wpe.weight)
    sampled = CliRunner().invoke(cli, ["sample", str(run), "--step", "2", "--tokens", "3"])
    assert sampled.exit_code == 0 and "step 2, seed 0" in sampled.stderr
    for args in (["sample", str(run)], ["checkpoints", str(run), "--export", str(tmp_path / "9")]):
        refused = CliRunner().invoke(cli, [*args, "--step", "9"])
        assert refused.exit_code == 2 and "no checkpoint of step 9: use one of" in refused.stderr
    refused = CliRunner().invoke(cli, ["checkpoints", str(run), "--step", "2"])
    assert refused.exit_code == 2 and "--step selects the checkpoint" in refused.stderr


def test_a_whole_split_is_evaluated_by_definition(run, tmp_path, books, corpus):
    """In each split the loss is the mean over all targets, and all bytes of the text count."""
    file = str(corpus / "tokenizer.json")
    prepare([str(books)], str(tmp_path / "texts"), Settings(tokenizer=file, val_fraction=0.1))
    dataset = open_dataset(tmp_path / "texts")
    net, tokenizer, _ = load(run)
    for split in ("val", "train"):
        found = evaluated(run, tmp_path / "texts", "--split", split)
        nats = targets = n_bytes = 0
        rows = eval_rows(dataset, net.seq_len, 1 << 62, split=split)
        for tokens, valid in zip(*map(torch.from_numpy, rows), strict=True):
            tokens = tokens.long()
            with torch.no_grad():
                logits = net(tokens[None, :-1])[0]
            y = tokens[1:][valid]
            nats += F.cross_entropy(logits[valid].double(), y, reduction="sum").item()
            targets += len(y)
            n_bytes += int(tokenizer.token_bytes[y].sum())
        texts = sum(len(t.encode()) for t in dataset_texts(dataset, split))
        assert (found["targets"], found["bytes"]) == (targets, n_bytes) and n_bytes == texts
        assert math.isclose(found["loss"], nats / targets, rel_tol=1e-5)
    assert found["targets"] > 1000


def dataset_texts(dataset, split):
    import pyarrow.parquet as pq

    for path in sorted({dataset.dir / group.path for group in dataset.row_groups(split)}):
        yield from pq.read_table(path)["text"].to_pylist()


def test_two_ranks_give_the_same_bits_and_one_report(run, corpus, tmp_path):
    """Under torchrun each rank evaluates a part of the rows, and only rank 0 prints."""
    code = f"import os, sys\nsys.stdout = open('{tmp_path}/' + os.environ['RANK'], 'w')\n{MAIN}"
    found = ranks(2, "eval", str(run), str(corpus), "-o", "json", code=code)
    assert [it.wait(60) for it in found] == [0, 0], found[0].stderr.read()
    assert json.loads((tmp_path / "0").read_text()) == evaluated(run, corpus)
    assert (tmp_path / "1").read_text() == ""


def test_a_folder_of_hugging_face_is_evaluated_as_well(run, corpus, tmp_path):
    """The exported model of a run has almost the same loss on the same tokens (it lacks the padding
    rows of the vocabulary). A GPT-2 that was never a run is evaluated, too."""
    result = CliRunner().invoke(cli, ["checkpoints", str(run), "--export", str(tmp_path / "hf")])
    assert result.exit_code == 0
    theirs, ours = evaluated(tmp_path / "hf", corpus), evaluated(run, corpus)
    assert theirs["step"] is None and theirs["targets"] == ours["targets"]
    assert math.isclose(theirs["loss"], ours["loss"], rel_tol=1e-5)
    made = write_gpt2(tmp_path / "gpt2")
    shutil.copy(corpus / "tokenizer.json", made)
    assert evaluated(made, corpus, "--tokens", 512)["loss"] > theirs["loss"]


def test_wrong_models_datasets_and_steps_are_refused(run, corpus, books, tmp_path):
    """For another tokenizer the message has the command that prepares with the right one, for a
    step without a checkpoint a list of steps; no run, and a folder of another kind are refused."""
    prepare([str(books)], str(tmp_path / "bytes"), Settings(tokenizer="bytes"))
    result = invoke(run, tmp_path / "bytes")
    assert result.exit_code == 2
    file = corpus / "tokenizer.json"
    assert f"gptddp prepare SOURCE --tokenizer {file} --out DIR" in result.stderr
    result = invoke(run, corpus, "--step", 9)
    assert result.exit_code == 2 and "no checkpoint of step 9: use one of these: " in result.stderr
    assert invoke(tmp_path / "none", corpus).exit_code == 2
    assert invoke(run, tmp_path / "none").exit_code == 2
    made = write_gpt2(tmp_path / "bert", change=lambda about, _: about.update(model_type="bert"))
    result = invoke(made, corpus)
    assert result.exit_code == 2 and "model_type is 'bert'" in result.stderr
    assert "--init-from" not in result.stderr  # it was not given
    result = invoke(write_gpt2(tmp_path / "gpt2"), corpus, "--step", 3)
    assert result.exit_code == 2 and "omit --step 3" in result.stderr


def test_a_damaged_checkpoint_is_skipped_or_refused(run, corpus, tmp_path):
    """By default the checkpoint before it is used; if its step is requested, it is refused with the
    reason. The run is not changed."""
    mine = shutil.copytree(run, tmp_path / "run")
    (newest,) = (mine / "checkpoints").glob("step-000000000004.*")
    (shard,) = newest.glob("*.bin")
    damaged = bytearray(shard.read_bytes())
    damaged[100] ^= 1
    shard.write_bytes(damaged)
    names = sorted(path.name for path in (mine / "checkpoints").iterdir())
    assert evaluated(mine, corpus, "--tokens", 512)["step"] < 4
    result = invoke(mine, corpus, "--step", 4)
    assert result.exit_code == 4 and "use another step" in result.stderr
    assert sorted(path.name for path in (mine / "checkpoints").iterdir()) == names
