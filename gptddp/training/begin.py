"""The beginning of a life: all ranks find the newest state, wherever it is."""

import dataclasses
import errno
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gptddp import __version__
from gptddp.checkpoint import snapshot, store
from gptddp.checkpoint.load import Loaded, load_newest
from gptddp.config import Config, check_world_size
from gptddp.data import inventory
from gptddp.data.dataset import Dataset
from gptddp.distributed.connect import World
from gptddp.distributed.waiting import Tell
from gptddp.errors import BadMessage, ConfigError, DataError
from gptddp.files import explain, may_pass, patiently, read_json, write_json_atomic
from gptddp.run.directory import CONFIG, DATASET, id_of, resolve, restore_config
from gptddp.run.history import highest_generation, history, read_ledger
from gptddp.run.lease import Lease, acquire
from gptddp.run.origin import Origin
from gptddp.run.quarantine import decided
from gptddp.training.choose import Brought, NewestState, checked, newest_rank, of_this_run, trusted
from gptddp.training.life import Life
from gptddp.training.metrics import PhaseClock
from gptddp.training.stop import StopFlag

log = logging.getLogger(__name__)

Line = dict[str, Any]  # of the log
_MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EACCES)  # trouble that another try does not mend


def begin(
    config: Config, dataset: Dataset, world: World, stop: StopFlag, clock: PhaseClock
) -> Life:
    """All ranks: a new life of the run, from the newest valid state on disk or in any memory.

    Raises ConfigError, DataError and CheckpointError, on every rank, as `open_run` does.
    """
    return Life(newest_state(config, dataset, world), world, stop, clock)


def newest_state(config: Config, dataset: Dataset, world: World) -> NewestState:
    """All ranks: rank 0 reads the storage, every rank its memory; the newest valid state goes on.

    One reader, one opinion: with a part of the chunks on each rank, a node whose view of a network
    volume is old would have a good checkpoint set aside. It would save a part of the reading of a
    cold start, of which the broadcast is the larger half (0.5 GB, four ranks on two cores: 1.1 to
    2.4 s, in parts 0.9 to 1.9 s), and each rank would hold the state twice.
    """
    path = snapshot.path_of(world.memory, config.run_dir) if world.memory else None
    left = snapshot.read(path) if path else None
    brought = checked(world.gather(left and (left.run_id, left.generation, left.step, left.digest)))
    loaded: Any = None
    lease: Lease | None = None

    def on_rank_0(tell: Tell) -> dict[str, Any]:
        nonlocal loaded, lease
        lease = patiently(lambda: take_run(config, world, tell))
        try:
            origin, loaded = open_run(config, dataset, world, brought, tell)
        except BaseException as error:
            lease.release()
            if isinstance(error, OSError) and error.errno in _MISPLACED:
                raise ConfigError(
                    f"run {config.run_dir} cannot be used: {explain(error)}"
                ) from error
            raise
        return origin.to_json()

    origin = Origin.from_json(world.from_rank_0(on_rank_0))
    source = origin.snapshot_rank or 0
    # `loaded` is on rank 0, or nowhere
    state = left if world.rank == origin.snapshot_rank else loaded
    mine: Any = ({}, [], None)
    if state:  # a checkpoint has no lines and no fault
        mine = state.meta, getattr(state, "lines", []), getattr(state, "fault", None)
    sent = world.broadcast_value(mine, source)
    try:
        meta, lines, fault = dict(sent[0]), list(sent[1]), sent[2] and dict(sent[2])
        _ = [int(line["step"]) for line in lines]
    except (LookupError, TypeError, ValueError):
        raise BadMessage(world.names[source], f"{sent!r:.80} for a state to go on from") from None
    origin = dataclasses.replace(origin, meta=meta)
    return NewestState(origin, source, state.tensors if state else None, lines, fault, path, lease)


def take_run(config: Config, world: World, tell: Tell = lambda _: None) -> Lease:
    """Rank 0 only: make the run directory, and take its lease for this job; see `lease.acquire`."""
    run = Path(config.run_dir)
    try:
        run.mkdir(parents=True, exist_ok=True)
        return acquire(run, world.job, known=(run / CONFIG).exists(), tell=tell)
    except OSError as error:
        if may_pass(error):
            raise
        raise ConfigError(
            f"run {run}: cannot be used: {explain(error)}; or use another --run-dir"
        ) from error


