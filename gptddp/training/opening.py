"""Rank 0 opens a run at the beginning of a life: reads it, and decides how it continues."""

import errno
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptddp.checkpoint import known, retention, run_state, store
from gptddp.checkpoint.load import SavedState
from gptddp.config import Config, check_world_size
from gptddp.data import inventory
from gptddp.data.dataset import Dataset
from gptddp.distributed.connect import World
from gptddp.distributed.waiting import Tell
from gptddp.errors import CheckpointError, ConfigError, DataError, Finished
from gptddp.files import exists, patiently, read_json
from gptddp.flags import from_saved
from gptddp.run.directory import (
    CONFIG,
    DATASET,
    FINISHED,
    LEDGER,
    log_generations,
    log_path,
)
from gptddp.run.history import highest_generation, history, is_done, last_step, newest_lost_life
from gptddp.run.lines import Line
from gptddp.run.origin import Origin
from gptddp.run.summary import Summary, decided
from gptddp.training import results
from gptddp.training.changes import resolve
from gptddp.training.first_state import check_continued, first_state, with_fields_of_folder
from gptddp.training.go_back import go_back
from gptddp.training.quarantine import check

log = logging.getLogger(__name__)


def open_run(
    config: Config,
    dataset: Dataset,
    world: World,
    fence: Callable[[], None],
    tell: Tell,
) -> tuple[Origin, SavedState | None]:
    """Rank 0 only: resolve the configuration, choose the newest valid state, open a new generation.

    The state is a checkpoint, or the first state of a run. Failed reads are retried. Raises
    ConfigError when the run directory belongs to another configuration, DataError when it belongs
    to other data, CheckpointError when it has checkpoints and none is valid; OSError for trouble of
    the volume that may pass.
    """
    run = Path(config.run_dir)
    recorded, highest, lost = _recorded(config, tell)
    run_id = recorded.run_id or uuid.uuid4().hex
    generation = 1 + highest
    given, config = config, _configured(config, dataset, world, recorded)
    check_world_size(config, world.world_size)
    patiently(lambda: check_data(run, recorded.dataset, dataset, config.on_bad))
    go_back(given, config, run_id, generation, recorded, fence, tell)
    loaded, taken = _take_up(config, run_id, recorded, lost, world, tell)
    if taken["source"] == "scratch" and (config.init_from or config.init_sha256):
        loaded, sha256 = patiently(lambda: first_state(config, dataset, tell))
        config = replace(config, init_sha256=sha256)
    again = [it for it in recorded.quarantine if it["step"] >= taken["step"]]
    check(again, dataset, run / LEDGER)
    redo, line = patiently(lambda: _in_history(run, recorded, taken["step"], tell))
    origin = Origin(
        **taken,
        config=config,
        generation=generation,
        redo=redo,
        line=line,
        run_id=run_id,
        quarantine=decided(again, taken["step"]),
    )
    return origin, loaded


def _configured(config: Config, dataset: Dataset, world: World, recorded: Summary) -> Config:
    """The configuration of this life. Raises Finished, ConfigError."""
    if recorded.config is None:
        return resolve(patiently(lambda: with_fields_of_folder(config)), world, None)
    begun = from_saved(Path(config.run_dir) / LEDGER, recorded.config)
    if why := patiently(lambda: run_state.no_step_left(config, begun, recorded)):
        said = [why]
        with suppress(LookupError, TypeError, ValueError):  # foreign
            said += results.lines((recorded.finished or {})["results"])
        raise Finished("\n".join(said))
    closed = resolve(config, world, begun)
    patiently(lambda: check_continued(config.init_from, begun.init_from, closed, dataset))
    return closed


def _recorded(config: Config, tell: Tell) -> tuple[Summary, int, int]:
    """The summary of the ledger, the highest generation so far, and the newest life that has logged
    steps but is not in the ledger, or 0.
    """
    run = Path(config.run_dir)
    tell("reading the ledger")
    if patiently((run / LEDGER).is_symlink):  # it could be read, but not written: see Lines
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(run / LEDGER))
    recorded = patiently(lambda: run_state.read(run))
    if recorded.left_out:
        what = "; ".join(recorded.left_out)
        log.warning("%s: entries that cannot be used are skipped: %s", run / LEDGER, what)
    tell("looking for logs and checkpoints")
    highest = patiently(lambda: highest_generation(run, recorded))
    lost = patiently(lambda: newest_lost_life(run, recorded))
    if lost or (highest and not recorded.life):
        has = f"ends with life {recorded.life}" if recorded.life else "has no start of a life"
        log.warning(
            "%s %s, but the run is at life %d: put it back from a backup. Without "
            "it the row groups left out after the newest checkpoint are not known, and neither are "
            "the earlier checkpoints",
            run / LEDGER,
            has,
            lost or highest,
        )
    if recorded.config is None:
        patiently(lambda: _check_is_new(run, recorded, config.from_scratch))
    return recorded, highest, lost


