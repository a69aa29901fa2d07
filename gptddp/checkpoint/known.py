"""Checkpoints that the ledger knows, and the run directory lacks.

A folder that is not mounted, moved away or not listed looks like that of a new run. But the ledger
has every commit. What retention deletes is older than what it keeps: only where the newest commit
is missing, something is.
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
    """The newest valid checkpoint; None where the run has never had one, or begins anew.

    `lost`: the newest life that the ledger lacks, whose commits nobody knows; 0: none.
    `from_scratch`: the user means it that the run begins at step 0 again, where none of its
    checkpoints is left. Raises CheckpointError where that is not said, and what `load_newest` does.
    """
    for seconds in (*RETRY_S, 0.0):
        if not (gone := patiently(lambda: missing(run, run_id, recorded))):
            break
        time.sleep(seconds)
    loaded = load_newest(run, run_id, known=recorded.commits, branches=recorded.branches, tell=tell)
    if loaded is not None:
        if gone:
            log.warning(
                "%s lacks %s, which the run has had: it goes on from %s, step %d. To go on from "
                "the newest, stop the run and put it back before another checkpoint is written",
                run / CHECKPOINTS,
                _listed(gone),
                loaded.name,
                loaded.step,
            )
        return loaded
    if not gone and lost:
        gone = [f"life {lost}, whose checkpoints {LEDGER} does not know"]
    if gone:
        root = run / CHECKPOINTS
        what = f"{root} has no checkpoint, but the run has had {_listed(gone)}"
        if not from_scratch:
            raise CheckpointError(
                f"{what}: put {root} back (is its volume mounted, was it moved?), or give "
                "--from-scratch to begin at step 0 again. It counts once in a job: give one that "
                "has had it another --run-dir, or submit it with another --name"
            )
        log.warning("%s: it begins at step 0 again, as --from-scratch says", what)
    return None


def missing(run: Path, run_id: str, recorded: Summary) -> list[str]:
    """The commits that are newer than any that is there, newest first.

    One that has been set aside as damaged is there; one with another run's in its place is missing.
    The ledger may have lost the commits of newer ones. Raises OSError.
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
