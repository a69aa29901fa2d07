"""A pod that is stopped between two worlds saves its worker's snapshot as a checkpoint.

A stop is agreed by all ranks and ends with a checkpoint. But a job that is stopped while its world
forms again has no ranks, and its snapshots go with the pods.
"""

import logging
from contextlib import closing
from pathlib import Path

from gptddp.checkpoint import snapshot, store
from gptddp.checkpoint.writer import Writer
from gptddp.config import Config
from gptddp.distributed import lives
from gptddp.errors import Superseded
from gptddp.run.directory import CHECKPOINTS, id_of
from gptddp.run.history import RunLog, complete, read_ledger, void_generation
from gptddp.run.lease import is_theirs

log = logging.getLogger(__name__)


def rescue(config: Config, memory: Path) -> str | None:
    """Commit the snapshot in the folder `memory`, if it is the run's newest state; its new name.

    Any pod may do so, and all at once: the first makes the checkpoint. A snapshot that a later life
    has gone on from is not committed, nor one of ranks that differed. Raises OSError, and
    Superseded where the run is another job's, or goes on without this pod.
    """
    run = Path(config.run_dir)
    found = snapshot.read(snapshot.path_of(memory, run))
    newest = next(filter(store.is_candidate, store.names(run)), None)
    order = store.order(newest) if newest else None
    if (
        found is None
        or found.run_id != id_of(run)
        or (found.generation, found.step) <= (order or (0, 0))
        or found.generation <= void_generation(read_ledger(run))
    ):
        return None
    _check_lease(run)
    with closing(RunLog(run, found.generation)) as lines:
        complete(run, lines, found.lines, found.step)
        writer = Writer(
            run,
            found.generation,
            parent=newest,
            keep=config.keep,
            before_commit=lines.sync,
            fence=lambda: _check_lease(run),
            alone=False,
        )
        saved = writer.save(found.step, found.tensors, found.meta)
    if saved.error and not (run / CHECKPOINTS / saved.name).exists():
        log.warning("the state of step %d is not saved: %s", found.step, saved.error)
        return None
    return saved.name


def _check_lease(run: Path) -> None:
    if not is_theirs(run, lives.noted()):
        raise Superseded(f"a life that this pod was not in has run {run}, or had it last")
