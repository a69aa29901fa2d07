"""Modern models are exported as a Llama or a Qwen 3, and read back unchanged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.toy import LAYOUTS, SMALL, training_here

from gptddp import train
from gptddp.config import Config
from gptddp.data.dataset import open_dataset
from gptddp.errors import ConfigError
from gptddp.flags import GPT2
from gptddp.inference.export import export
from gptddp.inference.load_model import configuration, load, load_for
from gptddp.model.attention import Attention
from gptddp.presets import PARTS
from gptddp.pretrained.folder import open_folder
from gptddp.pretrained.kinds import kind_for

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=LAYOUTS)
def exported(request, corpus, tmp_path_factory):
    """The model_type, a run of a few steps with a large rate, and its export."""
    kind, flags = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    where = ["--data", str(corpus), "--run-dir", str(folder / "run"), "--steps", "4"]
    with training_here():
        assert train.main([*SMALL, *where, *flags, "--lr", "0.05"]) == 0
    export(folder / "run", folder / "out")
    return kind, folder / "run", folder / "out"


def test_an_exported_model_is_read_back_with_every_bit(exported, corpus):
    """Parts, every weight, and the input of the output projection equal the run's."""
    kind, run, out = exported
    dataset, before = open_dataset(corpus), configuration(run)
    assert open_folder(out).kind.model_type == kind
    net, tokenizer, _ = load(run)
    back, config, _ = load_for(out, dataset, None, CPU)
    for name in (*PARTS, "kv_heads", "n_layer", "n_head", "n_embd", "seq_len"):
        assert getattr(config, name) == getattr(before, name), name
    ours, theirs = dict(net.named_parameters()), dict(back.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].equal(ours[name][: len(theirs[name])]) for name in ours)
    rows = torch.randint(tokenizer.vocab_size, (2, before.seq_len))
    for part in back.modules():  # attention is this machine's choice for a new run
        if isinstance(part, Attention):
            part.in_blocks = before.attention == "blocks"
    with torch.no_grad():
        assert back.hidden(rows).equal(net.hidden(rows))


