"""The beginning of a life: all ranks find the newest state, wherever it is."""

import contextlib
import dataclasses
import errno
import logging
from collections.abc import Iterator, Sequence
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
from gptddp.errors import ConfigError, DataError
from gptddp.files import TRANSIENT, explain, read_json, write_json_atomic
from gptddp.run.directory import CONFIG, DATASET, id_of, resolve
from gptddp.run.history import highest_generation, history, read_ledger
from gptddp.run.lease import Claim, Lease
from gptddp.run.origin import Origin
from gptddp.run.quarantine import decided
from gptddp.training.choose import Brought, NewestState, newest_rank, of_this_run, trusted
from gptddp.training.life import Life
from gptddp.training.metrics import PhaseClock
from gptddp.training.stop import StopFlag

log = logging.getLogger(__name__)

Line = dict[str, Any]  # of the log
_MEET_S = 1.0  # between two meetings of the ranks while another has the run
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
    loaded: Any = None
    claim: Claim | None = None
    lease: Lease | None = None

    def on_rank_0() -> Origin | None:
        nonlocal loaded, claim, lease
        with told(config):
            claim = claim or claim_run(config, world)
            lease = claim.poll(_MEET_S)
        if lease is None:
            return None
        try:
            origin, loaded = open_run(config, dataset, world, brought)
        except BaseException as error:
            lease.release()
            if isinstance(error, OSError) and error.errno in _MISPLACED:
                raise ConfigError(
                    f"run {config.run_dir} cannot be used: {explain(error)}"
                ) from error
            raise
        return origin

    # All ranks have met in `gather`, so every pod has noted this life before its lease is there.
    # They meet each second, so none times out while another has the run, however long that is.
    while (origin := world.from_rank_0(on_rank_0)) is None:
        pass
    source = origin.snapshot_rank or 0
    # `loaded` is on rank 0, or nowhere
    state = left if world.rank == origin.snapshot_rank else loaded
    mine: Any = ({}, [], None)
    if state:  # a checkpoint has no lines and no fault
        mine = state.meta, getattr(state, "lines", []), getattr(state, "fault", None)
    meta, lines, fault = world.broadcast_value(mine, source)
    origin = dataclasses.replace(origin, meta=meta)
    return NewestState(origin, source, state.tensors if state else None, lines, fault, path, lease)


def claim_run(config: Config, world: World) -> Claim:
    """Rank 0 only: make the run directory, and ask for its lease for this life of the job."""
    run = Path(config.run_dir)
    run.mkdir(parents=True, exist_ok=True)
    return Claim(run, world.job, world.life, world.follows, known=(run / CONFIG).exists())


@contextlib.contextmanager
def told(config: Config) -> Iterator[None]:
    """A run directory that cannot be used is the user's mistake, but for trouble that may pass."""
    try:
        yield
    except OSError as error:
        if error.errno in TRANSIENT:
            raise
        raise ConfigError(
            f"run {config.run_dir}: cannot be used: {explain(error)}; or use another --run-dir"
        ) from error


def open_run(
    config: Config, dataset: Dataset, world: World, brought: Sequence[Brought] = ()
) -> tuple[Origin, Loaded | None]:
    """Rank 0 only: resolve the configuration, choose the newest valid state, open a new generation.

    That is a checkpoint, or the snapshot that one of the ranks has (`brought`, by rank). Raises
    ConfigError when the run directory belongs to another configuration, DataError when it belongs
    to other data, CheckpointError when it has checkpoints and none is valid.
    """
    run = Path(config.run_dir)
    run_id, events = id_of(run), read_ledger(run)
    snapshots = of_this_run(brought, run_id)
    # a life on a full disk has left its traces in memory alone
    generation = 1 + max([highest_generation(run, events), *(it[0] for it in snapshots.values())])
    config = resolve(config, world, continued=generation > 1)
    check_world_size(config, world.world_size)
    _check_data(run, dataset)
    newest = next(filter(store.is_candidate, store.names(run)), None)
    snapshots = trusted(snapshots, events, run, world)
    from_rank = newest_rank(snapshots, store.order(newest) if newest else None)
    loaded = load_newest(run) if from_rank is None else None
    _write_config(run, run_id, config, dataset, new=generation == 1)
    if from_rank is not None:
        step, source, parent = snapshots[from_rank][1], "memory", newest
    elif loaded is not None:
        step, source, parent = loaded.step, loaded.name, loaded.name
    else:
        step, source, parent = 0, "scratch", None
    redo, last_line, line = _in_history(run, step)
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
