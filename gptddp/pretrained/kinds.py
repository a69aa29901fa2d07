"""The kinds of Hugging Face's transformers that our models map to, by `model_type`."""

from collections.abc import Mapping
from typing import Any

from gptddp.config import Config, shown
from gptddp.errors import ConfigError
from gptddp.pretrained.gpt2 import GPT2
from gptddp.pretrained.kind import Kind
from gptddp.pretrained.llama import LLAMA, QWEN3

KINDS = {it.model_type: it for it in (GPT2, LLAMA, QWEN3)}


def kind_of(about: Mapping[str, Any]) -> Kind:
    """The kind of a config.json's content. Raises ConfigError for an unsupported one."""
    if isinstance(found := about.get("model_type"), str) and found in KINDS:
        return KINDS[found]
    raise ConfigError(f"model_type is {shown(found)}: use a folder of {' or '.join(KINDS)}")


def kind_for(c: Config) -> Kind:
    """The kind of a model with this configuration.

    Raises ConfigError, with the nearest kind, if transformers has no such model.
    """
    others = {name: other_parts(c, kind) for name, kind in KINDS.items()}
    near = min(others, key=lambda name: len(others[name]))
    if not others[near]:
        return KINDS[near]
    has = ", ".join(f"{name} {getattr(c, name)}" for name in others[near])
    want = ", ".join(f"{name} {value}" for name, value in others[near].items())
    raise ConfigError(
        f"this model has {has}, but transformers has no such model: to export a model, train one "
        f"with {want} ({near}). `gptddp sample` works with every model"
    )


def other_parts(c: Config, kind: Kind) -> dict[str, Any]:
    """The fields that differ from a model of this kind, with the values of the kind."""
    parts = dict(kind.parts)
    if kind is GPT2:
        parts["kv_heads"] = c.n_head
    return {name: it for name, it in parts.items() if getattr(c, name) != it}
