"""Exports of a model: in GPT-2's layout, complete or absent, never over something else."""

import contextlib
import errno
import json
import os
import shutil
import signal

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from support.crashing import crash_at
from support.failing_volume import Writes
from support.small_disk import small_disk
from support.toy import SMALL, training_here
from tokenizers import Tokenizer
from torch.nn import functional as F

from gptddp import train
from gptddp.cli import cli
from gptddp.data.dataset import open_dataset
from gptddp.data.tokenizer import load_tokenizer, same_ids
from gptddp.errors import ConfigError
from gptddp.inference import export
from gptddp.inference.load_model import load
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run of four steps."""
    folder = tmp_path_factory.mktemp("export") / "run"
    flags = ["--data", str(corpus), "--run-dir", str(folder), "--steps", "4", "--lr", "0.1"]
    with training_here():
        assert train.main([*SMALL, *flags]) == 0
    return folder


def invoke(run, *args):
    return CliRunner().invoke(cli, ["checkpoints", str(run), *map(str, args)])


def gpt2(w, c, ids):
    """Logits (T, vocab) of GPT-2 as transformers computes them, from its names and its config."""

    def norm(x, name):
        weight, bias = w[f"transformer.{name}.weight"], w[f"transformer.{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, c["layer_norm_epsilon"])

    def conv1d(x, name):
        return x @ w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    t, heads = len(ids), c["n_head"]
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:t]
    for i in range(c["n_layer"]):
        q, k, v = (
            part.view(t, heads, -1).transpose(0, 1)
            for part in conv1d(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, dim=-1)
        )
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores += torch.full((t, t), -torch.inf).triu(1)
        x = x + conv1d(
            (scores.softmax(-1) @ v).transpose(0, 1).reshape(t, -1), f"h.{i}.attn.c_proj"
        )
        hidden = F.gelu(conv1d(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + conv1d(hidden, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["transformer.wte.weight"].T


def test_the_folder_is_a_gpt2(run, corpus, tmp_path):
    """The exported names, layouts and configuration give the model's logits, and the exported
    tokenizer gives the same ids; the metadata has step, tokenizer and configuration."""
    result = invoke(run, "--export", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert "step 4 is exported" in result.stderr
    config = json.loads((tmp_path / "model/config.json").read_text())
    weights, about = (tmp_path / f"model/{it}" for it in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == about.stat().st_mode  # the mode of any new file
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    net, tokenizer, _ = load(run)
    assert metadata["format"] == "pt" and metadata["step"] == "4"
    assert metadata["tokenizer_sha256"] == tokenizer.sha256
    assert json.loads(metadata["gptddp_config"])["n_embd"] == 32
    text = "import os\n"
    ids = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).encode(text).ids
    assert ids == [tokenizer.bos, *tokenizer.encoder()(text).tolist()]
    assert same_ids(load_tokenizer(tmp_path / "model/tokenizer.json"), tokenizer)
    assert config["vocab_size"] == tokenizer.vocab_size == len(tensors["transformer.wte.weight"])
    with torch.no_grad():
        own = net(torch.tensor([ids]))[0, :, : tokenizer.vocab_size]
    assert torch.allclose(gpt2(tensors, config, ids), own, atol=1e-4)
    assert own.std() > 0.05
    about = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert open_dataset(corpus).tokenizer().bos == config["eos_token_id"]
    assert about["bos_token"] == "<|bos|>" and about["model_max_length"] == config["n_positions"]


@pytest.fixture
def loaded(run, monkeypatch):
    """The model is loaded once, so that only the system calls of writing are counted."""
    monkeypatch.setattr(export, "load", lambda *_: found)
    found = load(run)


def test_a_given_tokenizer_keeps_its_post_processor(run, tmp_path):
    """A tokenizer with a post_processor is exported unchanged."""
    about = {"added_tokens": [{"content": "<s>", "id": 3}], "post_processor": {"type": "ByteLevel"}}
    export._write_tokenizer(tmp_path, about, 3, 32)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["post_processor"] == {
        "type": "ByteLevel"
    }


@pytest.mark.parametrize("name", [".", "/", "..", "", "model"])
def test_an_existing_or_impossible_name_is_refused(run, tmp_path, monkeypatch, name):
    """The message has the fix, and the existing folder is not changed."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    result = invoke(run, "--export", name)
    assert result.exit_code == 2 and "exists: give another name to --export" in result.stderr
    assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == []


def files_of(folder):
    """Contents by name; tensors as bytes, because the file's header may be in any order."""
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    tensors = load_file(folder / "model.safetensors")
    return made | {"model.safetensors": {k: bytes(t.numpy()) for k, t in tensors.items()}}


