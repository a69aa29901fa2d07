"""Our models in the names of Hugging Face's transformers, by its `model_type`: a table of kinds."""

from collections.abc import Mapping
from typing import Any

from gptddp.config import Config, shown
from gptddp.errors import ConfigError
from gptddp.pretrained.gpt2 import GPT2
from gptddp.pretrained.kind import Kind
from gptddp.pretrained.llama import LLAMA, QWEN3

KINDS = {it.model_type: it for it in (GPT2, LLAMA, QWEN3)}


def kind_of(about: Mapping[str, Any]) -> Kind:
    """The kind of a config.json's content. Raises ConfigError for one that is none of ours."""
    if isinstance(found := about.get("model_type"), str) and found in KINDS:
        return KINDS[found]
    raise ConfigError(f"model_type is {shown(found)}: use a folder of {' or '.join(KINDS)}")


def kind_for(c: Config) -> Kind:
    """What a model of this configuration is to transformers.

    Raises ConfigError for one that is in none of its layouts, naming the nearest.
    """
    others = {name: other_parts(c, kind) for name, kind in KINDS.items()}
    near = min(others, key=lambda name: len(others[name]))
    if not others[near]:
        return KINDS[near]
    has = ", ".join(f"{name} {getattr(c, name)}" for name in others[near])
    want = ", ".join(f"{name} {value}" for name, value in others[near].items())
    raise ConfigError(
        f"this model has {has}, which no layout of transformers that we write can say: to export a "
        f"model, train one with {want} ({near}). `gptddp sample` works with every model"
    )


def other_parts(c: Config, kind: Kind) -> dict[str, Any]:
    """The fields that would have to be otherwise for a model of this kind, and how."""
    parts = dict(kind.parts)
    if kind is GPT2:
        parts["kv_heads"] = c.n_head
    return {name: it for name, it in parts.items() if getattr(c, name) != it}
