"""What rank 0 reads of a run at the beginning of a life, and what it decides from it."""

import errno
import logging
import os
import stat
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptddp.checkpoint import owner, store
from gptddp.checkpoint.load import Loaded
from gptddp.config import KEPT, Config, check_world_size
from gptddp.data import inventory
from gptddp.data.dataset import Dataset
from gptddp.distributed.connect import World
from gptddp.distributed.waiting import Tell
from gptddp.errors import ConfigError, DataError
from gptddp.files import (
    exists,
    explain,
    may_pass,
    names_in,
    patiently,
    read_json,
    write_json_atomic,
)
from gptddp.flags import differences
from gptddp.run import summary
from gptddp.run.directory import (
    CHECKPOINTS,
    CONFIG,
    DATASET,
    FAULTS,
    FINISHED,
    LEDGER,
    id_of,
    log_generations,
    resolve,
    restore_config,
    saved_config,
)
from gptddp.run.history import (
    has_older_config,
    highest_generation,
    history,
    is_done,
    last_step,
    life_without_start,
    newest_line,
)
from gptddp.run.origin import Origin
from gptddp.run.quarantine import decided
from gptddp.run.summary import Summary
from gptddp.training.changes import changes, write_config
from gptddp.training.choose import Brought, of_this_run
from gptddp.training.first_state import (
    FirstState,
    check_continued,
    first_state,
    with_fields_of_folder,
)
from gptddp.training.go_back import go_back, tell_of_blow_up
from gptddp.training.quarantine import check
from gptddp.training.take_up import take_up

log = logging.getLogger(__name__)

Line = dict[str, Any]  # of the log
# No checkpoint is written, none is deleted, no error is counted where a file is in their place.
_FOLDERS = (FAULTS, f"{CHECKPOINTS}/{store.TMP}", f"{CHECKPOINTS}/{store.TRASH}")


def open_run(
    config: Config,
    dataset: Dataset,
    world: World,
    brought: Sequence[Brought],
    saving: Sequence[str | None],
    tell: Tell,
) -> tuple[Origin, Loaded | FirstState | None]:
    """Rank 0 only: resolve the configuration, choose the newest valid state, open a new generation.

    That is a checkpoint, the snapshot that one of the ranks has (`brought`, by rank), or what a run
    begins with. `saving`: the late saves in progress in the pods of this world, by rank. Whatever
    cannot be read is tried again for a while. Raises ConfigError when the run directory belongs to
    another configuration, DataError when it belongs to other data, CheckpointError when it has
    checkpoints and none is valid; OSError for trouble of the volume that may pass.
    """
    run = Path(config.run_dir)
    ledger, highest, lost, run_id = _known(run, tell)
    snapshots = of_this_run(brought, run_id)
    # a life on a full disk has left its traces in memory alone
    generation = 1 + max([highest, *(it[0] for it in snapshots.values())])
    given = config
    if generation == 1:
        config = patiently(lambda: with_fields_of_folder(given))
    config, before = patiently(lambda: resolve(config, world, generation > 1, ledger.config))
    if generation > 1:
        patiently(lambda: check_continued(given.init_from, before.init_from, config, dataset))
    check_world_size(config, world.world_size)
    patiently(lambda: check_data(run, dataset, config.on_bad))
    go_back(config, run_id, generation, ledger, snapshots, tell)
    taken = take_up(config, run_id, ledger, lost, snapshots, saving, world, tell)
    step, first = taken.step, None
    if taken.source == "scratch" and (config.init_from or config.init_sha256):
        first = patiently(lambda: first_state(config, dataset, tell))
        config, before = (replace(it, init_sha256=first.sha256) for it in (config, before))
    changed, quarantine = changes(before, config), _quarantine(ledger, step, dataset, run)
    _write_config(run, run_id, config if not changed else None, dataset, generation)
    redo, last_line, line = patiently(lambda: _in_history(run, ledger, step, tell))
    tell_of_blow_up(run, ledger, taken.source, last_line)
    origin = Origin(
        config=config,
        changes=changed,
        generation=generation,
        step=step,
        meta=taken.loaded.meta if taken.loaded else {},
        source=taken.source,
        redo=redo,
        last_line=last_line,
        line=line,
        run_id=run_id,
        parent=taken.parent,
        snapshot_rank=taken.snapshot_rank,
        late=taken.late,
        quarantine=quarantine,
    )
    return origin, taken.loaded or first


