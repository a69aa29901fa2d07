"""Folders as transformers' save_pretrained writes them, made without transformers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32}
# Hash of a folder with the shape of TINY, but 16 positions, and 512 tokens.
SHA256 = "40029ffc07071821d5490534be7b3b3648a6f322856d22ba083496f8d1f6f154"

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]


def gpt2_config(vocab_size: int = 512, **shape: int) -> dict[str, Any]:
    """The content of a config.json."""
    about = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": vocab_size}
    return about | {"activation_function": "gelu_new", **TINY, **shape}


def gpt2_weights(about: Mapping[str, Any]) -> dict[str, Tensor]:
    """All weights by name: small fractions, the same on every machine."""
    width = about["n_embd"]
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (about["vocab_size"], width),
        "wpe.weight": (about["n_positions"], width),
    }
    for i in range(about["n_layer"]):
        for part, shape in (
            *(("ln_1", (width,)), ("ln_2", (width,))),
            *(("attn.c_attn", (width, 3 * width)), ("attn.c_proj", (width, width))),
            *(("mlp.c_fc", (width, 4 * width)), ("mlp.c_proj", (4 * width, width))),
        ):
            shapes |= {f"h.{i}.{part}.weight": shape, f"h.{i}.{part}.bias": shape[-1:]}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    made = {}
    for number, (name, shape) in enumerate(shapes.items()):
        n = torch.Size(shape).numel()
        made[name] = (((torch.arange(n) * 7919 + number) % 257 - 128) / 512).view(shape)
    return made


def write_gpt2(
    path: Path,
    *,
    vocab_size: int = 512,
    dtype: torch.dtype = torch.float32,
    prefix: str = "transformer.",
    shards: int = 1,
    change: Change = lambda _about, _tensors: None,
    **shape: int,
) -> Path:
    """Write the folder; `change` may change config.json and weights first."""
    about = gpt2_config(vocab_size, **shape)
    tensors = gpt2_weights(about)
    change(about, tensors)
    tensors = {prefix + name: tensor.to(dtype) for name, tensor in tensors.items()}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(about))
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path
    names, files = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::shards]}, path / file)
        files |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path
