"""A folder that one process builds: all of it or nothing, whatever ends the building."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from gptddp.errors import DataError

SCRATCH = ".prepare"  # there from the first moment to the last: what stands beside it is unfinished
_LOCK = ".prepare.lock"  # held by the process that builds; freed by the kernel when it dies
_NOT_FOREIGN = {_LOCK, SCRATCH, "lost+found"}  # a volume's root may have the last one


@contextlib.contextmanager
def claim(out: Path, outputs: Sequence[str], last: str) -> Iterator[Path]:
    """Own the folder `out`, made if need be, and yield a scratch folder in it.

    `outputs` are the names that the block may create in `out`, and `last` the one whose presence
    means that it is complete. What a killed process left is removed first; if the block raises,
    everything that it made is removed. Raises DataError if `out` is in use or holds other files,
    OSError if it cannot be written.
    """
    with _folder(out, last):
        lock = _lock(out / _LOCK, out)
        try:
            yield from _build(out, outputs, last)
        finally:
            _remove(out, [SCRATCH, _LOCK])
            os.close(lock)


@contextlib.contextmanager
def _folder(out: Path, last: str) -> Iterator[None]:
    """Make the folder and its parents; take away what was made if it ends without `last`."""
    made = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        if not os.path.exists(out / last):
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _build(out: Path, outputs: Sequence[str], last: str) -> Iterator[Path]:
    """The part of `claim` under the lock."""
    if (out / last).exists():
        raise DataError(f"{out} has just been finished by another process: run this once more")
    scratch = out / SCRATCH
    if scratch.exists():
        _remove(out, [*outputs, SCRATCH])
    if foreign := sorted(set(os.listdir(out)) - _NOT_FOREIGN):
        names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise DataError(f"{out} holds other files ({names}): choose a new folder with --out")
    unfinished = True
    try:
        scratch.mkdir()
        yield scratch
        unfinished = False
    finally:
        if unfinished:
            _remove(out, outputs)


def tidy(out: Path) -> None:
    """Remove what is left if a process was killed just after it had completed `out`."""
    if (out / SCRATCH).exists() or (out / _LOCK).exists():
        with contextlib.suppress(OSError, DataError):
            lock = _lock(out / _LOCK, out)
            _remove(out, [SCRATCH, _LOCK])
            os.close(lock)


def _remove(out: Path, names: Sequence[str]) -> None:
    """Remove files and folders of `out`, in this order: the scratch folder marks the others."""
    for name in names:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _lock(path: Path, out: Path) -> int:
    """The descriptor of the locked file `path`."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise DataError(
                f"another process is preparing {out}: wait for it, or choose another --out"
            ) from None
        except OSError:
            return lock  # a file system without locks: two at once are then the user's care
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(lock)):
                return lock
        os.close(lock)  # the process that held it has removed it: lock the new one
