"""Llama and Qwen 3 in the format of transformers: models with present-day parts.

Our modern models have the same arithmetic: rotary positions that rotate channel i together with
channel i + size / 2, by angles of base 10,000; RMSNorm with the same epsilon. Their norms have
weights, which are all 1 for ours: so only exported runs can be read. Qwen 3 normalises queries and
keys before rotating them, we after: without weights the result is the same.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gptddp import shape
from gptddp.config import Config, shown
from gptddp.errors import ConfigError
from gptddp.presets import PARTS
from gptddp.pretrained.kind import Kind

_EPS, _BASE = 1e-6, 10_000.0  # as in gptddp/model/attention.py
_PARTS = {
    "norm": "rmsnorm",
    "positions": "rope",
    "activation": "swiglu",
    "softcap": 0.0,
    "extras": "none",
}
_OWN = "gptddp"  # key of our fields in config.json, which transformers keeps but does not read
_SHAPE = ("n_layer", "n_head", "n_embd", "seq_len", "kv_heads", *PARTS)

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


def _fields(
    about: Mapping[str, Any], arithmetic: Callable[[Config], dict[str, Any]]
) -> dict[str, Any]:
    own = about.get(_OWN)
    if not isinstance(own, Mapping) or own.keys() != set(_SHAPE):
        raise ConfigError(
            f"it is a {about['model_type']} that no run has exported: its norms have weights, but "
            "ours have none; use a folder that `gptddp checkpoints --export` wrote, or a GPT-2"
        )
    for name, value in arithmetic(Config(**own)).items():
        if about.get(name, value) != value:
            raise ConfigError(
                f"{name} is {shown(about[name])}: the exported model had {shown(value)}, so its "
                "logits would be wrong; export it again"
            )
    return dict(own)


def _config(c: Config, arithmetic: Callable[[Config], dict[str, Any]]) -> dict[str, Any]:
    own = {name: getattr(c, name) for name in _SHAPE}
    return {_OWN: own, **arithmetic(c), "attention_dropout": c.dropout}


def _arithmetic(c: Config) -> dict[str, Any]:
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
        "rope_theta": _BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": _BASE},
        "tie_word_embeddings": c.head == "tied",
    }


def _llama(c: Config) -> dict[str, Any]:
    return _arithmetic(c) | {"mlp_bias": False}


def _qwen3(c: Config) -> dict[str, Any]:
    windows = [shape.window(c, layer) for layer in range(c.n_layer)]
    slides = any(it is not None for it in windows)
    return {
        **_arithmetic(c),
        "use_sliding_window": slides,
        # transformers counts the token itself
        "sliding_window": c.seq_len // 2 + 1 if slides else None,
        "layer_types": ["full_attention" if it is None else "sliding_attention" for it in windows],
    }


LLAMA = Kind(
    model_type="llama",
    architecture="LlamaForCausalLM",
    parts={**_PARTS, "qk_norm": "none", "windows": "L"},
    fields=partial(_fields, arithmetic=_llama),
    config=partial(_config, arithmetic=_llama),
    names=_names,
    ones=_ones,
    prefix="model.",
)
QWEN3 = Kind(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    parts={**_PARTS, "qk_norm": "rmsnorm"},
    fields=partial(_fields, arithmetic=_qwen3),
    config=partial(_config, arithmetic=_qwen3),
    names=_names,
    ones=_ones,
    prefix="model.",
)