def _known(run: Path, tell: Tell) -> tuple[Summary, int, int, str]:
    """The ledger's sum, the highest generation so far, the newest life that has logged steps and
    that the ledger lacks, or 0, and the id: a new one of a new run.
    """
    tell("reading the ledger")
    patiently(lambda: _check_places(run))
    ledger = patiently(lambda: summary.read(run))
    if ledger.left_out:
        what = "; ".join(ledger.left_out)
        log.warning("%s: what cannot be used is left out: %s", run / LEDGER, what)
    tell("reading the configuration")
    patiently(lambda: restore_config(run, ledger.run_id, ledger.config, ledger.life))
    tell("looking for logs and checkpoints")
    highest = patiently(lambda: highest_generation(run, ledger))
    lost = patiently(lambda: life_without_start(run, ledger))
    if patiently(lambda: has_older_config(run, ledger)):
        _tell_of_older_config(run, ledger.config or {})
        ledger.config = None
    if lost or (highest and not ledger.life):
        has = f"ends with life {ledger.life}" if ledger.life else "has no start of a life"
        log.warning(
            "%s %s, and the run has had %d: put it back from a backup. Without "
            "it nobody knows which row groups were left out after the newest checkpoint, and which "
            "checkpoints there were",
            run / LEDGER,
            has,
            lost or highest,
        )
    return ledger, highest, lost, patiently(lambda: _id_of(run, known=highest > 0))


def _tell_of_older_config(run: Path, recorded: Mapping[str, Any]) -> None:
    """Say what the ledger has otherwise than config.json, which counts."""
    saved = patiently(lambda: saved_config(run)) or {}
    if what := [*differences(recorded, saved), *differences(recorded, saved, KEPT)]:
        text = "%s is damaged: its newest configuration is not that of %s, which counts: %s"
        log.warning(text, run / LEDGER, CONFIG, "; ".join(what))


def _check_places(run: Path) -> None:
    """Refuse what a life would find only when it writes; at its end it would wait for the disk."""
    for name, code, wrong in (
        (LEDGER, errno.ELOOP, Path.is_symlink),  # read, and never written: see Lines
        (FINISHED, errno.EISDIR, Path.is_dir),
        *((name, errno.ENOTDIR, _is_no_folder) for name in _FOLDERS),
    ):
        if wrong(run / name):
            raise OSError(code, os.strerror(code), str(run / name))


def _is_no_folder(path: Path) -> bool:
    """Is there anything in the place of a folder, as a file, or a link that leads nowhere?"""
    return path.name in names_in(path.parent) and not exists(path, stat.S_ISDIR)


def _id_of(run: Path, known: bool) -> str:
    """The run's id; a new one where there is no run. `known`: it has left something here."""
    if found := id_of(run):
        return found
    if known and not store.names(run):
        raise ConfigError(
            f"{run} has the log or the ledger of a run ({last_step(run)} steps), but neither its "
            f"{CONFIG} nor a checkpoint: put {CONFIG} back from a backup, or give another --run-dir"
        )
    if known and saved_config(run) is None:
        log.warning("%s is gone: the run goes on with the flags given now", run / CONFIG)
    return owner.run_id_of(run) or uuid.uuid4().hex


def _in_history(
    run: Path, ledger: Summary, step: int, tell: Tell
) -> tuple[int, Line | None, Line | None]:
    """How many steps are logged beyond this one; the newest line of all; the line of this step."""
    newest = newest_line(run)
    line = next(filter(is_done, history(run, step, step, tell)), None) if step else None
    # what lives had logged when the newest began its start says; its own log, what since
    done = ledger.finished["step"] if ledger.finished and ledger.is_finished else 0
    if not done:
        own = [it for it in log_generations(run) if it >= ledger.life]
        done = max(ledger.owners.redo_until, *(last_step(run, it) for it in own), 0)
    redo = max(done - step, 0)
    if redo and not step:
        log.warning("run %s has no checkpoint: the %d steps in its log are done again", run, redo)
    return redo, newest, line


def _write_config(
    run: Path, run_id: str, config: Config | None, dataset: Dataset, generation: int
) -> None:
    """Write down what this life runs with; a run that is not new goes on where that fails.

    config None: it has changes, which the ledger has first; see `Changes`.
    """
    new = generation == 1

    def write() -> None:
        if config:
            write_config(run, run_id, config, generation)
        if not exists(run / DATASET):
            data = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
            write_json_atomic(run / DATASET, data)

    try:
        patiently(write) if new else write()
    except OSError as error:
        if new and may_pass(error):
            raise
        if new:
            raise ConfigError(f"run {run} cannot be written: {explain(error)}") from error
        log.warning("the run goes on, but its directory cannot be written: %s", explain(error))


def _quarantine(ledger: Summary, step: int, dataset: Dataset, run: Path) -> dict[int, list[int]]:
    """What earlier lives decided beyond `step`: see run/quarantine.py."""
    again = [it for it in ledger.quarantine if it["step"] >= step]
    check(again, dataset, run / LEDGER)
    return decided(again, step)


def check_data(run: Path, dataset: Dataset, on_bad: str) -> None:
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
    if on_bad == "fail":
        dataset.check_whole()
