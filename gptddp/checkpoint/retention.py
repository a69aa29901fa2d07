"""List, verify, set aside and prune checkpoints. Knows files, not tensors."""

import contextlib
import logging
import math
import os
import shutil
import stat
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptddp.checkpoint import run_state, shard, store
from gptddp.errors import CheckpointError, Unusable
from gptddp.run.directory import CHECKPOINTS

log = logging.getLogger(__name__)


@dataclass
class Status:
    """The status of one checkpoint."""

    name: str
    step: int
    generation: int
    # verified (every byte), complete (manifest and sizes), invalid, foreign (another run's), or
    # quarantined (set aside)
    state: str = "invalid"
    reason: str = ""  # why it is invalid or foreign
    nbytes: int = 0  # of the tensors
    time: float = 0.0  # unix seconds of the save; 0: unknown
    skipped: int = 0  # non-finite steps in a row, up to this one

    @property
    def ok(self) -> bool:
        return self.state in ("verified", "complete")


def verify(path: Path, *, full: bool = True, run_id: str | None = None) -> Status:
    """Check one checkpoint: every byte, or with `full=False` its manifest and the file's size.

    `run_id`: of the run that would resume from it; None: check only the bytes.
    """
    generation, step = store.order(path.name)
    found = Status(path.name, step, generation)
    if not store.is_candidate(path.name):
        found.state = "quarantined"
        return found
    try:
        manifest = store.read_manifest(path)
        entry = manifest["shards"][0]
        found.nbytes, found.time = entry["nbytes"], manifest["time"]
        found.skipped = store.skipped(manifest)
        if reason := store.refused(manifest, run_id):
            found.state = "foreign" if store.of_another(manifest, run_id) else "invalid"
            found.reason = reason
            return found
        if full:
            shard.read(path, entry)
        found.state = "verified" if full else "complete"
    except Unusable as error:
        found.reason = error.reason
    except CheckpointError as error:
        found.reason = str(error)
    return found


def list_checkpoints(run_dir: str | Path, *, full: bool = False) -> list[Status]:
    """The status of each checkpoint of a run, newest first; `full` reads and hashes every byte."""
    root, run_id = Path(run_dir) / CHECKPOINTS, None
    with contextlib.suppress(OSError):  # the list is useful without the id
        run_id = run_state.read(run_dir).run_id
    return [verify(root / name, full=full, run_id=run_id) for name in store.names(run_dir)]


def set_aside(path: Path) -> None:
    """Rename a checkpoint to `<name>.bad.<n>`: it is never loaded again, and never deleted.

    If the directory cannot be written, log a warning instead.
    """
    number = 1
    while os.path.lexists(bad := path.with_name(f"{path.name}.bad.{number}")):
        number += 1
    try:
        os.rename(path, bad)
    except OSError as error:
        log.warning("cannot rename %s to .bad (%s): it is only skipped", path, error.strerror)


def prune(
    run_dir: str | Path, keep: int, *, keep_every: int = 0, run_id: str | None = None
) -> list[str]:
    """Delete checkpoints older than the `keep` newest verified ones; return the deleted names.

    Verified: every byte was read back after the write. The oldest of the kept ones is read now, to
    be sure that one of them can be loaded. Nothing newer is deleted, nor the first checkpoint in
    each `keep_every` steps (0: none). Checkpoints of other runs than `run_id` (None: all are
    accepted) do not count, and are not deleted.

    A checkpoint saved after a non-finite step does not count either: its weights may be spoilt. It
    is deleted once a newer one exists. So a run whose loss blew up keeps checkpoints from before.

    Safe beside other pruners, readers and the run's writer: a checkpoint first moves to `.trash`,
    so a half deleted one is never visible. Raises OSError.
    """
    root = Path(run_dir) / CHECKPOINTS
    names = list(filter(store.is_candidate, store.names(run_dir)))
    verified, newer, deleted = 0, False, []
    for name in names if len(names) > keep else ():
        if verified < keep:
            status = _read(root / name, verified == keep - 1, run_id)
            spoilt = status.ok and status.skipped > 0
            verified += status.ok and not spoilt
            if not (spoilt and newer):
                newer |= status.ok
                continue
        if _stays(root, name, names, keep_every, run_id):
            continue
        (root / store.TRASH).mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another pruner was faster
            os.rename(root / name, root / store.TRASH / f"{name}.{uuid.uuid4().hex}")
            deleted.append(name)
    _remove_inside(root / store.TRASH)
    return deleted


def _read(path: Path, full: bool, run_id: str | None) -> Status:
    """The status of a checkpoint; `full` reads every byte."""
    status = verify(path, full=full, run_id=run_id)
    if full and status.state == "invalid":
        log.warning("checkpoint %s is damaged, older ones are kept: %s", path.name, status.reason)
    return status


def _stays(root: Path, name: str, names: Sequence[str], every: int, run_id: str | None) -> bool:
    """Is it another run's, or the first in `every` steps? True also if that is unknown now.

    `names`: of all checkpoints, newest first; only as many of them are read as needed.
    """
    if store.is_foreign(root / name, run_id, unknown=True):
        return True
    if not every or not (period := store.order(name)[1] // every):
        return False
    for first in (it for it in reversed(names) if store.order(it)[1] // every == period):
        with contextlib.suppress(Unusable):
            manifest = store.unsealed(root / first)
            if store.skipped(manifest) or store.of_another(manifest, run_id):
                continue
        return first == name
    return False


def discard_unfinished(run_dir: str | Path, upto: float = math.inf) -> None:
    """Move unfinished checkpoints away from their writers, which then cannot name them.

    When a life begins, all of them are moved; on a full disk, only generations up to `upto`.
    `prune` removes the files. One rename moves a whole checkpoint: if the files were removed in
    place, the rest of them could still get its name.
    """
    root = Path(run_dir) / CHECKPOINTS
    with contextlib.suppress(OSError):
        for unfinished in _inside(root / store.TMP):
            if store.order(unfinished.rpartition(".")[0])[0] > upto:
                continue
            (root / store.TRASH).mkdir(exist_ok=True)
            with contextlib.suppress(OSError):  # move the others anyway
                os.rename(root / store.TMP / unfinished, root / store.TRASH / unfinished)


def _inside(directory: Path) -> list[str]:
    """The names in a directory; none for a link, whose target is not ours. Raises OSError."""
    return [] if stat.S_ISLNK(os.lstat(directory).st_mode) else os.listdir(directory)


def _remove_inside(directory: Path) -> None:
    """Remove a directory's entries; those that cannot be removed now (EBUSY, ESTALE) stay."""
    with contextlib.suppress(OSError):
        for name in _inside(directory):
            shutil.rmtree(directory / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(directory / name)  # was a file
