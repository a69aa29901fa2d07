"""Models with today's parts leave a run as a Llama or a Qwen 3, and come back as they were."""

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
from gptddp.inference.load import configuration, load, load_for
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


def test_a_model_comes_back_with_every_bit(exported, corpus):
    """Parts, every weight, and what the output projection gets are those of the run."""
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
    with torch.no_grad():
        assert back.hidden(rows).equal(net.hidden(rows))


def test_a_run_begins_with_it(exported, corpus, tmp_path, train_here, capfd):
    """It trains; of a model with windows, which are half a row, rows stay as long as they are."""
    out = str(exported[2])
    where = ["--data", str(corpus), "--init-from", out, "--steps", "1"]
    assert train.main([*SMALL, *where, "--run-dir", str(tmp_path / "run")]) == 0
    short = train.main([*SMALL, *where, "--run-dir", str(tmp_path / "short"), "--seq-len", "16"])
    if "S" in open_folder(exported[2]).fields["windows"]:
        assert short == 2 and "has 32: leave out --seq-len" in capfd.readouterr().err
    else:
        assert short == 0


def _about(out, **changes):
    about = json.loads((out / "config.json").read_text())
    return about | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05: our model has 1e-06"),
        ({"rope_theta": 5e5}, "rope_theta is 500000.0: our model has 10000.0"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0: our model has"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn': our model has"),
        ({"rope_parameters": {"factor": 2}}, "rope_parameters has factor"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]: it must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is {'type': 'linear'}: our"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': our model has 'silu'"),
        ({"intermediate_size": 96}, "intermediate_size is 96: our model has 128"),
        ({"head_dim": 8}, "head_dim is 8: our model has"),
        ({"attention_bias": True}, "attention_bias is True: our model has False"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0: it must be a whole number"),
        ({"layer_types": ["full_attention"]}, "it must have an entry for each layer"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "our last layer has"),
        ({"layer_types": ["linear_attention"] * 2}, "it must be full_attention or"),
        ({"layer_types": None, "use_sliding_window": True}, "use_sliding_window is True: our"),
        ({"sliding_window": 16}, "sliding_window is 16: our model has 17"),
    ],
)
@pytest.mark.parametrize("exported", ["windows"], indirect=True)
def test_another_arithmetic_is_refused(exported, tmp_path, changes, words):
    """Each setting that would have other logits: the file, the field, both values."""
    (tmp_path / "config.json").write_text(json.dumps(_about(exported[2], **changes)))
    with pytest.raises(ConfigError) as error:
        open_folder(tmp_path)
    assert words in str(error.value) and str(tmp_path / "config.json") in str(error.value)


@pytest.mark.parametrize("exported", ["tied"], indirect=True)
def test_norms_with_weights_are_refused(exported, corpus, tmp_path):
    """One that is not 1 is named: our norms have none."""
    name = "model.layers.1.self_attn.k_norm.weight"
    tensors = load_file(exported[2] / "model.safetensors")
    tensors[name][3] += 1e-6
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(_about(exported[2])))
    with pytest.raises(ConfigError, match="k_norm.weight is not 16 times 1, and the norms of"):
        load_for(tmp_path, open_dataset(corpus), None, CPU)


def test_what_no_layout_can_say_is_refused_with_the_nearest():
    """Windows without normed queries are in neither kind; GPT-2 has as many heads of keys."""
    modern = Config(preset="modern-tiny", n_head=4, kv_heads=2, **GPT2)
    with pytest.raises(ConfigError, match=r"has kv_heads 2, .* with kv_heads 4 \(gpt2\)"):
        kind_for(modern)
    parts = GPT2 | {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}
    with pytest.raises(ConfigError, match=r"has windows SL, .* with windows L \(llama\)"):
        kind_for(Config(n_head=4, kv_heads=2, **parts | {"windows": "SL"}))
    with pytest.raises(ConfigError, match=r"has softcap 15.0, .* with softcap 0.0 \(llama\)"):
        kind_for(Config(n_head=4, kv_heads=2, **parts | {"softcap": 15.0}))
