"""Walks a folder that is given as a source, and skips files that are no training text."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from gptddp.data.dataset import is_dataset
from gptddp.errors import DataError, visible
from gptddp.prepare.file_names import is_about

LeaveOut = Callable[[str, str], None]  # (the reason in words, the path)


def show(path: str) -> str:
    """A path for a message, in one line, also if its bytes are not UTF-8."""
    return visible(as_utf8(path))


def as_utf8(path: str) -> str:
    """A path for a UTF-8 file."""
    return os.fsencode(path).decode("utf-8", "replace")


def unreadable(path: str, error: Exception) -> str:
    """The message for a source that cannot be read."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"cannot read {show(path)}: {reason}; mend it, or skip it with --exclude"


def walk(
    root: str,
    include: Sequence[str],
    exclude: Sequence[str],
    skip: str,
    leave_out: LeaveOut,
) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield (name below root, real path, status) of each file to read.

    `skip`: real path of a folder to skip. Links are followed, but no folder is entered twice.
    Raises DataError for a folder that cannot be read.
    """
    entered = {skip}
    pending = [""]
    while pending:
        folder = pending.pop()
        path = os.path.join(root, folder)
        real_path = os.path.realpath(path)
        if real_path in entered:
            continue
        entered.add(real_path)
        below, real_below = os.path.join(folder, ""), os.path.join(real_path, "")
        for item in _entries(path, leave_out):
            entry, full = item.name, item.path
            name = below + entry
            if _matches(name, exclude):
                continue
            status = _status(full, leave_out)
            if status is None:
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append(name)
            elif include and not _matches(name, include):
                continue
            elif not stat.S_ISREG(status.st_mode):  # reading a pipe would block
                leave_out("neither a file nor a folder", full)
            elif is_about(entry) and entry not in include:
                leave_out("about a dataset or a program", full)
            else:
                real = os.path.realpath(full) if item.is_symlink() else real_below + entry
                yield name, real, status


def _status(path: str, leave_out: LeaveOut) -> os.stat_result | None:
    """The status of a file or folder; None if it is no source. Raises DataError."""
    try:
        status = os.stat(path)
        # a dataset may be made from these very sources, and has its own splits
        if not (stat.S_ISDIR(status.st_mode) and is_dataset(Path(path))):
            return status
        leave_out("a dataset made before", path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise DataError(unreadable(path, error)) from None
        leave_out("a broken link", path)  # or a file that was just removed
    return None


def _entries(path: str, leave_out: LeaveOut) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted bytewise by name, without hidden ones."""
    try:
        with os.scandir(path) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise DataError(unreadable(path, error)) from None
    for entry in entries:
        if entry.name.startswith("."):
            leave_out("hidden", entry.path)
    entries = [entry for entry in entries if not entry.name.startswith(".")]
    if {"blobs", "snapshots"} <= {entry.name for entry in entries}:  # links to nameless files
        raise DataError(f"{show(path)} is a cache of downloads: give a folder of its snapshots/")
    return entries


def _matches(name: str, patterns: Sequence[str]) -> bool:
    base = os.path.basename(name)
    return any(fnmatchcase(name if "/" in pattern else base, pattern) for pattern in patterns)