def test_an_export_that_is_killed_is_absent_or_complete(run, loaded, tmp_path):
    """Killed at each of its system calls, it leaves no folder of that name, or the complete one;
    then the same command succeeds, whatever the killed one has left behind."""
    export.export(run, tmp_path / "whole")
    whole, seen = files_of(tmp_path / "whole"), set()
    for number in range(1, 100):
        out = tmp_path / "out" / "model"
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                crash_at(number)
                export.export(run, out)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if there := out.exists():
            assert files_of(out) == whole
            shutil.rmtree(out)
        seen.add((killed, there))
        if not killed:
            break
        export.export(run, out)
        assert files_of(out) == whole
        shutil.rmtree(out)
    assert number > 15 and seen == {(True, False), (True, True), (False, True)}


def test_a_disk_that_is_full_at_any_write_leaves_nothing(run, loaded, tmp_path, monkeypatch):
    """Neither a part nor an unfinished folder stays, and the message has the reason. After its
    rename the folder is complete and may stay."""
    disk = Writes(tmp_path, monkeypatch.setattr)
    for number in range(100):
        with disk.failing(errno.ENOSPC, number, False):
            try:
                export.export(run, tmp_path / "new" / "model")
                break
            except ConfigError as error:
                assert "--export" in str(error) and "No space left" in str(error)
        renamed = any(it.startswith("rename") for it in disk.seen[:number])
        left = [path.name for path in tmp_path.glob("new/*")]
        assert left == (["model"] if renamed else [])
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
    assert number > 10 and len(os.listdir(tmp_path / "new/model")) == 4


def test_every_file_is_synced_before_the_folder_has_its_name(run, loaded, tmp_path, monkeypatch):
    """Otherwise a power cut would leave a folder that looks complete, with empty files."""
    disk = Writes(tmp_path, monkeypatch.setattr)
    with disk.failing(0, None, False):
        export.export(run, tmp_path / "model")
    (at,) = (n for n, it in enumerate(disk.seen) if it.startswith("rename"))
    synced = [it for it in disk.seen[:at] if it.startswith("fsync")]
    for path in (tmp_path / "model").iterdir():
        assert any(path.name in it for it in synced), path.name


def test_rows_that_pad_a_vocabulary_are_not_exported(books, tmp_path, train_here):
    """Of 320 rows of the embedding and of an untied output, 257 are tokens and are exported; plain
    bytes have no tokenizer.json."""
    prepare([str(books)], str(tmp_path / "data"), Settings(tokenizer="bytes"))
    flags = ["--preset", "modern-tiny", "--kv-heads", "1", "--head", "untied", "--steps", "1"]
    where = ["--data", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    assert train.main([*SMALL, *where, *flags]) == 0
    export.export(tmp_path / "run", tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert len(load(tmp_path / "run")[0].wte.weight) == 320
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert tensors[name].shape == (257, 32)
    assert json.loads((tmp_path / "out/config.json").read_text())["vocab_size"] == 257
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_a_disk_too_small_for_the_weights_is_reported(run, tmp_path):
    """The error of the library that writes the weights is reported, and no file remains."""
    with small_disk(tmp_path, "64k"):
        result = invoke(run, "--export", tmp_path / "model")
        assert result.exit_code == 2 and "No space left" in result.stderr
        assert os.listdir(tmp_path) == []


def test_a_dataset_of_another_tokenizer_is_refused(run, corpus, tmp_path):
    """Export and sample refuse even a tokenizer of equal size, as the text would be meaningless."""
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / f"texts/{number}.txt").write_text(f"{number} quick brown foxes " * 400)
    changed = json.loads((corpus / "tokenizer.json").read_text())
    changed["model"]["merges"].reverse()
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    settings = Settings(tokenizer=str(tmp_path / "tokenizer.json"))
    prepare([str(tmp_path / "texts")], str(tmp_path / "data"), settings)
    for args in (["checkpoints", run, "--export", tmp_path / "out"], ["sample", run]):
        result = CliRunner().invoke(cli, [*map(str, args), "--data", str(tmp_path / "data")])
        assert result.exit_code == 2 and result.stdout == ""
        assert "has another tokenizer (sha256" in result.stderr
        assert "give a dataset with the run's tokenizer, by --data" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_export_without_a_checkpoint_is_refused(run, tmp_path):
    """A folder that is no run and a run without a checkpoint have different messages."""
    assert "not a run directory" in invoke(tmp_path, "--export", tmp_path / "m").stderr
    (tmp_path / "ledger.jsonl").write_bytes((run / "ledger.jsonl").read_bytes())
    result = invoke(tmp_path, "--export", tmp_path / "m")
    assert result.exit_code == 4 and "no checkpoint yet" in result.stderr
