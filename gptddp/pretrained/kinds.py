"""Our models in the names of Hugging Face's transformers, by its `model_type`: a table of kinds."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gptddp.config import Config, shown
from gptddp.errors import ConfigError
from gptddp.flags import GPT2 as GPT2_PARTS


@dataclass(frozen=True)
class Kind:
    """One `model_type` of a config.json, and what it is in our model.

    fields: from a config.json to the fields of ours that it decides. config: the inverse, of the
    model alone. name: of a parameter of ours in the file, and whether its matrix is transposed
    there. prefix: of all those names, which some files leave out. ignored: names in a file that are
    no weights. head: the output projection, where it is written though it is the embedding.
    """

    model_type: str
    architecture: str
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[Config], dict[str, Any]]
    name: Callable[[str], tuple[str, bool]]
    prefix: str
    ignored: re.Pattern[str]
    head: str = "lm_head.weight"


def kind_of(about: Mapping[str, Any]) -> Kind:
    """The kind of a config.json's content. Raises ConfigError for one that is none of ours."""
    if isinstance(found := about.get("model_type"), str) and found in KINDS:
        return KINDS[found]
    raise ConfigError(f"model_type is {shown(found)}: use a folder of {' or '.join(KINDS)}")


def _whole(about: Mapping[str, Any], name: str, *others: str) -> int:
    """A whole number from 1 on, by its name or an older one."""
    value = next((about[it] for it in (name, *others) if it in about), None)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {shown(value)}: it must be a whole number from 1 on")
    return value


def _only(about: Mapping[str, Any], wanted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError for a setting of another function than our model has.

    `wanted`: by name the values that will do; what is left out is the first of them.
    """
    for name, values in wanted.items():
        if (value := about.get(name, values[0])) not in values:
            raise ConfigError(
                f"{name} is {shown(value)}: our model has {shown(values[0])}, and would compute "
                "something else from these weights; use a folder of another model"
            )


# -- GPT-2 -----------------------------------------------------------------------------------------

# Names of ours -> GPT-2's. Its "Conv1D" multiplies from the other side: the matrix is transposed.
_GPT2_LINEAR = {
    "attn.qkv": "attn.c_attn",
    "attn.proj": "attn.c_proj",
    "fc": "mlp.c_fc",
    "proj": "mlp.c_proj",
}


def _gpt2_name(ours: str) -> tuple[str, bool]:
    stem, _, kind = ours.rpartition(".")
    if not stem.startswith("blocks."):
        return ours, False
    _, number, part = stem.split(".", 2)
    transposed = part in _GPT2_LINEAR and kind == "weight"
    return f"h.{number}.{_GPT2_LINEAR.get(part, part)}.{kind}", transposed


def _gpt2_fields(about: Mapping[str, Any]) -> dict[str, Any]:
    width = _whole(about, "n_embd")
    _only(
        about,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": (1e-5,),
            "n_inner": (None, 4 * width),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        },
    )
    return {
        "n_layer": _whole(about, "n_layer"),
        "n_head": _whole(about, "n_head"),
        "n_embd": width,
        "seq_len": _whole(about, "n_positions", "n_ctx"),
        "kv_heads": _whole(about, "n_head"),
        **GPT2_PARTS,
    }


def _gpt2_config(c: Config) -> dict[str, Any]:
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
    fields=_gpt2_fields,
    config=_gpt2_config,
    name=_gpt2_name,
    prefix="transformer.",
    ignored=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),  # the causal mask of older versions
)
KINDS = {it.model_type: it for it in (GPT2,)}


def kind_for(c: Config) -> Kind:
    """What a model of this configuration is to transformers.

    Raises ConfigError for one that is in none of its layouts.
    """
    others = {name: it for name, it in GPT2_PARTS.items() if getattr(c, name) != it}
    if c.kv_heads != c.n_head:
        others["kv_heads"] = c.n_head
    if others:
        has = ", ".join(f"{name} {getattr(c, name)}" for name in others)
        want = ", ".join(f"{name} {value}" for name, value in others.items())
        raise ConfigError(
            f"this model has {has}, which the layout of GPT-2 cannot say: to export a model, train "
            f"one with {want}. `gptddp sample` works with every model"
        )
    return GPT2
