"""The beginning of a life: all ranks find the newest state, wherever it is."""

import dataclasses
import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptddp.checkpoint import known, late, retention, snapshot, store
from gptddp.checkpoint.load import Loaded
from gptddp.config import Config, check_world_size
from gptddp.data import inventory
from gptddp.data.dataset import Dataset
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.errors import ConfigError, DataError
from gptddp.files import TRANSIENT, explain, make_folder, read_json, write_json_atomic
from gptddp.run import summary
from gptddp.run.directory import CONFIG, DATASET, id_of, resolve
from gptddp.run.history import highest_generation, history, last_step
from gptddp.run.lease import Lease, acquire
from gptddp.run.origin import Origin
from gptddp.run.quarantine import decided
from gptddp.run.recovery import unsaved_s
from gptddp.run.summary import Summary
from gptddp.training.changes import changes, write_config
from gptddp.training.choose import Brought, NewestState, newest_rank, of_this_run, trusted
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
    brought = world.gather(left and (left.run_id, left.generation, left.step, left.digest))
    verdict = environment.verdict()  # beside it this rank and its launcher meet
    saving = world.gather(late.in_progress(verdict and verdict.parent))
    loaded: Any = None
    lease: Lease | None = None

    def on_rank_0() -> Origin:
        nonlocal loaded, lease
        lease = take_run(config, world)
        try:
            origin, loaded = open_run(config, dataset, world, brought, saving)
        except BaseException as error:
            lease.release()
            if isinstance(error, OSError) and error.errno in _MISPLACED:
                raise ConfigError(
                    f"run {config.run_dir} cannot be used: {explain(error)}"
                ) from error
            raise
        return origin

    origin = world.from_rank_0(on_rank_0)
    if origin.config.on_bad == "fail":  # files that this rank alone lacks
        dataset.check_whole()
    if verdict and world.rank == origin.snapshot_rank and origin.late not in (None, *saving):
        _ask_for_late_save(verdict.parent, world)
    source = origin.snapshot_rank or 0
    # `loaded` is on rank 0, or nowhere
    state = left if world.rank == origin.snapshot_rank else loaded
    mine: Any = ({}, [], [], None)
    if isinstance(state, snapshot.Snapshot):
        mine = state.meta, state.lines, state.events, state.fault
    elif state:
        mine = state.meta, [], [], None
    meta, lines, events, fault = world.broadcast_value(mine, source)
    origin = dataclasses.replace(origin, meta=meta)
    tensors = state.tensors if state else None
    return NewestState(origin, source, tensors, lines, events, fault, path, lease)


def _ask_for_late_save(folder: Path, world: World) -> None:
    """The rank whose snapshot this life goes on from: its launcher is to save it meanwhile."""
    try:
        late.ask(folder, world.job)
    except OSError as error:
        log.warning("no checkpoint is made of the state left in memory: %s", error)


def take_run(config: Config, world: World) -> Lease:
    """Rank 0 only: make the run directory, and take its lease for this job; see `lease.acquire`."""
    run = Path(config.run_dir)
    try:
        if not (begun := (run / CONFIG).exists()):
            make_folder(run)
        return acquire(run, world.job, known=begun)
    except OSError as error:
        if error.errno in TRANSIENT:
            raise
        raise ConfigError(
            f"run {run}: cannot be used: {explain(error)}; or use another --run-dir"
        ) from error


def open_run(
    config: Config,
    dataset: Dataset,
    world: World,
    brought: Sequence[Brought] = (),
    saving: Sequence[str | None] = (),
) -> tuple[Origin, Loaded | None]:
    """Rank 0 only: resolve the configuration, choose the newest valid state, open a new generation.

    That is a checkpoint, or the snapshot that one of the ranks has (`brought`, by rank). `saving`:
    the late saves in progress in the pods of this world, by rank. Raises ConfigError when the run
    directory belongs to another configuration, DataError when it belongs to other data,
    CheckpointError when it has checkpoints and none is valid.
    """
    run = Path(config.run_dir)
    run_id, ledger = id_of(run), summary.read(run)
    snapshots = of_this_run(brought, run_id)
    # a life on a full disk has left its traces in memory alone
    generation = 1 + max([highest_generation(run, ledger), *(it[0] for it in snapshots.values())])
    config, before = resolve(config, world, begun=generation > 1)
    check_world_size(config, world.world_size)
    _check_data(run, dataset)
    if config.on_bad == "fail":
        dataset.check_whole()
    newest = store.newest(run)
    snapshots = trusted(snapshots, ledger.void, run, world)
    from_rank = newest_rank(snapshots, store.order(newest) if newest else None)
    chosen = None if from_rank is None else snapshots[from_rank]
    loaded, late_save = _take_up(config, ledger, chosen, saving)
    if from_rank is not None:
        step, source, parent = snapshots[from_rank][1], "memory", newest
    elif loaded is not None:
        step, source, parent = loaded.step, loaded.name, loaded.name
    else:
        step, source, parent = 0, "scratch", None
    changed = changes(before, config)
    _write_config(run, run_id, config if not changed else None, dataset, new=generation == 1)
    redo, last_line, line = _in_history(run, step)
    if redo and source == "scratch":
        log.warning("run %s has no checkpoint: the %d steps in its log are done again", run, redo)
    origin = Origin(
        config=config,
        changes=changed,
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
        late=late_save,
        quarantine=decided(ledger.quarantine, step),
    )
    return origin, loaded


def _take_up(
    config: Config,
    ledger: Summary,
    chosen: tuple[int, int, int] | None,
    saving: Sequence[str | None],
) -> tuple[Loaded | None, str | None]:
    """The newest checkpoint, unless a snapshot is `chosen`; and the late save that is spared.

    That is the one in progress, or one of the snapshot where a checkpoint is overdue.
    """
    run = Path(config.run_dir)
    if chosen is None:
        retention.fence(run)
        return known.load(run, known.committed(ledger), config.from_scratch), None
    generation, step, _ = chosen
    save = max(filter(None, saving), key=lambda name: store.order(name) or (0, 0), default=None)
    overdue = unsaved_s(ledger) >= config.checkpoint_every
    if save is None and overdue and environment.verdict():  # else there is no launcher to do it
        save = store.name_of(step, generation)
    retention.fence(run, [save] if save else [])
    known.warn(run, known.committed(ledger), f"memory, step {step}")
    return None, save


def _in_history(run: Path, step: int) -> tuple[int, Line | None, Line | None]:
    """How many steps are logged beyond this one; the last line of all; the line of this step."""
    redo, last, line = 0, None, None
    for last in history(run, min(step, last_step(run))):  # no more is read, however long the run
        redo += last["step"] > step
        line = last if last["step"] == step else line
    return redo, last, line


def _write_config(
    run: Path, run_id: str, config: Config | None, dataset: Dataset, new: bool
) -> None:
    """Write down what this life runs with; a run that is not new goes on where that fails.

    config None: it has changes, which the ledger has first; see `Changes`.
    """
    try:
        if config:
            write_config(run, run_id, config)
        if not (run / DATASET).exists():
            data = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
            write_json_atomic(run / DATASET, data)
    except OSError as error:
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
        raise ConfigError(f"{run / DATASET} cannot be used ({error}): remove it") from error
    if not same:
        raise DataError(
            f"{dataset.dir} is not the data that run {run} began with: {inventory.listed(lines)}: "
            "put that data set back, or give another --run-dir"
        )
