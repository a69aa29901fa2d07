"""GPT-2 in the format of transformers."""

import re
from collections.abc import Mapping
from typing import Any

from gptddp.config import Config, shown
from gptddp.errors import ConfigError
from gptddp.flags import GPT2 as PARTS
from gptddp.pretrained.kind import Kind

# Our names -> GPT-2's names. Its "Conv1D" multiplies from the other side: matrices are transposed.
_LINEAR = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "fc": "mlp.c_fc",
    "proj": "mlp.c_proj",
}


def _names(ours: str) -> tuple[str, ...]:
    stem, _, kind = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return (ours,)
    _, number, part = stem.split(".", 2)
    return (f"h.{number}.{_LINEAR.get(part, part)}.{kind}",)


def _transposed(ours: str) -> bool:
    stem, _, kind = ours.rpartition(".")
    return kind == "weight" and stem.startswith("blocks.") and stem.split(".", 2)[2] in _LINEAR


def _fields(about: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = _whole(about, "n_embd"), _whole(about, "n_head")
    wanted: dict[str, tuple[Any, ...]] = {  # allowed values; the first is the default
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * width),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }
    for name, values in wanted.items():
        if (value := about.get(name, values[0])) not in values:
            raise ConfigError(
                f"{name} is {shown(value)}: our model has {shown(values[0])}, so its logits would "
                "be wrong with these weights; use a folder with another model"
            )
    return {
        "n_layer": _whole(about, "n_layer"),
        "n_head": heads,
        "n_embd": width,
        "seq_len": _whole(about, "n_positions"),
        "kv_heads": heads,
        **PARTS,
    }


def _whole(about: Mapping[str, Any], name: str) -> int:
    value = about.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {shown(value)}: it must be a whole number, at least 1")
    return value


def _config(c: Config) -> dict[str, Any]:
    return {
        "n_positions": c.seq_len,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.n_embd,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout),
        "tie_word_embeddings": True,
    }


GPT2 = Kind(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    parts=PARTS,
    fields=_fields,
    config=_config,
    names=_names,
    transposed=_transposed,
    prefix="transformer.",
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask of older versions
)