def formula(w, c, ids):
    """Logits (T, vocab) of a Llama or Qwen 3, a head at a time, with complex rotations."""
    t, size, heads = len(ids), c["head_dim"], c["num_attention_heads"]

    def normed(x, name):
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / (mean + c["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    angles = torch.arange(t)[:, None] * c["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    turns = torch.polar(torch.ones(t, size // 2), angles.float())

    def turned(x):  # (T, heads, size)
        z = torch.complex(*x.chunk(2, -1)) * turns[:, None]
        return torch.cat([z.real, z.imag], -1)

    distance = torch.arange(t)[:, None] - torch.arange(t)
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        kind = c.get("layer_types", ["full_attention"] * 9)[i]
        seen = distance.ge(0) & distance.lt(t if kind == "full_attention" else c["sliding_window"])
        h = normed(x, f"{at}.input_layernorm")
        parts = (h @ w[f"{at}.self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k, v = (p.view(t, -1, size) for p in parts)
        if c["model_type"] == "qwen3":
            q, k = normed(q, f"{at}.self_attn.q_norm"), normed(k, f"{at}.self_attn.k_norm")
        q, k, y = turned(q), turned(k), []
        for head in range(heads):
            of = head * c["num_key_value_heads"] // heads
            scores = (q[:, head] @ k[:, of].T / size**0.5).masked_fill(~seen, -torch.inf)
            y.append(scores.softmax(-1) @ v[:, of])
        x = x + torch.cat(y, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        h = normed(x, f"{at}.post_attention_layernorm")
        gate, up = (h @ w[f"{at}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if c["tie_word_embeddings"] else "lm_head"
    return normed(x, "model.norm") @ w[f"{head}.weight"].T


def test_the_export_computes_the_logits_of_the_run(exported):
    """The plain formula of a Llama or Qwen 3 gives the run's logits for the exported weights."""
    _, run, out = exported
    net, tokenizer, _ = load(run)
    weights = load_file(out / "model.safetensors")
    ids = torch.randint(tokenizer.vocab_size, (net.seq_len,))
    with torch.no_grad():
        ours = net(ids[None])[0, :, : tokenizer.vocab_size]
    assert ours.std() > 0.1
    assert torch.allclose(formula(weights, _about(out), ids), ours, atol=1e-4)


def test_a_run_starts_from_the_export(exported, corpus, tmp_path, train_here, capfd):
    """It trains. Shorter rows are refused for a model with windows, which are half a row long."""
    where = ["--data", str(corpus), "--init-from", str(exported[2]), "--steps", "1"]
    flags = [*SMALL, *where, "--run-dir", str(tmp_path / "run")]
    if "S" in open_folder(exported[2]).fields["windows"]:
        assert train.main([*flags, "--seq-len", "16"]) == 2
        assert "has 32: leave out --seq-len" in capfd.readouterr().err
    else:
        flags += ["--seq-len", "16"]
    assert train.main(flags) == 0


def _about(out, **changes):
    about = json.loads((out / "config.json").read_text()) | changes
    return {name: value for name, value in about.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05: the exported model had 1e-06"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters is {'rope_theta': 1000000.0}"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': the exported model had 'silu'"),
        ({"sliding_window": 16}, "sliding_window is 16: the exported model had 17"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types is ['full_attention', 'full_at"),
        ({"gptddp": ...}, "it is a qwen3 that no run has exported: its norms have weights"),
        ({"gptddp": {"n_layer": 2}}, "it is a qwen3 that no run has exported"),
    ],
)
@pytest.mark.parametrize("exported", ["windows"], indirect=True)
def test_a_setting_that_changes_the_logits_is_refused(exported, tmp_path, changes, words):
    """A model that no run has exported is refused too; the message has the file, the field and both
    values."""
    (tmp_path / "config.json").write_text(json.dumps(_about(exported[2], **changes)))
    with pytest.raises(ConfigError) as error:
        open_folder(tmp_path)
    assert words in str(error.value) and str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("exported", ["windows"], indirect=True)
def test_fields_that_the_kind_cannot_have_are_refused(exported, tmp_path):
    """An edited config.json has a part that no Qwen 3 has, or an impossible value."""
    for field, value, words in (("norm", "layernorm", "norm is"), ("n_head", 0, "n_head is 0")):
        own = _about(exported[2])["gptddp"] | {field: value}
        (tmp_path / "config.json").write_text(json.dumps(_about(exported[2], gptddp=own)))
        with pytest.raises(ConfigError, match=words):
            open_folder(tmp_path)


@pytest.mark.parametrize("exported", ["tied"], indirect=True)
def test_norms_with_weights_are_refused(exported, corpus, tmp_path):
    """The message names a weight that is not 1, as our norms have no weights."""
    name = "model.layers.1.self_attn.k_norm.weight"
    tensors = load_file(exported[2] / "model.safetensors")
    tensors[name][3] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(_about(exported[2])))
    with pytest.raises(ConfigError, match="k_norm.weight is not 16 times 1, but the norms of"):
        load_for(tmp_path, open_dataset(corpus), None, CPU)


def test_a_model_unknown_to_transformers_is_refused_with_the_nearest_kind():
    """No kind has windows without normalised queries; GPT-2 has as many key heads as heads."""
    modern = Config(preset="modern-tiny", n_head=4, kv_heads=2, **GPT2)
    with pytest.raises(ConfigError, match=r"has kv_heads 2, .* with kv_heads 4 \(gpt2\)"):
        kind_for(modern)
    parts = GPT2 | {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
    with pytest.raises(ConfigError, match=r"has windows SL, .* with windows L \(llama\)"):
        kind_for(Config(n_head=4, kv_heads=2, **parts | {"windows": "SL"}))
    with pytest.raises(ConfigError, match=r"has softcap 15.0, .* with softcap 0.0 \(llama\)"):
        kind_for(Config(n_head=4, kv_heads=2, **parts | {"softcap": 15.0}))
