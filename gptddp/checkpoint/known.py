"""Find checkpoints that the ledger has, but the run directory lacks.

A folder that is not mounted, moved away or not listed looks like the folder of a new run. But the
ledger has every commit. Retention deletes only checkpoints that are older than those it keeps: so
checkpoints are missing only if the newest commit is.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from gptddp.checkpoint import store
from gptddp.checkpoint.load import SavedState, load_newest
from gptddp.errors import CheckpointError
from gptddp.files import patiently
from gptddp.run.directory import CHECKPOINTS, LEDGER
from gptddp.run.summary import Summary

log = logging.getLogger(__name__)

RETRY_S = (0.5, 1.0, 2.0)  # between looks: a network file system may list a folder late


def load(
    run: Path,
    run_id: str,
    recorded: Summary,
    lost: int,
    from_scratch: bool,
    tell: Callable[[str], None] = lambda _: None,
) -> SavedState | None:
    """The newest valid checkpoint; None if the run never had one, or begins at step 0 again.

    `lost`: the newest life that the ledger lacks, with unknown commits; 0: none.
    `from_scratch`: the user allows the run to begin at step 0 again if all of its checkpoints are
    gone. Raises CheckpointError if they are gone without this, and all that `load_newest` raises.
    """
    for seconds in (*RETRY_S, 0.0):
        if not (gone := patiently(lambda: missing(run, run_id, recorded))):
            break
        time.sleep(seconds)
    loaded = load_newest(run, run_id, known=recorded.commits, branches=recorded.branches, tell=tell)
    if loaded is not None:
        if gone:
            log.warning(
                "%s lacks %s, which the ledger has: the run resumes from %s, step %d. To resume "
                "from the newest, stop the run and put it back before the run saves again",
                run / CHECKPOINTS,
                _listed(gone),
                loaded.name,
                loaded.step,
            )
        return loaded
    if not gone and lost:
        gone = [f"life {lost}, whose checkpoints {LEDGER} lacks"]
    if gone:
        root = run / CHECKPOINTS
        what = f"{root} has no checkpoint, but the run had {_listed(gone)}"
        if not from_scratch:
            raise CheckpointError(
                f"{what}: put {root} back (is its volume mounted, was it moved?), or give "
                "--from-scratch to begin at step 0 again. It counts once in a job: a job that had "
                "it before needs another --run-dir, or a submit with another --name"
            )
        log.warning("%s: the run begins at step 0 again, as --from-scratch says", what)
    return None


def missing(run: Path, run_id: str, recorded: Summary) -> list[str]:
    """The commits that are newer than all existing checkpoints, newest first.

    A checkpoint that was set aside as damaged exists; one replaced by another run's is missing.
    The ledger may lack the commits of newer checkpoints. Raises OSError.
    """
    there = {name.partition(".bad.")[0] for name in store.names(run, recorded.commits)}
    commits = sorted(recorded.commits, key=store.order, reverse=True)

    def is_gone(name: str) -> bool:
        return name not in there or store.is_foreign(run / CHECKPOINTS / name, run_id)

    gone = list(takewhile(is_gone, commits))
    newest = store.order(store.newest(run, run_id, recorded.commits)) if gone else (0, 0)
    return [name for name in gone if store.order(name) > newest]


def _listed(gone: Sequence[str]) -> str:
    return ", ".join(gone[:3]) + (f" and {len(gone) - 3} before" if len(gone) > 3 else "")
