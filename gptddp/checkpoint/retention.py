"""Which checkpoints stay: list and verify, set aside, prune. Knows files, not tensors."""

import contextlib
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptddp.checkpoint import store
from gptddp.errors import CheckpointError, ConfigError, Unusable
from gptddp.run import summary
from gptddp.run.directory import CHECKPOINTS

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
    read_back: bool  # was every byte read when it was written?

    @property
    def ok(self) -> bool:
        return self.state in ("verified", "complete")


def verify(path: str | Path, *, full: bool = True) -> Status:
    """Check one checkpoint: every byte, or with `full=False` its manifest and file sizes."""
    path = Path(path)
    generation, step = store.order(path.name) or (0, 0)
    state, reason, nbytes, time, read_back = "invalid", "", 0, 0.0, False
    if not store.is_candidate(path.name):
        state = "quarantined"
    else:
        try:
            manifest = store.read_manifest(path)
            nbytes, time = sum(s["nbytes"] for s in manifest["shards"]), manifest["time"]
            read_back = bool(manifest.get("verified"))
            if full:
                store.read_shards(path, manifest)
            state = "verified" if full else "complete"
        except Unusable as error:
            reason = error.reason
        except CheckpointError as error:
            reason = str(error)
    return Status(path.name, step, generation, state, reason, nbytes, time, read_back)


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
    run_dir: str | Path,
    keep: int,
    *,
    keep_every: int = 0,
    full: bool = False,
    spare: Collection[str] = (),
) -> list[str]:
    """Delete what is older than the `keep` newest verified checkpoints; the names deleted.

    Verified: every byte was read back when it was written. The oldest of them is read again now,
    so that one stays that can be loaded whatever has happened since; with `full` all are. What was
    never read back is read now too. None of these is deleted, nothing newer than the oldest of
    them, the first one of each `keep_every` steps (0: none), and the names in `spare`. Safe beside
    other pruners, readers and the run's writer: a name first moves to `.trash`, so a half deleted
    checkpoint is never seen as one; a deletion that fails is tried again by the next call. Raises
    OSError.
    """
    assert keep >= 1
    root = Path(run_dir) / CHECKPOINTS
    names = list(filter(store.is_candidate, store.names(run_dir)))
    stay = {*spare, *_milestones(names, keep_every)}
    verified, deleted = 0, []
    for i, name in enumerate(names):
        if verified < keep:
            if stay.issuperset(names[i + keep - verified :]):
                break  # nothing to delete: nothing to read
            verified += _counts(root / name, full or verified == keep - 1)
            continue
        if name in stay:
            continue
        (root / store.TRASH).mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # another pruner was faster
            os.rename(root / name, root / store.TRASH / f"{name}.{uuid.uuid4().hex}")
            deleted.append(name)
    _remove_inside(root / store.TRASH)
    return deleted


def _milestones(names: Sequence[str], every: int) -> set[str]:
    """The oldest of these checkpoints in each so many steps, but of the first so many."""
    first: dict[int, str] = {}
    for name in reversed(names if every else []):
        _, step = store.order(name) or (0, 0)
        first.setdefault(step // every, name)
    return {name for number, name in first.items() if number}


def _counts(path: Path, full: bool) -> bool:
    """Is it good? Reads every byte with `full`, and where that was never done."""
    status = verify(path, full=full)
    if status.state == "complete" and not status.read_back:
        status, full = verify(path), True
    if full and not status.ok:
        log.warning("checkpoint %s is damaged, and older ones stay: %s", path.name, status.reason)
    return status.ok


def prune_by_hand(run_dir: Path, keep: int, keep_every: int = 0) -> list[str]:
    """`prune` as a user asks for it, beside a running job or not: all that count are read.

    The checkpoint that the newest life began with stays too: it may be the parent of a save in
    flight. Raises ConfigError where nothing can be deleted.
    """
    try:
        begun = summary.read(run_dir).source or ""
        return prune(run_dir, keep, keep_every=keep_every, full=True, spare=[begun])
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be pruned: {error}") from error


def remove_stale(run_dir: str | Path, generation: int, spare: Collection[str] = ()) -> None:
    """Remove the unfinished checkpoints of dead writers of this and older generations.

    For the run's writer, while it is not writing. Those of a newer generation stay: then the
    caller's generation is over. `spare`: checkpoints that another process writes.
    """
    root = Path(run_dir) / CHECKPOINTS
    _remove_inside(root / store.TMP, lambda name: _is_stale(name, generation, spare))
    _remove_inside(root / store.TRASH)


def fence(run_dir: str | Path, spare: Collection[str] = ()) -> None:
    """When a life begins: no unfinished checkpoint of older lives gets a name any more.

    But those in `spare`. Whoever is writing one, cut off or stopped, finds it gone. A rename takes
    no time; `remove_stale` removes the files.
    """
    root = Path(run_dir) / CHECKPOINTS
    with contextlib.suppress(OSError):
        for name in os.listdir(root / store.TMP):
            if name.startswith("step-") and not _is_one_of(name, spare):
                (root / store.TRASH).mkdir(exist_ok=True)
                os.rename(root / store.TMP / name, root / store.TRASH / name)


def _is_stale(name: str, generation: int, spare: Collection[str]) -> bool:
    return _generation(name) <= generation and not _is_one_of(name, spare)


def _is_one_of(name: str, spare: Collection[str]) -> bool:
    """Is this unfinished checkpoint one of these?"""
    return name.rpartition(".")[0] in spare


def _generation(name: str) -> int:
    """The generation in `step-<step>.<generation>.<uuid>`; 0 for a name of another kind."""
    order = store.order(name.rpartition(".")[0])
    return order[0] if order else 0


def _remove_inside(directory: Path, selected: Callable[[str], bool] = lambda _name: True) -> None:
    """Remove a directory's entries; what cannot be removed now (EBUSY, ESTALE) stays for later."""
    with contextlib.suppress(OSError):
        if stat.S_ISLNK(os.lstat(directory).st_mode):  # what it leads to is none of ours
            return
        for name in filter(selected, os.listdir(directory)):
            shutil.rmtree(directory / name, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(directory / name)  # was a file