def open_run(
    config: Config, dataset: Dataset, world: World, brought: Sequence[Brought], tell: Tell
) -> tuple[Origin, Loaded | None]:
    """Rank 0 only: resolve the configuration, choose the newest valid state, open a new generation.

    That is a checkpoint, or the snapshot that one of the ranks has (`brought`, by rank). Whatever
    cannot be read is tried again for a while. Raises ConfigError when the run directory belongs to
    another configuration, DataError when it belongs to other data, CheckpointError when it has
    checkpoints and none is valid; OSError for trouble of the volume that may pass.
    """
    run = Path(config.run_dir)
    tell("reading the ledger and the configuration")
    events, highest, run_id = _known(run)
    snapshots = of_this_run(brought, run_id)
    # a life on a full disk has left its traces in memory alone
    generation = 1 + max([highest, *(it[0] for it in snapshots.values())])
    config = patiently(lambda: resolve(config, world, continued=generation > 1))
    check_world_size(config, world.world_size)
    patiently(lambda: _check_data(run, dataset))
    newest = next(filter(store.is_candidate, patiently(lambda: store.names(run))), None)
    snapshots = trusted(snapshots, events, run, world)
    from_rank = newest_rank(snapshots, store.order(newest) if newest else None)
    loaded = load_newest(run, tell=tell) if from_rank is None else None
    patiently(lambda: _write_config(run, run_id, config, dataset, new=generation == 1))
    if from_rank is not None:
        step, source, parent = snapshots[from_rank][1], "memory", newest
    elif loaded is not None:
        step, source, parent = loaded.step, loaded.name, loaded.name
    else:
        step, source, parent = 0, "scratch", None
    tell("reading the log")
    redo, last_line, line = patiently(lambda: _in_history(run, step))
    origin = Origin(
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
        snapshot_rank=from_rank,
        quarantine=decided(events, step),
    )
    return origin, loaded


def _known(run: Path) -> tuple[list[dict[str, Any]], int, str]:
    """The ledger's events, the highest generation so far, and the id: a new one of a new run."""
    events = patiently(lambda: read_ledger(run))
    patiently(lambda: restore_config(run, events))
    highest = patiently(lambda: highest_generation(run, events))
    return events, highest, patiently(lambda: _id_of(run, known=highest > 0))


def _id_of(run: Path, known: bool) -> str:
    """The run's id; a new one where there is no run. `known`: it has left something here."""
    if found := id_of(run):
        return found
    if known and not store.names(run):
        steps = sum(1 for _ in history(run))
        raise ConfigError(
            f"{run} has the log or the ledger of a run ({steps} steps), but neither its {CONFIG} "
            f"nor a checkpoint: put {CONFIG} back from a backup, or give another --run-dir"
        )
    if known:
        log.warning("%s is gone: the run goes on with the flags given now", run / CONFIG)
    return uuid.uuid4().hex


def _in_history(run: Path, step: int) -> tuple[int, Line | None, Line | None]:
    """How many steps are logged beyond this one; the last line of all; the line of this step."""
    redo, last, line = 0, None, None
    for last in history(run):  # one at a time: a million of them would take a gigabyte
        redo += last["step"] > step
        line = last if last["step"] == step else line
    return redo, last, line


def _write_config(run: Path, run_id: str, config: Config, dataset: Dataset, new: bool) -> None:
    """Write down what this life runs with; a run that is not new goes on where that fails."""
    try:
        saved = {"version": __version__, "torch": torch.__version__, "run_id": run_id}
        write_json_atomic(run / CONFIG, saved | {"config": dataclasses.asdict(config)})
        if not (run / DATASET).exists():
            data = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
            write_json_atomic(run / DATASET, data)
    except OSError as error:
        if new and may_pass(error):
            raise
        if new:
            raise ConfigError(f"run {run} cannot be written: {explain(error)}") from error
        log.warning("the run goes on, but its directory cannot be written: %s", explain(error))


def _check_data(run: Path, dataset: Dataset) -> None:
    """Refuse other data than the run began with, naming every file that differs.

    The checkpoint has a hash of the data, which is what counts; this file knows what it stands for.
    """
    try:
        began: Any = read_json(run / DATASET)
        same = began is None or began["sha256"] == dataset.sha256
        lines = [] if same else inventory.changes(began["files"], inventory.files(dataset.manifest))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if may_pass(error):
            raise
        raise ConfigError(f"{run / DATASET} cannot be used ({error}): remove it") from error
    if not same:
        raise DataError(
            f"{dataset.dir} is not the data that run {run} began with: {inventory.listed(lines)}: "
            "put that data set back, or give another --run-dir"
        )
