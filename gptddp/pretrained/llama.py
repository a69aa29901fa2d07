"""Llama and Qwen 3 as transformers has them: the models with today's parts.

A model of ours is one of them where its arithmetic is: rotary positions that turn channel i with
channel i + size / 2, by angles of base 10,000; RMSNorm with the same epsilon. Their norms have
weights, which are 1 in ours. Qwen 3 norms queries and keys before it turns them, we afterwards:
without weights it is the same, as a turn changes no length.
"""

from collections.abc import Mapping
from typing import Any

from gptddp.config import Config, shown
from gptddp.errors import ConfigError
from gptddp.model import shape
from gptddp.pretrained.kind import Kind, only, whole

_EPS, _BASE = 1e-6, 10_000.0  # of gptddp/model/attention.py
_PARTS = {
    "norm": "rmsnorm",
    "positions": "rope",
    "activation": "swiglu",
    "softcap": 0.0,
    "extras": "none",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"

_NAMES = {"wte": "embed_tokens.weight", "ln_f": "norm.weight", "head": "lm_head.weight"}
_LINEAR = {
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.proj": ("self_attn.o_proj",),
    "fc": ("mlp.gate_proj", "mlp.up_proj"),
    "proj": ("mlp.down_proj",),
}


def _names(ours: str) -> tuple[str, ...]:
    stem = ours.removesuffix(".weight")
    if not stem.startswith("blocks."):
        return (_NAMES[stem],)
    _, number, part = stem.split(".", 2)
    return tuple(f"layers.{number}.{it}.weight" for it in _LINEAR[part])


def _ones(c: Config) -> dict[str, int]:
    found = {"norm.weight": c.n_embd}
    for i in range(c.n_layer):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{i}.{name}.weight"] = c.n_embd
        for name in ("q_norm", "k_norm") if c.qk_norm == "rmsnorm" else ():
            found[f"layers.{i}.self_attn.{name}.weight"] = shape.head_size(c)
    return found


def _fields(about: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = whole(about, "hidden_size"), whole(about, "num_attention_heads")
    found: dict[str, Any] = {
        "n_layer": whole(about, "num_hidden_layers"),
        "n_head": heads,
        "n_embd": width,
        "seq_len": whole(about, "max_position_embeddings"),
        "kv_heads": whole({"num_key_value_heads": heads} | dict(about), "num_key_value_heads"),
        "head": "tied" if about.get("tie_word_embeddings", False) else "untied",
        **_PARTS,
    }
    c = Config(**found)
    only(
        about,
        {
            "hidden_act": ("silu",),
            "intermediate_size": (shape.mlp_width(c),),
            "head_dim": (None, shape.head_size(c)),
            "rms_norm_eps": (_EPS,),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "rope_theta": (_BASE,),
            "rope_scaling": (None,),
            "tie_word_embeddings": (False, True),
        },
    )
    rope = about.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters is {shown(rope)}: it must be an object")
    only(rope, {"rope_theta": (_BASE,), "rope_type": ("default",)})
    if extra := sorted(rope.keys() - {"rope_theta", "rope_type"}):
        raise ConfigError(
            f"rope_parameters has {extra[0]}, which our model has not: use a folder of another one"
        )
    return found


def _llama_fields(about: Mapping[str, Any]) -> dict[str, Any]:
    return _fields(about) | {"qk_norm": "none", "windows": "L"}


def _qwen3_fields(about: Mapping[str, Any]) -> dict[str, Any]:
    return _fields(about) | {"qk_norm": "rmsnorm", "windows": _windows(about)}


def _windows(about: Mapping[str, Any]) -> str:
    """The pattern of all layers; ours see half a row before a token, and itself."""
    kinds = about.get("layer_types")
    if kinds is None:
        only(about, {"use_sliding_window": (False,)})
        return "L"
    if not isinstance(kinds, list) or not all(it in (_FULL, _SLIDING) for it in kinds):
        raise ConfigError(f"layer_types is {shown(kinds)}: it must be {_FULL} or {_SLIDING} each")
    if len(kinds) != whole(about, "num_hidden_layers") or kinds[-1] != _FULL:
        raise ConfigError(
            f"layer_types is {shown(kinds)}: it must have an entry for each layer, and our last "
            f"layer has {_FULL}; use a folder of another model"
        )
    if _SLIDING not in kinds:
        return "L"
    window = whole(about, "max_position_embeddings") // 2 + 1
    theirs = {"use_sliding_window": False, "sliding_window": 4096} | dict(about)  # if left out
    only(theirs, {"use_sliding_window": (True,), "sliding_window": (window,)})
    return "".join("S" if it == _SLIDING else "L" for it in kinds)


def _config(c: Config) -> dict[str, Any]:
    return {
        "hidden_size": c.n_embd,
        "intermediate_size": shape.mlp_width(c),
        "num_hidden_layers": c.n_layer,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.kv_heads,
        "head_dim": shape.head_size(c),
        "max_position_embeddings": c.seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": _EPS,
        "attention_bias": False,
        "attention_dropout": c.dropout,
        "rope_theta": _BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": _BASE},
        "tie_word_embeddings": c.head == "tied",
    }


def _qwen3_config(c: Config) -> dict[str, Any]:
    windows = [shape.window(c, layer) for layer in range(c.n_layer)]
    slides = any(it is not None for it in windows)
    return {
        **_config(c),
        "use_sliding_window": slides,
        # theirs counts the token itself
        "sliding_window": c.seq_len // 2 + 1 if slides else None,
        "layer_types": [_FULL if it is None else _SLIDING for it in windows],
    }


LLAMA = Kind(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parts={**_PARTS, "qk_norm": "none", "windows": "L"},
    fields=_llama_fields,
    config=lambda c: _config(c) | {"mlp_bias": False},
    names=_names,
    ones=_ones,
    prefix="model.",
)
QWEN3 = Kind(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parts={**_PARTS, "qk_norm": "rmsnorm"},
    fields=_qwen3_fields,
    config=_qwen3_config,
    names=_names,
    ones=_ones,
    prefix="model.",
)
