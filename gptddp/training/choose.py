"""Where a life goes on: the newest valid state, on disk or in memory."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gptddp import __version__
from gptddp.checkpoint import store
from gptddp.checkpoint.load import Loaded, load_newest
from gptddp.config import Config, check_world_size
from gptddp.data import inventory
from gptddp.data.dataset import Dataset
from gptddp.distributed.connect import World
from gptddp.errors import ConfigError, DataError, Diverged
from gptddp.files import TRANSIENT, explain, read_json, write_json_atomic
from gptddp.run.directory import DATASET, id_of, log, resolve
from gptddp.run.history import Ledger, highest_generation, history, read_ledger, void_generation
from gptddp.run.lease import Lease, acquire
from gptddp.run.life import Life
from gptddp.run.quarantine import decided

# What a rank has left in memory: run id, generation, step, digest; None for nothing.
Left = tuple[str, int, int, int] | None


Own = dict[int, tuple[int, int, int]]  # generation, step, digest by rank


def claim(config: Config, dist: World) -> Lease:
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
    config: Config, dataset: Dataset, dist: World, left: Sequence[Left] = ()
) -> tuple[Life, Loaded | None]:
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
    loaded = load_newest(run) if holder is None else None
    values = dataclasses.asdict(config)
    try:
        saved = {"version": __version__, "torch": torch.__version__, "run_id": run_id}
        write_json_atomic(run / "config.json", saved | {"config": values})
        if not (run / DATASET).exists():
            data = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
            write_json_atomic(run / DATASET, data)
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
        began: Any = read_json(run / DATASET)
        same = began is None or began["sha256"] == dataset.sha256
        lines = [] if same else inventory.changes(began["files"], inventory.files(dataset.manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run / DATASET} cannot be used ({error}): remove it") from error
    if not same:
        raise DataError(
            f"{dataset.dir} is not the data that run {run} began with: {inventory.listed(lines)}: "
            "put that data set back, or give another --run-dir"
        )


def _own(left: Sequence[Left], run_id: str) -> Own:
    """What ranks have left of this run: another's is foreign."""
    return {rank: it[1:] for rank, it in enumerate(left) if it is not None and it[0] == run_id}


def _trusted(own: Own, events: Sequence[Mapping[str, Any]], run: Path, dist: World) -> Own:
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
            error = Diverged(digests, step, dist.names)
            log.error("%s", error)
            names = {"step": step, "ranks": error.ranks, "names": error.names}
            Ledger(run).event("diverged", generation, **names)
            void = generation
    return {rank: it for rank, it in own.items() if it[0] > void}


def _holder(own: Own, newest: tuple[int, int] | None) -> int | None:
    """The first rank with the newest state of this run, if no checkpoint is as new.

    By generation, then step, as with checkpoints: a life that begins decides what the run is.
    """
    best = max(own, key=lambda rank: (own[rank][:2], -rank), default=None)
    return best if best is not None and own[best][:2] > (newest or (0, 0)) else None
