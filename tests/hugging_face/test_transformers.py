"""Our models and those of transformers compute the same logits, in both directions.

`make test-transformers`: it installs transformers for these tests only.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from support.toy import LAYOUTS, SMALL, training_here

from gptddp import train
from gptddp.data.dataset import open_dataset
from gptddp.errors import ConfigError
from gptddp.inference.export import export
from gptddp.inference.load_model import load, load_for
from gptddp.model.generate import generate

CPU = torch.device("cpu")
TEXT = "import os\n\n\ndef walk(top):\n    for name in sorted(os.listdir(top)):\n"


@pytest.fixture(scope="module")
def dataset(corpus):
    return open_dataset(corpus)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A run of twenty steps with a large rate, so that every weight changes."""
    folder = tmp_path_factory.mktemp("hf") / "run"
    where = ["--data", str(corpus), "--run-dir", str(folder), "--steps", "20", "--lr", "0.02"]
    with training_here():
        assert train.main([*SMALL, *where]) == 0
    return folder


def logits_of(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """The logits of transformers in fp32, which must know and find every weight of the folder."""
    theirs, about = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(about[it] for it in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return theirs.eval()(ids).logits[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that the logits are equal except for the order of sums, and not all alike."""
    assert ours.shape == theirs.shape and theirs.std() > 0.3
    assert torch.allclose(ours, theirs, atol=2e-5 * float(theirs.abs().max()))


def test_an_exported_run_has_the_same_logits_in_transformers(run, dataset, tmp_path):
    """The exported folder alone gives the same logits, ids of a text, and greedy continuation."""
    export(run, tmp_path / "out")
    net, tokenizer, _ = load(run)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer.encoder()(TEXT).tolist()
    assert theirs(TEXT)["input_ids"] == [tokenizer.bos, *ids]
    assert theirs.bos_token_id == tokenizer.bos
    assert theirs.decode([tokenizer.bos, *ids], skip_special_tokens=True) == TEXT
    rows = torch.tensor([[tokenizer.bos, *ids]])[:, : net.seq_len]
    with torch.no_grad():
        close(net(rows)[0, :, : tokenizer.vocab_size], logits_of(tmp_path / "out", rows))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = torch.tensor([[tokenizer.bos, *ids[:4]]])
    made = model.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=tokenizer.bos)
    text = tokenizer.decode(ids[:4])
    options = {"tokens": 9, "temperature": 0.0, "top_k": 0, "seed": 0}
    own = list(generate(net, tokenizer, text, **options))
    assert made[0, 5:].tolist()[: len(own)] == own


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_llama_or_qwen_layout_has_the_same_logits_in_transformers(corpus, tmp_path, layout):
    """The logits match with and without normed queries, tied and untied, and with windows, where
    the last token attends as far back as in our model."""
    kind, flags = LAYOUTS[layout]
    where = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "20"]
    with training_here():
        assert train.main([*SMALL, *where, *flags, "--lr", "0.02"]) == 0
    export(tmp_path / "run", tmp_path / "out")
    net, tokenizer, _ = load(tmp_path / "run")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").model_type == kind
    rows = torch.randint(tokenizer.vocab_size, (1, net.seq_len))
    with torch.no_grad():
        close(net(rows)[0, :, : tokenizer.vocab_size], logits_of(tmp_path / "out", rows))


def test_a_missing_setting_has_the_default_of_transformers(run, dataset, tmp_path):
    """A GPT-2 without one line of config.json is refused, or has the logits of transformers."""
    export(run, tmp_path / "out")
    file, same = tmp_path / "out/config.json", 0
    about = json.loads(file.read_text())
    for name in about.keys() - {"vocab_size"}:
        file.write_text(json.dumps({key: value for key, value in about.items() if key != name}))
        try:
            net, *_ = load_for(tmp_path / "out", dataset, None, CPU)
        except ConfigError:
            continue
        rows = torch.randint(len(net.wte.weight), (1, net.seq_len))
        with torch.no_grad():
            close(net(rows)[0], logits_of(tmp_path / "out", rows))
        same += 1
    assert same > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_saved_by_transformers_is_read(corpus, tmp_path, dtype):
    """save_pretrained names some settings differently; the logits here are the same."""
    where = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "20"]
    with training_here():
        assert train.main([*SMALL, *where, *LAYOUTS["windows"][1], "--lr", "0.02"]) == 0
    export(tmp_path / "run", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    theirs.save_pretrained(tmp_path / "saved")
    net, config, _ = load_for(tmp_path / "saved", open_dataset(corpus), None, CPU)
    assert config.windows == "SL" and config.head == "untied"
    rows = torch.randint(len(net.wte.weight), (1, net.seq_len))
    with torch.no_grad():
        close(net(rows)[0], logits_of(tmp_path / "saved", rows))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_of_transformers_has_the_same_logits_here(dataset, tmp_path, dtype, shards):
    """A random GPT-2, saved as one file or several in any precision, has the same logits here."""
    vocab_size = dataset.tokenizer().vocab_size
    about = transformers.GPT2Config(
        n_layer=2, n_head=4, n_embd=64, n_positions=48, vocab_size=vocab_size, initializer_range=0.2
    )
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(about).to(dtype)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "ln_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    size = made.num_parameters() * made.dtype.itemsize
    made.save_pretrained(tmp_path / "gpt2", max_shard_size=f"{size // shards // 1000 + 1}KB")
    files = list((tmp_path / "gpt2").glob("*.safetensors"))
    assert (len(files) > 1) == (shards > 1)
    net, _, _ = load_for(tmp_path / "gpt2", dataset, None, CPU)
    rows = torch.randint(vocab_size, (1, 48))
    with torch.no_grad():
        close(net(rows)[0], logits_of(tmp_path / "gpt2", rows))