def _check_is_new(run: Path, recorded: Summary, from_scratch: bool) -> None:
    """Refuse a folder that is no run, or that lacks a description of its run.

    A folder with damaged checkpoints is refused later, when they are loaded. Raises OSError.
    """
    with suppress(ValueError, AttributeError):  # torn, or no object
        if "splits" in (read_json(run / DATASET) or {}):
            raise ConfigError(f"{run} is a dataset, not a run: give another --run-dir")
        if "model_type" in (read_json(run / CONFIG) or {}):
            raise ConfigError(
                f"{run} is a model for transformers, not a run: begin a run with it in another "
                f"folder, by `gptddp train --init-from {run}`; `gptddp eval` accepts it as it is"
            )
    traces = [LEDGER] if recorded.bytes else []
    traces += [log_path(run, it).name for it in log_generations(run)[-1:]]
    traces += [it for it in (CONFIG, DATASET, FINISHED) if exists(run / it)]
    if not traces or store.names(run):
        return
    what = f"{run} has {', '.join(traces)} of a run ({last_step(run)} steps logged)"
    what += f", but neither a {LEDGER} with its configuration nor a checkpoint"
    if not from_scratch:
        raise CheckpointError(
            f"{what}: put one of them back from a backup, give --from-scratch to begin at step 0 "
            "again, or give another --run-dir"
        )
    log.warning("%s: it begins at step 0 again, as --from-scratch says", what)


def _take_up(
    config: Config, run_id: str, recorded: Summary, lost: int, world: World, tell: Tell
) -> tuple[SavedState | None, dict[str, Any]]:
    """Rank 0 only: the newest checkpoint, None if the run begins; and its fields for `Origin`.

    `lost`: the newest life that the ledger lacks because its end is lost; 0: none.
    Raises CheckpointError and OSError as `known.load` does.
    """
    run = Path(config.run_dir)
    tell("looking for the newest checkpoint")
    patiently(lambda: retention.discard_unfinished(run))
    anew = config.from_scratch and not _had_before(recorded, world)
    loaded = known.load(run, run_id, recorded, lost, anew, tell)
    name = loaded.name if loaded else None
    about = {"step": loaded.step if loaded else 0, "source": name or "scratch", "parent": name}
    return loaded, about


def _had_before(recorded: Summary, world: World) -> bool:
    """Has an earlier life of this start obeyed --from-scratch? Restarted pods keep their flags.

    A start is a job, or a command given by hand, with torchrun's own restarts.
    """
    if (it := recorded.from_scratch) is None:
        return False
    return it.get("job") == world.job if world.job else world.restarts > 0


def _in_history(run: Path, recorded: Summary, step: int, tell: Tell) -> tuple[int, Line | None]:
    """The number of steps logged after this one; the line of this step."""
    line = next(filter(is_done, history(run, step, step, tell)), None) if step else None
    # earlier lives: from the newest start; the newest life: from its own log
    done = recorded.finished["step"] if recorded.finished and recorded.is_finished else 0
    if not done:
        own = [it for it in log_generations(run) if it >= recorded.life]
        done = max(recorded.owners.redo_until, *(last_step(run, it) for it in own), 0)
    redo = max(done - step, 0)
    if redo and not step:
        log.warning("run %s has no checkpoint: the %d steps in its log are done again", run, redo)
    return redo, line


def check_data(run: Path, began: str | None, dataset: Dataset, on_bad: str) -> None:
    """Refuse other data than the run `began` with (their hash), naming every file that differs.

    dataset.json lists the files behind the hash. Raises OSError.
    """
    if began not in (None, dataset.sha256):
        lines: list[str] = []
        with suppress(ValueError, LookupError, TypeError, AttributeError):  # torn, or foreign
            there: Any = read_json(run / DATASET)
            if there["sha256"] == began:
                lines = inventory.changes(there["files"], inventory.files(dataset.manifest))
        raise DataError(
            f"{dataset.dir} is not the data that run {run} began with"
            f"{': ' if lines else ''}{inventory.listed(lines) if lines else ''}: "
            "put that data set back, or give another --run-dir"
        )
    if on_bad == "fail":
        dataset.check_whole()
