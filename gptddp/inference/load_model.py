"""Loads a trained model from a run or a Hugging Face folder; evaluates it on a dataset."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from gptddp import live
from gptddp.checkpoint import run_state
from gptddp.checkpoint.load import copy_into, load_newest
from gptddp.checkpoint.run_state import configuration
from gptddp.config import Config, with_preset
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.loader import eval_rows
from gptddp.data.tokenizer import Tokenizer
from gptddp.distributed.connect import connect
from gptddp.distributed.hardware import numerics, use
from gptddp.errors import CheckpointError, ConfigError
from gptddp.files import exists
from gptddp.model.evaluate import evaluate
from gptddp.model.gpt import GPT, build
from gptddp.pretrained.folder import is_folder
from gptddp.run.directory import is_run
from gptddp.training.first_state import first_state, with_fields_of_folder

# A model, its configuration, and the step of its checkpoint; None: from a folder.
Trained = tuple[GPT, Config, int | None]


def load(run: Path, data: str | None = None, step: int | None = None) -> tuple[GPT, Tokenizer, int]:
    """The model of a run on the CPU, its tokenizer and its step. The run is not changed.

    `data`: dataset directory; None: the one that the run was trained on. `step`: of a checkpoint;
    None: the newest valid one. Raises GptddpError if there is no run, no such checkpoint or
    dataset, or if the dataset has another tokenizer.
    """
    config = configuration(run)
    dataset = open_dataset(data or config.data, "quarantine")
    fix = "give a dataset with the run's tokenizer, by --data"
    net, _, found = _of_run(run, config, dataset, step, torch.device("cpu"), fix)
    return net, dataset.tokenizer(), found or 0


def load_for(path: Path, dataset: Dataset, step: int | None, device: torch.device) -> Trained:
    """The model of a run, or of a folder, for a dataset that was prepared with its tokenizer.

    Raises GptddpError, also if the dataset has another tokenizer.
    """
    if not is_run(path) and is_folder(path):
        if step is not None:
            raise ConfigError(f"{path} is a model folder, without checkpoints: omit --step {step}")
        return _of_folder(path, dataset, device)
    if not is_run(path):
        raise ConfigError(f"{path} is neither a run directory nor a model: it has no ledger.jsonl")
    config = configuration(path)
    file = Path(config.data) / "tokenizer.json"
    tokenizer = file if exists(file) else "bytes"
    fix = (
        "prepare the texts with the run's tokenizer: "
        f"`gptddp prepare SOURCE --tokenizer {tokenizer} --out DIR`"
    )
    return _of_run(path, config, dataset, step, device, fix)


def _of_run(
    run: Path, config: Config, dataset: Dataset, step: int | None, device: torch.device, fix: str
) -> Trained:
    """The model of a checkpoint. Refuses another tokenizer, also one of equal size, with `fix`."""
    live.phase("loading the model")
    found = run_state.read(run)
    branches = () if step is not None else found.branches  # abandoned steps can be asked for
    loaded = load_newest(run, found.run_id, set_aside=False, branches=branches, step=step)
    if not loaded:
        raise CheckpointError(f"{run} has no checkpoint yet: wait until training has saved one")
    config = with_preset(config, accelerator=device.type != "cpu")
    there = str(loaded.meta.get("data", {}).get("tokenizer", ""))  # first digits of its hash
    given = dataset.tokenizer().sha256
    if not there or not given.startswith(there):
        raise ConfigError(
            f"run {run} has another tokenizer (sha256 {there[:12] or 'unknown'}...) than "
            f"{dataset.dir} ({given[:12]}...): {fix}"
        )
    return _net(config, dataset, loaded.tensors, device), config, loaded.step


def _of_folder(path: Path, dataset: Dataset, device: torch.device) -> Trained:
    try:
        config = with_fields_of_folder(Config(init_from=str(path), **numerics(device)))
        config = with_preset(config, accelerator=device.type != "cpu")
        first, sha256 = first_state(config, dataset)
    except ConfigError as error:  # the message names a flag of training
        raise ConfigError(re.sub("^--init-from:? ", "", str(error))) from None
    config = dataclasses.replace(config, init_sha256=sha256)
    return _net(config, dataset, first.tensors, device), config, None


def _net(
    config: Config, dataset: Dataset, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> GPT:
    net = build(config, dataset.tokenizer().vocab_size, device)
    into = {f"model.{name}": p.detach() for name, p in net.named_parameters()}
    copy_into(into, {k: t for k, t in tensors.items() if k.startswith("model.")})
    return net.eval()


# -- evaluation ------------------------------------------------------------------------------------


def evaluate_model(
    path: Path, data: str, split: Literal["train", "val"], step: int | None, tokens: int | None
) -> dict[str, Any] | None:
    """All ranks of a torchrun, or one process: the report on rank 0, None on others.

    `path`: a run directory or a Hugging Face folder. `step`: of a checkpoint; None: the newest
    valid one. `tokens`: approximate number, the same tokens at each call; None: the whole split. It
    computes like the run, so the bits equal the run's own evaluations, at any world size. The
    report has loss in nats per token, bpb in bits per byte or None. Raises GptddpError, OSError.
    """
    dataset = open_dataset(data, "fail")
    with connect(None) as world:
        net, config, at = load_for(path, dataset, step, world.device)
        use(config, world.device)
        most = tokens if tokens is not None else 1 << 62
        rows = eval_rows(dataset, config.seq_len, most, config.pack, split)
        live.phase("evaluating")
        result = evaluate(net, rows, dataset.tokenizer(), config, world)  # all ranks
        assert result is not None  # `stop` is never true
    if world.rank:
        return None
    report: dict[str, Any] = {"model": str(path), "step": at, "dataset": data, "split": split}
    numbers = {"loss": result.loss, "bpb": result.bpb, "targets": result.targets}
    return report | numbers | {"bytes": result.n_bytes}


def as_line(report: dict[str, Any]) -> str:
    """The report as a readable line."""
    step = "" if report["step"] is None else f", step {report['step']}"
    bpb = "" if report["bpb"] is None else f", {report['bpb']:.4f} bits a byte"
    return (
        f"{report['model']}{step}, on {report['split']} of {report['dataset']}: loss "
        f"{report['loss']:.4f} nats a token{bpb}; {report['targets']:,} tokens, "
        f"{report['bytes']:,} bytes"
    )
