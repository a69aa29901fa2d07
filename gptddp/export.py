"""A run's model in the layout that Hugging Face's `GPT2LMHeadModel` reads.

OUT/model.safetensors       weights in fp32; its metadata has configuration, step and tokenizer
OUT/config.json
OUT/tokenizer.json, tokenizer_config.json    not for plain bytes, for which there is no such file
"""

import json
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from gptddp import sample
from gptddp.data.dataset import open_dataset
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import ConfigError
from gptddp.files import fsync, read_json, write_json_atomic
from gptddp.flags import GPT2
from gptddp.model.gpt import GPT
from gptddp.run.directory import saved_config

WEIGHTS = "model.safetensors"
# Names of ours -> GPT-2's. Its "Conv1D" multiplies from the other side: the matrix is transposed.
_LINEAR = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "fc": "mlp.c_fc",
    "proj": "mlp.c_proj",
}


def export(run: Path, out: Path, data: str | None = None) -> int:
    """Write the newest valid checkpoint's model to the new folder `out`; returns its step.

    A name that ends in .safetensors: the weights alone. All of it or nothing is written, and the
    run is left alone. Raises GptddpError for what cannot be exported or is there already.
    """
    values = saved_config(run) or {}
    check_kind(values)
    net, tokenizer, step = sample.load(run, data)
    metadata = {
        "format": "pt",
        "step": str(step),
        "tokenizer_sha256": tokenizer.sha256,
        "gptddp_config": json.dumps(values),
    }
    work = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        if os.path.lexists(out):
            raise ConfigError(f"{out} exists: give another name to --export, or remove it")
        work.mkdir(parents=True)
        save_file(weights(net, tokenizer.vocab_size), work / WEIGHTS, metadata)
        fsync(work / WEIGHTS)
        if out.suffix == ".safetensors":
            os.rename(work / WEIGHTS, out)
        else:
            write_json_atomic(work / "config.json", _config(values, tokenizer))
            dataset = open_dataset(data or values["data"], "quarantine")
            if file := dataset.manifest["tokenizer"]["file"]:
                shutil.copyfile(dataset.dir / file, work / "tokenizer.json")
                about = _tokenizer_config(read_json(dataset.dir / file), tokenizer.bos, values)
                write_json_atomic(work / "tokenizer_config.json", about)
            os.rename(work, out)
        fsync(out.parent)
    except OSError as error:
        raise ConfigError(f"--export {out} cannot be written: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return step


def check_kind(values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a run's saved fields are those of a GPT-2."""
    others = {n: v for n, v in GPT2.items() if values.get(n, v) != v}
    if values.get("kv_heads") not in (None, values.get("n_head")):
        others["kv_heads"] = values["n_head"]
    if others:
        has = ", ".join(f"{name} {values[name]}" for name in others)
        want = ", ".join(f"{name} {value}" for name, value in others.items())
        raise ConfigError(
            f"this model has {has}, which the layout of GPT-2 cannot say: to export a model, train "
            f"one with {want}. `gptddp sample` works with every model"
        )


def weights(net: GPT, vocab_size: int) -> dict[str, Tensor]:
    """The parameters by GPT-2's names; wte (vocab_size, width), without its padding."""
    named: dict[str, Tensor] = {}
    for name, parameter in net.named_parameters():
        tensor, (stem, _, kind) = parameter.detach(), name.rpartition(".")
        if name == "wte.weight":
            tensor = tensor[:vocab_size]
        if stem.startswith("blocks."):
            _, number, part = stem.split(".", 2)
            if part in _LINEAR and kind == "weight":
                tensor = tensor.t()
            stem = f"h.{number}.{_LINEAR.get(part, part)}"
        named[f"transformer.{stem}.{kind}"] = tensor.contiguous()
    return named


def _config(values: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), values["dropout"])
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "torch_dtype": "float32",
        "vocab_size": tokenizer.vocab_size,
        "n_positions": values["seq_len"],
        "n_layer": values["n_layer"],
        "n_head": values["n_head"],
        "n_embd": values["n_embd"],
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dropout,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.bos,  # what opens the next document ends this one
    }


def _tokenizer_config(definition: Any, bos: int, values: dict[str, Any]) -> dict[str, Any]:
    token = next(t["content"] for t in definition["added_tokens"] if t["id"] == bos)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token,
        "eos_token": token,
        "model_max_length": values["seq_len"],
    }
