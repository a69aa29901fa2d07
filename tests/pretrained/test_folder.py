"""A Hugging Face folder becomes our weights, or one error that says what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from support.hf_folder import SHA256, gpt2_config, gpt2_weights, write_gpt2
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from gptddp.config import Config, with_preset
from gptddp.data.tokenizer import byte_tokenizer, load_tokenizer
from gptddp.errors import ConfigError
from gptddp.model import gpt
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
from gptddp.pretrained.folder import Weights, open_folder, read_weights

DATA = Path("data")


def read(path: Path, tokenizer: Any = None, **fields: Any) -> Weights:
    """The weights for a model of the folder's shape, except for these fields."""
    folder = open_folder(path)
    tokenizer = tokenizer or byte_tokenizer()
    config = with_preset(Config(**folder.fields | fields, init_sha256="0" * 64), accelerator=False)
    shapes = gpt.shapes(config, tokenizer.vocab_size)
    return read_weights(folder, shapes, tokenizer, DATA)


def small(path: Path, **options: Any) -> Path:
    return write_gpt2(path, vocab_size=257, **options)


# -- folders that can be read ----------------------------------------------------------------------


def test_weights_are_the_same_however_they_are_split_and_named(tmp_path):
    """One file or several, with and without the prefix, with old causal masks and an explicit head:
    the values under our names, the transposition of matrices and the hash are the same."""

    def odd(_about, tensors):
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
        tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    plain = read(small(tmp_path / "plain"))
    first = gpt2_weights(gpt2_config(257))
    assert plain.tensors["blocks.0.attn.qkv.weight"].equal(first["h.0.attn.c_attn.weight"].t())
    assert plain.tensors["blocks.0.proj.bias"].equal(first["h.0.mlp.c_proj.bias"])
    assert plain.tensors["wte.weight"].equal(first["wte.weight"])
    assert all(it.dtype == torch.float32 and it.is_contiguous() for it in plain.tensors.values())
    for name, options in {
        "short": {"prefix": ""},
        "cut": {"shards": 3},
        "old": {"change": odd, "prefix": ""},
    }.items():
        found = read(small(tmp_path / name, **options))
        assert found.sha256 == plain.sha256
        assert all(found.tensors[it].equal(plain.tensors[it]) for it in plain.tensors)
    assert found.tensors.keys() == plain.tensors.keys()


def test_the_hash_depends_on_every_bit_and_never_changes(tmp_path):
    """A run stores it, so later versions must compute the same hash; one other bit changes it."""
    assert read(write_gpt2(tmp_path / "a", n_positions=16), Vocabulary(512)).sha256 == SHA256

    def flip(_about, tensors):
        tensors["h.0.mlp.c_fc.bias"].view(torch.int32)[3] ^= 1

    assert read(small(tmp_path / "b")).sha256 != read(small(tmp_path / "c", change=flip)).sha256


class Vocabulary:
    """A stand-in for a tokenizer of n tokens."""

    def __init__(self, n: int) -> None:
        self.vocab_size = n


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_fp32_exactly(tmp_path, dtype):
    """The values are those of the file, without another rounding."""

    def finer(_about, tensors):
        tensors["wte.weight"] *= 1.001

    found = read(small(tmp_path / "half", dtype=dtype, change=finer)).tensors["wte.weight"]
    wanted = gpt2_weights(gpt2_config(257))["wte.weight"] * 1.001
    assert found.dtype == torch.float32 and found.equal(wanted.to(dtype).float())
    assert not found.equal(wanted)


def test_the_first_positions_are_enough_for_shorter_rows(tmp_path):
    """With seq_len 8 of 32 the first eight are read; the hash does not depend on seq_len."""
    whole, cut = (read(small(tmp_path / f"{n}"), seq_len=n) for n in (32, 8))
    assert cut.tensors["wpe.weight"].equal(whole.tensors["wpe.weight"][:8])
    assert cut.sha256 == whole.sha256


# -- GPT-2's tokenizer -----------------------------------------------------------------------------


