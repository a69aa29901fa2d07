"""A pod that is stopped between two worlds: what its worker has left in memory goes to the storage.

A stop is agreed by all ranks and ends with a checkpoint, but for a job that is stopped while its
world forms again: there are no ranks, and the memory goes with the pods.
"""

import logging
from contextlib import closing
from pathlib import Path

from gptddp.checkpoint import snapshot, store
from gptddp.checkpoint.writer import Writer
from gptddp.config import Config
from gptddp.run.directory import id_of
from gptddp.run.history import RunLog, complete, read_ledger, void_generation

log = logging.getLogger(__name__)


def rescue(config: Config, folder: Path) -> str | None:
    """Commit the state left in `folder`, if it is the run's newest; the checkpoint's name if so.

    Any pod may do so, and all at once: the first makes the checkpoint. A state that a later life
    has gone on from is not committed, nor one that must not be trusted. Raises OSError.
    """
    run = Path(config.run_dir)
    left = snapshot.read(snapshot.path_of(folder, run))
    newest = next(filter(store.is_candidate, store.names(run)), None)
    order = store.order(newest) if newest else None
    if (
        left is None
        or left.run_id != id_of(run)
        or (left.generation, left.step) <= (order or (0, 0))
        or left.generation <= void_generation(read_ledger(run))
    ):
        return None
    with closing(RunLog(run, left.generation)) as lines:
        complete(run, lines, left.lines, left.step)
        writer = Writer(
            run, left.generation, parent=newest, keep=config.keep, before_commit=lines.sync,
            alone=False,
        )  # fmt: skip
        saved = writer.save(left.step, left.tensors, left.meta)
    if saved.error and not (run / store.CHECKPOINTS / saved.name).exists():
        log.warning("the state of step %d is not saved: %s", left.step, saved.error)
        return None
    return saved.name
