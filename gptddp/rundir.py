"""The run directory: its configuration, its lives, and where each one goes on."""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptddp import __version__, checkpoint, inventory
from gptddp.config import FIELDS, Config, check_world_size, differences, flag, with_preset
from gptddp.corpus import Dataset
from gptddp.dist import Dist, has_fast_bf16
from gptddp.errors import ConfigError, DataError
from gptddp.files import read_json, write_json_atomic
from gptddp.quarantine import decided
from gptddp.runlog import history, next_generation, read_ledger

# A field that the run has fixed takes the run's value when it is left open; these do as well.
_KEPT = ("preset", "micro_batch", "steps", "lr", "warmup_steps", "eval_every", "eval_tokens")


_DATA = "dataset.json"  # which files the run began with


@dataclass(frozen=True)
class Life:
    """What one life of the run begins with: the same on every rank."""

    config: Config  # resolved
    generation: int
    step: int  # finished steps
    meta: dict[str, Any]  # of the checkpoint; {} when the run begins
    source: str  # the checkpoint's name, or "scratch"
    redo: int  # steps that an earlier life has done beyond `step`
    quarantine: dict[int, list[int]]  # what earlier lives decided beyond `step`, see quarantine.py


def open_run(config: Config, dataset: Dataset, dist: Dist) -> tuple[Life, checkpoint.Loaded | None]:
    """Rank 0 only: resolve the configuration, find the newest valid checkpoint, open a new life.

    Raises ConfigError when the run directory belongs to another configuration, DataError when it
    belongs to other data, CheckpointError when it has checkpoints and none is valid.
    """
    run = Path(config.run_dir)
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run {run}: cannot be created ({error.strerror}): use --run-dir"
        ) from error
    generation = next_generation(run)
    config = resolve(config, dist, continued=generation > 1)
    check_world_size(config, dist.world_size)
    _check_data(run, dataset)
    loaded = checkpoint.load_newest(run)
    values = dataclasses.asdict(config)
    try:
        saved = {"version": __version__, "torch": torch.__version__, "config": values}
        write_json_atomic(run / "config.json", saved)
        if not (run / _DATA).exists():
            data = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
            write_json_atomic(run / _DATA, data)
    except OSError as error:
        raise ConfigError(f"run {run}: cannot be written ({error.strerror})") from error
    step = loaded.step if loaded else 0
    life = Life(
        config=config,
        generation=generation,
        step=step,
        meta=loaded.meta if loaded else {},
        source=loaded.name if loaded else "scratch",
        redo=sum(1 for line in history(run) if line["step"] > step),
        quarantine=decided(read_ledger(run), step),
    )
    return life, loaded


def _check_data(run: Path, dataset: Dataset) -> None:
    """Refuse other data than the run began with, naming every file that differs.

    The checkpoint has a hash of the data, which is what counts; this file knows what it stands for.
    """
    try:
        began: Any = read_json(run / _DATA)
        same = began is None or began["sha256"] == dataset.sha256
        lines = [] if same else inventory.changes(began["files"], inventory.files(dataset.manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / _DATA} cannot be used ({error}): remove it") from error
    if not same:
        raise DataError(
            f"{dataset.dir} is not the data that run {run} began with: {inventory.listed(lines)}: "
            "put that data set back, or give another --run-dir"
        )


def saved_config(run: Path) -> dict[str, Any] | None:
    """The fields that the run was last started with; None where there is no run."""
    path = run / "config.json"
    try:
        saved = read_json(path)
        return None if saved is None else dict(saved["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}): put it back from a backup, or remove it and give "
            "every flag that the run was begun with"
        ) from error


def resolve(config: Config, dist: Dist, continued: bool) -> Config:
    """Close every open field: by the run that is continued, else by preset and hardware."""
    if continued and (values := saved_config(Path(config.run_dir))) is not None:
        kept = [n for n, f in FIELDS.items() if f.metadata["fixed"] or n in _KEPT]
        open_fields = {n: values[n] for n in kept if getattr(config, n) is None and n in values}
        config = dataclasses.replace(config, **open_fields)
        if changed := differences(values, dataclasses.asdict(config)):
            flags = ", ".join(flag(line.split(":")[0]) for line in changed)
            raise ConfigError(
                f"run {config.run_dir} was begun with another configuration "
                f"({'; '.join(changed)}): leave out {flags} to continue it, "
                "or give another --run-dir"
            )
    if config.precision is None:
        fast = has_fast_bf16(dist.device)
        config = dataclasses.replace(config, precision="bf16" if fast else "fp32")
    return with_preset(config, accelerator=dist.device.type != "cpu")


def finish(life: Life, step: int, cause: str) -> None:
    """Rank 0 only, after the last checkpoint: leave the marker that a later start reads first."""
    c = life.config
    wanted = {"steps": c.steps, "max_time": c.max_time}
    marker = {"step": step, **wanted, "time": time.time(), "cause": cause}
    write_json_atomic(Path(c.run_dir) / "finished.json", marker)
