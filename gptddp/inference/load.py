"""A trained model for who only reads it: of a run, or in a folder of Hugging Face's."""

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import torch

from gptddp.checkpoint import store
from gptddp.checkpoint.load import Loaded, copy_into, load_newest
from gptddp.checkpoint.load import load as load_checkpoint
from gptddp.config import Config, with_preset
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.tokenizer import Tokenizer
from gptddp.distributed.hardware import numerics
from gptddp.errors import CheckpointError, ConfigError, Unusable
from gptddp.files import exists
from gptddp.model.gpt import GPT, build
from gptddp.pretrained.folder import is_folder
from gptddp.run.directory import CHECKPOINTS, config_of, id_of
from gptddp.training.first_state import first_state, with_fields_of_folder

CPU = torch.device("cpu")


def configuration(run: Path) -> Config:
    """What the run was last started with. Raises ConfigError where there is no run."""
    if (config := config_of(run)) is None:
        raise ConfigError(f"{run} is not a run directory: it has no config.json")
    return config


def load(run: Path, data: str | None = None) -> tuple[GPT, Tokenizer, int]:
    """The model of the newest valid checkpoint, its tokenizer and its step.

    The run is left as it is. `data` names the dataset directory where it is not the one that the
    run was trained on. Raises GptddpError where there is no run, no valid checkpoint or no such
    dataset, and where that has another tokenizer.
    """
    config = configuration(run)
    dataset = open_dataset(data or config.data, "quarantine")
    loaded = checkpoint(run)
    _check_tokenizer(run, loaded, dataset, "name with --data a dataset that has that of the run")
    tokenizer = dataset.tokenizer()
    return _net(config, tokenizer.vocab_size, loaded.tensors, CPU), tokenizer, loaded.step


def checkpoint(run: Path, step: int | None = None) -> Loaded:
    """The newest valid checkpoint, or that of a step. Raises CheckpointError, OSError."""
    if step is None:
        if loaded := load_newest(run, run_id=id_of(run), set_aside=False):
            return loaded
        raise CheckpointError(f"{run} has no checkpoint yet: the first is written while it trains")
    orders = {name: store.order(name) for name in store.names(run) if store.is_candidate(name)}
    found = [name for name, order in orders.items() if order and order[1] == step]
    if not found:
        there = ", ".join(str(it) for it in sorted({o[1] for o in orders.values() if o})) or "none"
        raise ConfigError(f"{run} has no checkpoint of step {step}: use one of these: {there}")
    name = max(found, key=lambda name: orders[name] or (0, 0))
    try:
        return load_checkpoint(run / CHECKPOINTS / name, id_of(run))
    except Unusable as unusable:
        if unusable.transient:
            raise OSError(f"checkpoint {unusable}") from unusable
        raise CheckpointError(f"{run}: {unusable}: use another --step") from unusable


def _net(
    config: Config, vocab_size: int, tensors: dict[str, torch.Tensor], device: torch.device
) -> GPT:
    net = build(config, vocab_size, device)
    live = {f"model.{name}": p.detach() for name, p in net.named_parameters()}
    copy_into(live, {k: t for k, t in tensors.items() if k.startswith("model.")})
    return net.eval()


# -- for a dataset that the model need not have seen -----------------------------------------------


class Trained(NamedTuple):
    """A model, what it was trained with, and at which step; None: of a folder."""

    net: GPT
    config: Config
    step: int | None


def load_for(path: Path, dataset: Dataset, step: int | None, device: torch.device) -> Trained:
    """The model of a run, or of a folder, for texts that have been prepared with its tokenizer.

    Raises GptddpError, also where the dataset has another tokenizer.
    """
    if is_folder(path):
        if step is not None:
            raise ConfigError(f"{path} is no run, and has no checkpoint of step {step}")
        return _of_folder(path, dataset, device)
    if not exists(path / "config.json"):
        raise ConfigError(f"{path} is neither a run directory nor a model: it has no config.json")
    config = with_preset(configuration(path), accelerator=device.type != "cpu")
    loaded = checkpoint(path, step)
    fix = f"by `gptddp prepare SOURCE --tokenizer {_tokenizer_of(config)} --out DIR`"
    _check_tokenizer(path, loaded, dataset, f"prepare the texts with that of the run, {fix}")
    net = _net(config, dataset.tokenizer().vocab_size, loaded.tensors, device)
    return Trained(net, config, loaded.step)


def _check_tokenizer(run: Path, loaded: Loaded, dataset: Dataset, fix: str) -> None:
    """Refuse one that the model was not trained with, also of as many tokens: no id is the same."""
    there = str(loaded.meta.get("data", {}).get("tokenizer", ""))  # the first digits of its hash
    given = dataset.tokenizer().sha256
    if not there or not given.startswith(there):
        raise ConfigError(
            f"run {run} has another tokenizer (sha256 {there[:12] or 'unknown'}...) than "
            f"{dataset.dir} ({given[:12]}...): {fix}"
        )


def _tokenizer_of(config: Config) -> str:
    """As `--tokenizer` takes it."""
    file = Path(config.data) / "tokenizer.json"
    return str(file) if exists(file) else "bytes"


def _of_folder(path: Path, dataset: Dataset, device: torch.device) -> Trained:
    try:
        config = with_fields_of_folder(Config(init_from=str(path), **numerics(device)))
        config = with_preset(config, accelerator=device.type != "cpu")
        first = first_state(config, dataset)
    except ConfigError as error:  # of the same words, for another flag
        raise ConfigError(re.sub("^--init-from:? ", "", str(error))) from None
    config = dataclasses.replace(config, init_sha256=first.sha256)
    net = _net(config, dataset.tokenizer().vocab_size, first.tensors, device)
    return Trained(net, config, None)
