"""The folder of a dataset while one process makes it: all of the dataset or nothing of it.

What a process needs to go on from where another was stopped is in the scratch folder, `.prepare`.
"""

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gptddp import __version__
from gptddp.data.dataset import FORMAT, MANIFEST, SCRATCH, SPLITS, VERSION
from gptddp.errors import DataError
from gptddp.files import FULL, exists, fsync, lock
from gptddp.prepare import bad_records, journal
from gptddp.prepare.walk import show

TOKENIZER_FILE = "tokenizer.json"
_OUTPUTS = (MANIFEST, TOKENIZER_FILE, bad_records.LIST, *SPLITS)  # all that a dataset consists of
_LOCK = ".prepare.lock"  # locked by the process that makes the dataset
_NOT_FOREIGN = {_LOCK, SCRATCH, "lost+found"}  # the root of a volume may have the last one


def check_apart(given: Sequence[str | os.PathLike[str]], out: Path) -> None:
    """Raise DataError where a source lies in the folder `out`."""
    for source in given:
        if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
            raise DataError(
                f"the source {show(os.fspath(source))} lies in the output {out}: "
                "choose an --out that holds no source"
            )


def is_made(out: Path) -> bool:
    """Is there a whole dataset in `out`? Raises DataError where the volume cannot say."""
    with _write_errors(out):
        return exists(out / MANIFEST)


@contextlib.contextmanager
def building(out: Path, resume: bool = False) -> Iterator[Path]:
    """Lock the folder `out`, made if need be, and yield a scratch folder in it.

    What a killed process left in `out` is removed first, but for the scratch folder with `resume`.
    All that is made in `out` is removed again if an error ends the `with` block, but for a scratch
    folder that another process can go on from. Raises DataError if another process makes a dataset
    in `out`, if it holds other files, or if it cannot be written.
    """
    with _write_errors(out), _folder(out):
        fd = _lock(out)
        try:
            yield from _scratch(out, resume)
        finally:
            try:  # where the volume cannot say, all is kept
                if exists(out / MANIFEST) or not _worth_keeping(out / SCRATCH):
                    _remove(out, [SCRATCH])
                _remove(out, [_LOCK])
            finally:
                os.close(fd)


def give_up(scratch: Path) -> None:
    """Keep nothing of the scratch folder when the block of `building` ends."""
    for name in (journal.NAME, bad_records.LIST):
        (scratch / name).unlink(missing_ok=True)


def _worth_keeping(scratch: Path) -> bool:
    return any(exists(scratch / name) for name in (journal.NAME, bad_records.LIST))


def commit(out: Path, scratch: Path, manifest: dict[str, Any]) -> None:
    """Write `dataset.json`, by rename, when all other files of the dataset are there."""
    head = {"format": FORMAT, "version": VERSION, "gptddp": __version__}
    path = scratch / MANIFEST
    text = json.dumps({**head, **manifest}, indent=1)
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text)  # a row group
    path.write_text(text + "\n", "utf-8")
    fsync(path)
    fsync(out)
    path.rename(out / MANIFEST)
    fsync(out)


def tidy(out: Path) -> None:
    """Remove what is left where a process was killed just after it had completed `out`."""
    if (out / SCRATCH).exists() or (out / _LOCK).exists():
        with contextlib.suppress(OSError, DataError):
            fd = _lock(out)
            try:
                _remove(out, [SCRATCH, _LOCK])
            finally:
                os.close(fd)


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Make the folder and its parents; remove them again if no dataset is there in the end."""
    made = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        if not os.path.exists(out / MANIFEST):
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _lock(out: Path) -> int:
    try:
        return lock(out / _LOCK)
    except BlockingIOError:
        raise DataError(
            f"another process is preparing {out}: wait for it, or choose another --out"
        ) from None


def _scratch(out: Path, resume: bool) -> Iterator[Path]:
    """The part of `building` under the lock."""
    if exists(out / MANIFEST):
        raise DataError(f"{out} has just been finished by another process: run this once more")
    scratch = out / SCRATCH
    if exists(scratch):
        _remove(out, _OUTPUTS)
        if not resume:
            give_up(scratch)  # first, so that nobody goes on from a part of it
            _remove(out, [SCRATCH])
    if foreign := sorted(set(os.listdir(out)) - _NOT_FOREIGN):
        names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise DataError(f"{out} holds other files ({names}): choose a new folder with --out")
    unfinished = True
    try:
        scratch.mkdir(exist_ok=True)
        yield scratch
        unfinished = False
    finally:
        if unfinished:
            _remove(out, _OUTPUTS)


def _remove(out: Path, names: Sequence[str]) -> None:
    """Remove files and folders of `out`, in this order: the scratch folder marks the others."""
    for name in names:
        path = out / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _write_errors(out: Path) -> Iterator[None]:
    """Turn an error of the file system into a DataError with the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (*FULL, errno.EFBIG):
            left = "Nothing was left behind"
            if (out / SCRATCH).exists():
                left = f"What was read is kept in {out / SCRATCH}: the same command goes on from it"
            raise DataError(
                f"no space left for {out} ({error.strerror}): preparing needs about one and a half "
                f"times the size of the text there; free some, or choose another --out. {left}"
            ) from error
        raise DataError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
