"""The model of a run's checkpoint, for who only reads it."""

from pathlib import Path

import torch

from gptddp.checkpoint.load import copy_into, load_newest
from gptddp.config import Config
from gptddp.data.dataset import open_dataset
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import CheckpointError, ConfigError
from gptddp.model.gpt import GPT, build
from gptddp.run.directory import config_of, id_of


def configuration(run: Path) -> Config:
    """What the run was last started with. Raises ConfigError where there is no run."""
    if (config := config_of(run)) is None:
        raise ConfigError(f"{run} is not a run directory: it has no config.json")
    return config


def load(run: Path, data: str | None = None) -> tuple[GPT, Tokenizer, int]:
    """The model, its tokenizer and the checkpoint's step, read without changing the run.

    `data` names the dataset directory where it is not the one that the run was trained on. Raises
    GptddpError where there is no run, no valid checkpoint or no such dataset.
    """
    config = configuration(run)
    tokenizer = open_dataset(data or config.data, "quarantine").tokenizer()
    loaded = load_newest(run, run_id=id_of(run), set_aside=False)
    if loaded is None:
        raise CheckpointError(f"{run} has no checkpoint yet: the first is written while it trains")
    net = build(config, tokenizer.vocab_size, torch.device("cpu"))
    live = {f"model.{name}": p.detach() for name, p in net.named_parameters()}
    copy_into(live, {k: t for k, t in loaded.tensors.items() if k.startswith("model.")})
    return net.eval(), tokenizer, loaded.step
