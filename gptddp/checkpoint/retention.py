"""Which checkpoints stay: list and verify, set aside, prune. Knows files, not tensors."""

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from gptddp.checkpoint import store
from gptddp.errors import CheckpointError, ConfigError, Unusable
from gptddp.run.directory import CHECKPOINTS
from gptddp.run.history import read_ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """What is known of one checkpoint."""

    name: str
    step: int
    generation: int
    # verified (every byte), complete (manifest and sizes), invalid, or quarantined (set aside)
    state: str
    reason: str  # why it is invalid, else empty
    nbytes: int  # of all shards; 0 where unknown
    time: float  # unix seconds of the save; 0 where unknown

    @property
    def ok(self) -> bool:
        return self.state in ("verified", "complete")


def verify(path: str | Path, *, full: bool = True) -> Status:
    """Check one checkpoint: every byte, or with `full=False` its manifest and file sizes."""
    path = Path(path)
    generation, step = store.order(path.name) or (0, 0)
    state, reason, nbytes, time = "invalid", "", 0, 0.0
    if not store.is_candidate(path.name):
        state = "quarantined"
    else:
        try:
            manifest = store.read_manifest(path)
            nbytes, time = sum(s["nbytes"] for s in manifest["shards"]), manifest["time"]
            if full:
                store.read_shards(path, manifest)
            state = "verified" if full else "complete"
        except Unusable as error:
            reason = error.reason
        except CheckpointError as error:
            reason = str(error)
    return Status(path.name, step, generation, state, reason, nbytes, time)


def list_checkpoints(run_dir: str | Path, *, full: bool = False) -> list[Status]:
    """The status of each checkpoint of a run, newest first; `full` reads and hashes every byte."""
    root = Path(run_dir) / CHECKPOINTS
    return [verify(root / name, full=full) for name in store.names(run_dir)]


def set_aside(path: Path) -> None:
    """Rename a checkpoint to `<name>.bad.<n>`: it is never loaded again, and never deleted.

    A directory that cannot be written is left as it is, with a warning.
    """
    number = 1
    while os.path.lexists(bad := path.with_name(f"{path.name}.bad.{number}")):
        number += 1
    try:
        os.rename(path, bad)
    except OSError as error:
        log.warning("cannot set %s aside (%s): it is skipped where it lies", path, error.strerror)


def prune(
    run_dir: str | Path, keep: int, *, full: bool = False, spare: Collection[str] = ()
) -> list[str]:
    """Delete what is older than the `keep` newest complete checkpoints; the names deleted.

    Invalid ones are not counted (with `full` every byte is read for that), so `keep` that can be
    loaded stay, and nothing newer than the newest of them is touched, nor are the names in
    `spare`. Safe beside other pruners, readers and the run's writer: a name first moves to
    `.trash`, so a half deleted checkpoint is never seen as one; a deletion that fails is tried
    again by the next call. Raises OSError.
    """
    assert keep >= 1
    root = Path(run_dir) / CHECKPOINTS
    complete, deleted = 0, []
    for name in filter(store.is_candidate, store.names(run_dir)):
        if complete < keep:
            complete += verify(root / name, full=full).ok
            continue
        if name in spare:
            continue
        (root / store.TRASH).mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another pruner was faster
            os.rename(root / name, root / store.TRASH / f"{name}.{uuid.uuid4().hex}")
            deleted.append(name)
    _remove_inside(root / store.TRASH)
    return deleted


def prune_by_hand(run_dir: Path, keep: int) -> list[str]:
    """`prune` as a user asks for it, beside a running job or not: only verified ones count.

    The checkpoint that the newest life began with stays too: it may be the parent of a save in
    flight. Raises ConfigError where nothing can be deleted.
    """
    begun = [event["source"] for event in read_ledger(run_dir) if "source" in event]
    try:
        return prune(run_dir, keep, full=True, spare=begun[-1:])
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be pruned: {error}") from error


def remove_stale(run_dir: str | Path, generation: int) -> None:
    """Remove the unfinished checkpoints of dead writers of this and older generations.

    For the only writer of the run, while it is not writing. Those of a newer generation stay:
    then the caller's generation is over.
    """
    building = Path(run_dir) / CHECKPOINTS / store.TMP
    _remove_inside(building, lambda name: _generation(name) <= generation)


def _generation(name: str) -> int:
    """The generation in `step-<step>.<generation>.<uuid>`; 0 for a name of another kind."""
    order = store.order(name.rpartition(".")[0])
    return order[0] if order else 0


def _remove_inside(directory: Path, selected: Callable[[str], bool] = lambda _name: True) -> None:
    """Remove a directory's entries; what cannot be removed now (EBUSY, ESTALE) stays for later."""
    if directory.is_symlink():  # what it leads to is none of ours
        return
    with contextlib.suppress(OSError):
        for name in filter(selected, os.listdir(directory)):
            shutil.rmtree(directory / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(directory / name)  # was a file