def gpt2_tokenizer(path: Path, text: str = "once upon a time there was a tokenizer ") -> Path:
    """A tokenizer.json like GPT-2's: its pattern, and one special token, the last."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, show_progress=False, special_tokens=[], initial_alphabet=alphabet
    )
    made.train_from_iterator([text * 9], trainer)
    made.add_special_tokens(["<|endoftext|>"])
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save(str(path))
    return path


def test_a_dataset_is_prepared_with_the_tokenizer_of_the_folder(tmp_path, books):
    """Documents start with <|endoftext|>, and the folder fits the dataset, also if another version
    of the library wrote the file differently, or the embedding has padding rows."""
    file = gpt2_tokenizer(tmp_path / "gpt2/tokenizer.json")
    dataset = prepare([str(books)], str(tmp_path / "data"), Settings(tokenizer=str(file)))
    tokenizer = dataset.tokenizer()
    assert tokenizer.bos == tokenizer.vocab_size - 1 and tokenizer.to_bytes([tokenizer.bos]) == b""
    definition = json.loads(file.read_text())
    merges = definition["model"]["merges"]  # older versions write each as one string
    definition["model"]["merges"] = [" ".join(it) for it in merges]
    made = write_gpt2(tmp_path / "new", vocab_size=tokenizer.vocab_size + 23)
    (made / "tokenizer.json").write_text(json.dumps(definition))
    assert load_tokenizer(made / "tokenizer.json").sha256 != tokenizer.sha256
    weights = read(made, tokenizer)
    assert len(weights.tensors["wte.weight"]) == tokenizer.vocab_size


def test_another_tokenizer_is_refused_with_the_command_that_prepares_with_it(tmp_path):
    """Neither the same number of tokens nor the same tokens with other merges are enough. Without a
    tokenizer.json the numbers of tokens must be equal."""
    ours = load_tokenizer(gpt2_tokenizer(tmp_path / "ours.json"))
    made = write_gpt2(tmp_path / "gpt2", vocab_size=ours.vocab_size)
    file = gpt2_tokenizer(made / "tokenizer.json", "it was another text in another language ")
    assert load_tokenizer(file).vocab_size == ours.vocab_size
    with pytest.raises(ConfigError) as error:
        read(made, ours)
    assert f"gptddp prepare SOURCE --tokenizer {file} --out DIR" in str(error.value)
    assert f"the tokenizer of {DATA}" in str(error.value)
    same = json.loads((tmp_path / "ours.json").read_text())
    same["model"]["merges"].reverse()
    file.write_text(json.dumps(same))
    with pytest.raises(ConfigError, match="gives other tokens than the tokenizer of"):
        read(made, ours)
    file.unlink()
    assert read(made, ours)
    with pytest.raises(ConfigError, match="wte.weight has 281 tokens, but the tokenizer of the"):
        read(made, byte_tokenizer())


# -- folders that are refused ----------------------------------------------------------------------


def _drop(name):
    return lambda about, tensors: tensors.pop(name)


def _put(name, *shape, **values):
    return lambda about, tensors: tensors.update({name: torch.full(shape, 0.5)})


def _say(**fields):
    return lambda about, tensors: about.update(fields)


def _nan(_about, tensors):
    tensors["h.0.mlp.c_proj.weight"][3, 1] = float("nan")


REFUSED = {
    "missing": (_drop("h.0.ln_2.bias"), "has no tensor h.0.ln_2.bias, which a gpt2"),
    "unknown": (_put("score.weight", 2, 16), "has the tensor score.weight, which a plain gpt2"),
    "shape": (_put("h.0.attn.c_attn.weight", 48, 16), "c_attn.weight is of shape [48, 16], but"),
    "width": (_put("wte.weight", 257, 8), "wte.weight is of shape [257, 8], but config.json"),
    "positions": (_put("wpe.weight", 16, 16), "wpe.weight is of shape [16, 16], but config.json"),
    "tokens": (_put("wte.weight", 300, 16), "wte.weight has 300 tokens, but the tokenizer"),
    "nan": (_nan, "h.0.mlp.c_proj.weight has values that are not finite"),
    "kind": (_say(model_type="bert"), "model_type is 'bert': use a folder of gpt2"),
    "no kind": (_say(model_type=["gpt2"]), "model_type is ['gpt2']: use a folder of gpt2"),
    "gelu": (_say(activation_function="gelu"), "activation_function is 'gelu': our model has"),
    "layers": (_say(n_layer="12"), "n_layer is '12': it must be a whole number"),
    "fewer": (_say(n_layer=2), "has no tensor h.1.attn.c_attn.bias (and 11 more)"),
    "heads": (_say(n_head=3), "n_embd 16 is not divisible by n_head 3"),
    "huge": (_say(n_layer=10**9), "n_layer is 1000000000: it must be at most"),
    "inner": (_say(n_inner=32), "n_inner is 32: our model has None"),
    "untied": (_say(tie_word_embeddings=False), "tie_word_embeddings is False"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_model_is_refused_with_its_reason(tmp_path, what):
    """The message has the file, the tensor or the field, and the rule."""
    change, words = REFUSED[what]
    with pytest.raises(ConfigError) as error:
        read(small(tmp_path / "gpt2", change=change))
    assert words in str(error.value)
    assert str(tmp_path / "gpt2") in str(error.value)


def test_a_quantized_tensor_is_refused(tmp_path):
    """The message has its dtype and the allowed dtypes."""
    made = small(tmp_path / "gpt2")
    tensors = load_file(made / "model.safetensors")
    name = "transformer.h.0.mlp.c_fc.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, made / "model.safetensors")
    with pytest.raises(ConfigError, match="c_fc.weight is of torch.int8: use float32, float16 or"):
        read(made)


def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path):
    """A shorter file gives one error with its name."""
    made = small(tmp_path / "gpt2")
    file = made / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=f"{file} is damaged.*copy the file again"):
            read(made)
    file.write_bytes(whole)
    assert read(made)


def test_a_folder_that_lacks_a_file_is_refused_with_the_fix(tmp_path):
    """The folder, config.json, the weights or a part is missing; a pickle is never read."""
    with pytest.raises(ConfigError, match="nowhere/config.json does not exist: give a folder"):
        read(tmp_path / "nowhere")
    made = small(tmp_path / "gpt2")
    (made / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not valid JSON.*copy it again"):
        read(made)
    (made / "config.json").write_text(json.dumps(gpt2_config(257)))
    (made / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no model.safetensors: give a folder with"):
        read(made)
    (made / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with pytest.raises(ConfigError, match="a pickle, which can run any code.*save_pretrained"):
        read(made)
    assert not Path("ran").exists()
    with pytest.raises(ConfigError, match="Not a directory.*: give a folder written by transf"):
        read(made / "config.json")
    cut = small(tmp_path / "cut", shards=2)
    (cut / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002.safetensors is missing, but"):
        read(cut)
    index = {"weight_map": {"wte.weight": "../gpt2/config.json"}}
    (cut / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="has no weight_map from tensors to files of the folder"):
        read(cut)


def test_a_tensor_that_occurs_twice_is_refused(tmp_path):
    """It occurs with and without the prefix, or in two files: neither has precedence."""

    def also_without(_about, tensors):
        tensors["transformer.wpe.weight"] = tensors["wpe.weight"] + 1

    with pytest.raises(
        ConfigError, match="wpe.weight occurs twice, in .*with and without 'transformer.'"
    ):
        read(small(tmp_path / "gpt2", change=also_without, prefix=""))
    for number, name in enumerate(("wte.weight", "h.0.lora")):
        cut = small(tmp_path / f"{number}", shards=2)
        for file in cut.glob("*.safetensors"):
            tensors = load_file(file)
            save_file({f"transformer.{name}": torch.ones(2)} | tensors, file)
        words = rf"{name} occurs twice, in .*1-of-00002.safetensors and .*2-of-00002.safetensors"
        with pytest.raises(ConfigError, match=words):
            read(cut)


def test_a_tokenizer_that_cannot_be_read_is_not_skipped(tmp_path):
    """A broken link, as in a copy of a hub's cache, gives an error that names the file."""
    made = small(tmp_path / "gpt2")
    (made / "tokenizer.json").symlink_to("../../blobs/lost")
    with pytest.raises(ConfigError, match=f"cannot read the tokenizer {made}/tokenizer.json"):
        read(made)
