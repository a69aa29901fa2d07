"""The first state of a run that begins with the weights of a folder. Rank 0 only."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from gptddp.checkpoint.load import SavedState
from gptddp.config import Config
from gptddp.data.dataset import Dataset
from gptddp.errors import ConfigError
from gptddp.files import exists
from gptddp.flags import flag
from gptddp.model.gpt import shapes
from gptddp.pretrained.folder import open_folder, read_weights

log = logging.getLogger(__name__)


def with_fields_of_folder(config: Config) -> Config:
    """The configuration of a new run, with the fields that a given folder `init_from` decides.

    Raises ConfigError if a given field contradicts the folder; OSError that may pass.
    """
    if not config.init_from:
        return config
    if config.depth:
        raise ConfigError(
            f"depth is {config.depth}, but --init-from decides the model's shape: leave out --depth"
        )
    folder = open_folder(Path(config.init_from))
    for name, there in folder.fields.items():
        given = getattr(config, name)
        # Fewer positions are fine; but a window is half a row, so it would change.
        fewer = name == "seq_len" and given is not None and given < there
        fewer = fewer and "S" not in folder.fields["windows"]
        if given not in (None, there) and not fewer:
            raise ConfigError(
                f"{name} is {given}, but {folder.path / 'config.json'} has {there}: leave out "
                f"{flag(name)} to train that model"
            )
    open_ = {name: it for name, it in folder.fields.items() if getattr(config, name) is None}
    return dataclasses.replace(config, **open_)


def check_continued(given: str, known: str, config: Config, dataset: Dataset) -> None:
    """Refuse a folder (`given`) if a continued run did not begin from it.

    A missing folder is accepted: only a run without a state needs the weights. The folder that the
    last life was given (`known`) is not read again. Raises ConfigError, OSError.
    """
    if not given or given == known:
        return
    if not config.init_sha256:
        raise ConfigError(
            f"run {config.run_dir} began with random weights: leave out --init-from "
            "to continue it, or give another --run-dir"
        )
    if exists(Path(given) / "config.json"):
        first_state(config, dataset)


def first_state(
    config: Config, dataset: Dataset, tell: Callable[[str], None] = lambda _: None
) -> tuple[SavedState, str]:
    """The weights with which a run begins, by their names in a checkpoint, and their hash.

    `tell`: reports progress. The optimizer keeps its initial state. Raises ConfigError if the
    weights are missing, unusable, or not those of `init_sha256`; OSError that may pass.
    """
    if not config.init_from:
        raise ConfigError(
            f"run {config.run_dir} has no state yet, and begins with the weights of "
            f"sha256 {config.init_sha256[:12]}: give --init-from again"
        )
    tokenizer = dataset.tokenizer()
    folder = open_folder(Path(config.init_from))
    begun = dataclasses.replace(config, init_sha256=config.init_sha256 or "0" * 64)
    wanted = shapes(begun, tokenizer.vocab_size)
    weights = read_weights(folder, wanted, tokenizer, dataset.dir, tell)
    if config.init_sha256 not in ("", weights.sha256):
        raise ConfigError(
            f"--init-from {folder.path} has other weights (sha256 {weights.sha256[:12]}...) than "
            f"{config.init_sha256[:12]}..., with which run {config.run_dir} begins: put these "
            "back, or give another --run-dir"
        )
    log.info("weights of %s (sha256 %s...)", folder.path, weights.sha256[:12])
    tensors = {f"model.{name}": it for name, it in weights.tensors.items()}
    return SavedState("the weights of --init-from", tensors=tensors), weights.sha256
