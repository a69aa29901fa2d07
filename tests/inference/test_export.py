"""A model leaves a run: in GPT-2's layout, whole or not at all, and never over something else."""

import json
import os

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from support.toy import SMALL, training_here
from tokenizers import Tokenizer
from torch.nn import functional as F

from gptddp import train
from gptddp.cli import cli
from gptddp.data.dataset import open_dataset
from gptddp.inference import export
from gptddp.inference.load import load


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
    """The exported names, layouts and configuration give the model's own logits, and its tokenizer
    the same ids; the metadata says what it is."""
    result = invoke(run, "--export", tmp_path / "model")
    assert result.exit_code == 0, result.output
    assert "step 4 is exported" in result.stderr
    config = json.loads((tmp_path / "model/config.json").read_text())
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    net, tokenizer, _ = load(run)
    assert metadata["format"] == "pt" and metadata["step"] == "4"
    assert metadata["tokenizer_sha256"] == tokenizer.sha256
    assert json.loads(metadata["gptddp_config"])["n_embd"] == 32
    text = "import os\n"
    ids = [
        tokenizer.bos,
        *Tokenizer.from_file(str(tmp_path / "model/tokenizer.json")).encode(text).ids,
    ]
    assert ids[1:] == tokenizer.encoder()(text).tolist()
    assert config["vocab_size"] == tokenizer.vocab_size == len(tensors["transformer.wte.weight"])
    with torch.no_grad():
        own = net(torch.tensor([ids]))[0, :, : tokenizer.vocab_size]
    assert torch.allclose(gpt2(tensors, config, ids), own, atol=1e-4)
    assert own.std() > 0.05
    about = json.loads((tmp_path / "model/tokenizer_config.json").read_text())
    assert open_dataset(corpus).tokenizer().bos == config["eos_token_id"]
    assert about["bos_token"] == "<|bos|>" and about["model_max_length"] == config["n_positions"]


def test_the_weights_alone(run, tmp_path):
    """A name that ends in .safetensors is one file, with nothing beside it."""
    assert invoke(run, "--export", tmp_path / "new/m.safetensors").exit_code == 0
    assert os.listdir(tmp_path / "new") == ["m.safetensors"]


def test_nothing_is_overwritten_or_half_written(run, tmp_path, monkeypatch):
    """What exists stays as it is, a full disk leaves nothing, and both are told."""
    (tmp_path / "model").mkdir()
    result = invoke(run, "--export", tmp_path / "model")
    assert result.exit_code == 2 and "exists" in result.stderr

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_json_atomic", full)
    result = invoke(run, "--export", tmp_path / "other")
    assert result.exit_code == 2 and "No space left" in result.stderr
    assert os.listdir(tmp_path) == ["model"] and os.listdir(tmp_path / "model") == []


def test_an_export_without_a_checkpoint(run, tmp_path):
    """A folder that is no run, and a run without a checkpoint, are told apart and exported by no
    means."""
    assert "not a run directory" in invoke(tmp_path, "--export", tmp_path / "m").stderr
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    result = invoke(tmp_path, "--export", tmp_path / "m")
    assert result.exit_code == 4 and "no checkpoint yet" in result.stderr
