"""Whose checkpoint is it? Of this run, or of another one whose files have come into its directory.

Another run of the same data and seed has checkpoints that fit in all else: a restore from the wrong
backup would go on from them without a word. So each says the id of its run, and nobody takes up,
counts or deletes one of another. It is left as it is: it may be the ledger that is the other's.
"""

from collections.abc import Callable, Collection
from pathlib import Path

from gptddp.checkpoint import store
from gptddp.errors import Unusable
from gptddp.files import patiently
from gptddp.run.directory import CHECKPOINTS


def is_foreign(path: Path, run_id: str | None, unknown: bool = False) -> bool:
    """Is this checkpoint another run's? A damaged one, which cannot say, counts as the run's own.

    `unknown`: what is returned where that cannot be told just now.
    """
    try:
        return _is_foreign(path, run_id)
    except Unusable:
        return unknown


def _is_foreign(path: Path, run_id: str | None) -> bool:
    """The same; raises Unusable where it cannot be told just now."""
    try:
        return run_id is not None and store.is_foreign(store.unsealed(path), run_id)
    except Unusable as unusable:
        if unusable.transient:
            raise
        return False


def newest(
    run_dir: str | Path,
    run_id: str | None,
    foreign: Callable[[str], object] = lambda _: None,
    known: Collection[str] = (),
) -> str | None:
    """The name of this run's newest checkpoint that is not set aside. Raises OSError, as `names`.

    One that cannot be read, however often it is tried, counts by its name. `foreign` is told the
    name of each newer one that is another run's. `known`: as in `names`.
    """
    for name in filter(store.is_candidate, store.names(run_dir, known)):
        path = Path(run_dir) / CHECKPOINTS / name
        try:
            if patiently(lambda path=path: _is_foreign(path, run_id)):  # type: ignore[misc]
                foreign(name)
                continue
        except Unusable:
            pass
        return name
    return None
