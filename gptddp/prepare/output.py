"""The output folder while one process makes a dataset: it gets the whole dataset or nothing.

The scratch folder `.prepare` has the data to continue after a process that was stopped.
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
from gptddp.prepare.reading import BAD
from gptddp.prepare.scratch import JOURNAL

TOKENIZER_FILE = "tokenizer.json"
_OUTPUTS = (MANIFEST, TOKENIZER_FILE, BAD, *SPLITS)  # everything that a dataset consists of
_LOCK = ".prepare.lock"  # locked by the process that makes the dataset
_NOT_FOREIGN = {_LOCK, SCRATCH, "lost+found"}  # the root of a volume may have lost+found


def is_made(out: Path) -> bool:
    """Does `out` hold a whole dataset? Raises DataError if the volume does not answer.

    If a process was killed just after it had completed `out`, its remains are removed.
    """
    with _write_errors(out):
        made = exists(out / MANIFEST)
        if made and (exists(out / SCRATCH) or exists(out / _LOCK)):
            with contextlib.suppress(DataError), building(out):
                pass
    return made


@contextlib.contextmanager
def building(out: Path) -> Iterator[Path]:
    """Make and lock the folder `out`, and yield the scratch folder in it.

    If an error ends the `with` block, everything made in `out` is removed, except a scratch folder
    from which another process can continue. Raises DataError if another process makes a dataset in
    `out`, if it holds other files, or if it cannot be written.
    """
    scratch = out / SCRATCH
    with _write_errors(out), _folder(out), _locked(out):
        try:
            if exists(out / MANIFEST):
                raise DataError(f"another process has just finished {out}: run this command again")
            if exists(scratch):  # from a process that was killed
                _remove(out, _OUTPUTS)
            if foreign := sorted(set(os.listdir(out)) - _NOT_FOREIGN):
                names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
                raise DataError(
                    f"{out} holds other files ({names}): choose a new folder with --out"
                )
            scratch.mkdir(exist_ok=True)
            try:
                yield scratch
            except BaseException:
                _remove(out, _OUTPUTS)
                raise
        finally:  # if the volume does not answer, everything is kept
            keep = exists(scratch / JOURNAL) or exists(scratch / BAD)
            if exists(out / MANIFEST) or not keep:
                _remove(out, [SCRATCH])


def give_up(scratch: Path) -> None:
    """Make `building` remove the scratch folder when its block ends."""
    for name in (JOURNAL, BAD):
        (scratch / name).unlink(missing_ok=True)


def commit(out: Path, scratch: Path, manifest: dict[str, Any]) -> None:
    """Write `dataset.json` by rename; all other files of the dataset must be complete."""
    head = {"format": FORMAT, "version": VERSION, "gptddp": __version__}
    path = scratch / MANIFEST
    text = json.dumps({**head, **manifest}, indent=1)
    text = re.sub(r"\[\s+(\d+),\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2, \3]", text)  # row group: 1 line
    path.write_text(text + "\n", "utf-8")
    fsync(path)
    fsync(out)
    path.rename(out / MANIFEST)
    fsync(out)


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Make the folder and its parents; remove them again if no dataset is made."""
    made = [folder for folder in (out, *out.parents) if not os.path.exists(folder)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        if not os.path.exists(out / MANIFEST):
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        fd = lock(out / _LOCK)
    except BlockingIOError:
        raise DataError(
            f"another process is preparing {out}: wait for it, or choose another --out"
        ) from None
    try:
        yield
    finally:
        try:
            _remove(out, [_LOCK])
        finally:
            os.close(fd)


def _remove(out: Path, names: Sequence[str]) -> None:
    """Remove files and folders of `out`, in the given order."""
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
            kept = "No files were kept"
            if (out / SCRATCH).exists():
                kept = f"Progress is kept in {out / SCRATCH}: the same command continues from it"
            raise DataError(
                f"no space left for {out} ({error.strerror}): preparing needs about 1.5 times the "
                f"size of the text there; free some space, or choose another --out. {kept}"
            ) from error
        raise DataError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
