"""The run directory: its configuration, its lives, and where each one goes on."""

import contextlib
import dataclasses
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptddp import __version__, checkpoint, inventory, store
from gptddp.config import FIELDS, Config, check_world_size, differences, flag, with_preset
from gptddp.corpus import Dataset
from gptddp.dist import Dist, has_fast_bf16
from gptddp.errors import ConfigError, DataError
from gptddp.files import TRANSIENT, explain, read_json, write_json_atomic
from gptddp.lease import Lease, acquire
from gptddp.quarantine import decided
from gptddp.runlog import Ledger, highest_generation, history, read_ledger
from gptddp.state import Diverged

log = logging.getLogger(__name__)

# A field that the run has fixed takes the run's value when it is left open; these do as well.
_KEPT = ("preset", "micro_batch", "steps", "lr", "warmup_steps", "eval_every", "eval_tokens")
_DATA = "dataset.json"  # which files the run began with


@dataclass(frozen=True)
class Life:
    """What one life of the run begins with: the same on every rank."""

    config: Config  # resolved
    generation: int
    step: int  # finished steps
    meta: dict[str, Any]  # of the checkpoint; {} when the run begins, or goes on from memory
    source: str  # the checkpoint's name, "memory" or "scratch"
    redo: int  # steps that an earlier life has done beyond `step`
    last_line: dict[str, Any] | None  # of the log, by any life
    line: dict[str, Any] | None  # of `step`, there
    run_id: str  # of this run directory's content, unique for ever
    parent: str | None  # the checkpoint that this life descends from
    holder: int | None  # the rank whose snapshot this life goes on from
    quarantine: dict[int, list[int]]  # what earlier lives decided beyond `step`, see quarantine.py


# What a rank has left in memory: run id, generation, step, digest; None for nothing.
Left = tuple[str, int, int, int] | None
Own = dict[int, tuple[int, int, int]]  # generation, step, digest by rank


def claim(config: Config, dist: Dist) -> Lease:
    """Rank 0 only: make the run directory, and have it to this job; see `lease.acquire`."""
    run = Path(config.run_dir)
    try:
        run.mkdir(parents=True, exist_ok=True)
        return acquire(run, dist.job, known=(run / "config.json").exists())
    except OSError as error:
        if error.errno in TRANSIENT:
            raise
        raise ConfigError(
            f"run {run}: cannot be used: {explain(error)}; or use another --run-dir"
        ) from error


def open_run(
    config: Config, dataset: Dataset, dist: Dist, left: Sequence[Left] = ()
) -> tuple[Life, checkpoint.Loaded | None]:
    """Rank 0 only: resolve the configuration, find the newest valid state, open a new life.

    That is a checkpoint, or what one of the ranks (`left`, by rank) has from an earlier life.
    Raises ConfigError when the run directory belongs to another configuration, DataError when it
    belongs to other data, CheckpointError when it has checkpoints and none is valid.
    """
    run = Path(config.run_dir)
    run_id = id_of(run)
    events, own = read_ledger(run), _own(left, run_id)
    # a life on a full disk has left its traces in memory alone
    lives = [generation for generation, *_ in own.values()]
    generation = 1 + max(highest_generation(run, events), *lives, 0)
    config = resolve(config, dist, continued=generation > 1)
    check_world_size(config, dist.world_size)
    _check_data(run, dataset)
    newest = next(filter(store.is_candidate, store.names(run)), None)
    own = _trusted(own, events, run, dist)
    holder = _holder(own, store.order(newest) if newest else None)
    loaded = checkpoint.load_newest(run) if holder is None else None
    values = dataclasses.asdict(config)
    try:
        saved = {"version": __version__, "torch": torch.__version__, "run_id": run_id}
        write_json_atomic(run / "config.json", saved | {"config": values})
        if not (run / _DATA).exists():
            data = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
            write_json_atomic(run / _DATA, data)
    except OSError as error:
        if generation == 1:
            raise ConfigError(f"run {run} cannot be written: {explain(error)}") from error
        log.warning("the run goes on, but its directory cannot be written: %s", explain(error))
    step = loaded.step if loaded else 0
    source, parent = ("scratch", None) if loaded is None else (loaded.name, loaded.name)
    if holder is not None:
        step, source, parent = own[holder][1], "memory", newest
    redo, last_line, line = 0, None, None
    for last_line in history(run):
        redo += last_line["step"] > step
        line = last_line if last_line["step"] == step else line
    life = Life(
        config=config,
        generation=generation,
        step=step,
        meta=loaded.meta if loaded else {},
        source=source,
        redo=redo,
        last_line=last_line,
        line=line,
        run_id=run_id,
        parent=parent,
        holder=holder,
        quarantine=decided(events, step),
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


def _own(left: Sequence[Left], run_id: str) -> Own:
    """What ranks have left of this run: another's is foreign."""
    return {rank: it[1:] for rank, it in enumerate(left) if it is not None and it[0] == run_id}


def _trusted(own: Own, events: Sequence[Mapping[str, Any]], run: Path, dist: Dist) -> Own:
    """The memories but those of a generation in which ranks have diverged, or older.

    A rank that differs has spoilt the gradients of all: what the majority holds is no better. So
    ranks that bring different states of one step are a divergence too, with the same outcome.
    """
    void = void_generation(events)
    states: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank, (generation, step, digest) in own.items():
        if generation > void:
            states[generation, step][rank] = digest
    for (generation, step), digests in sorted(states.items()):
        if len(set(digests.values())) > 1:
            error = Diverged(digests, step, dist)
            log.error("%s", error)
            names = {"step": step, "ranks": error.ranks, "names": error.names}
            Ledger(run).event("diverged", generation, **names)
            void = generation
    return {rank: it for rank, it in own.items() if it[0] > void}


def void_generation(events: Sequence[Mapping[str, Any]]) -> int:
    """The last generation in which ranks have diverged: no memory up to it is gone on from."""
    return max((e["generation"] for e in events if e["event"] == "diverged"), default=0)


def _holder(own: Own, newest: tuple[int, int] | None) -> int | None:
    """The first rank with the newest state of this run, if no checkpoint is as new.

    By generation, then step, as with checkpoints: a life that begins decides what the run is.
    """
    best = max(own, key=lambda rank: (own[rank][:2], -rank), default=None)
    return best if best is not None and own[best][:2] > (newest or (0, 0)) else None


def id_of(run: Path) -> str:
    """The id of the run directory's content; a new one where it has none."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return str((read_json(run / "config.json") or {})["run_id"])
    return uuid.uuid4().hex


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
