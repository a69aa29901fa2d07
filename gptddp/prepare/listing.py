"""Lists the files of the sources, with an identity that shows whether a file has changed."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptddp.data.dataset import is_dataset
from gptddp.errors import DataError
from gptddp.prepare.file_names import TABLES, kind_of, split_of
from gptddp.prepare.walk import show, unreadable, walk

PathLike = str | os.PathLike[str]
NAMED = 3  # number of files that a message names


@dataclass(frozen=True)
class SourceFile:
    """One file to read; `identity`: its name, size and time of change."""

    path: str
    kind: str  # text, jsonl, json or parquet
    compression: str | None
    bytes: int
    given: bool  # named on the command line, not found in a folder
    identity: str
    val: bool  # all of it is for validation


@dataclass
class Listing:
    """The files to read, and the paths that were skipped, by reason."""

    files: list[SourceFile] = field(default_factory=list)
    left_out: dict[str, dict[str, None]] = field(default_factory=dict)  # ordered sets

    def leave_out(self, reason: str, path: str) -> None:
        """Note a path that is not read."""
        self.left_out.setdefault(reason, {})[show(path)] = None

    def counts(self) -> dict[str, int]:
        """The number of skipped paths, by reason."""
        return {reason: len(paths) for reason, paths in self.left_out.items()}

    def notes(self) -> list[str]:
        """One line for the user per reason."""
        return [
            f"skipped, {why}: {len(paths)} ({', '.join([*paths][:NAMED])}"
            f"{', ...' * (len(paths) > NAMED)})"
            for why, paths in self.left_out.items()
        ]


def find(
    sources: Sequence[PathLike],
    val: Sequence[PathLike],
    include: Sequence[str],
    exclude: Sequence[str],
    out: Path,
) -> Listing:
    """The files of all sources, each once; raises DataError if there are none.

    Folders are read with their subfolders; hidden names, dataset cards, broken links, devices and
    the folder `out` are skipped. `include` keeps only matching files of a folder, `exclude` skips
    files and whole folders. A pattern with a slash is compared with the path below the source (`*`
    matches slashes too), any other pattern with the file name. Files of `val` are for validation,
    also if they are in one of `sources`.
    """
    # real paths, not inode numbers: some network file systems give two files the same number
    seen: set[str] = set()
    skip = os.path.realpath(out)
    exclude = [pattern.rstrip("/") for pattern in exclude]
    found = Listing()
    given = [(os.fspath(source), f"v{number}") for number, source in enumerate(val)]
    given += [(os.fspath(source), f"{number}") for number, source in enumerate(sources)]
    for root, label in given:
        status = _status(root, skip)
        if stat.S_ISDIR(status.st_mode):
            files = list(walk(root, include, exclude, skip, found.leave_out))
        else:
            files = [("", os.path.realpath(root), status)]
        files = [it for it in files if it[1] not in seen and not _is_table(root, it[0], found)]
        side_of = _sides([name for name, *_ in files], root, label[0] == "v", bool(val), found)
        for name, real_path, file_status in files:
            side = side_of[name]
            if side and real_path not in seen:  # several links may lead to it
                seen.add(real_path)
                found.files.append(_source_file(root, name, label, file_status, side == "val"))
    if not found.files:
        fix = "give text, .jsonl, .json or .parquet files, or a folder of them"
        if include or exclude:
            fix = "check the patterns of --include and --exclude"
        names = ", ".join(show(root) for root, _ in given)
        lost = ", ".join(f"{number} {why}" for why, number in found.counts().items())
        lost = f" (skipped: {lost})" if lost else ""
        raise DataError(f"{names}: no files to read{lost}; {fix}")
    return found


def _status(root: str, out: str) -> os.stat_result:
    """The status of a source; raises DataError if it cannot be a source."""
    shown = show(root)
    if Path(os.path.realpath(root)).is_relative_to(out):
        raise DataError(f"the source {shown} is inside --out: choose an --out without sources")
    try:
        status = os.stat(root)
        refused = is_dataset(Path(root))
    except OSError as error:
        raise DataError(f"cannot read {shown}: {error.strerror}; check the path") from None
    if refused:  # its manifest would be read as text, too
        raise DataError(
            f"the source {shown} is already a dataset, for `gptddp train --data`; to prepare its "
            f"documents again, give {shown}/train and {shown}/val"
        )
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        raise DataError(f"{shown} is neither a file nor a folder: save it as a file first")
    return status


def name_in(identity: str) -> str:
    """The file name in an identity, for a message."""
    return show(os.fsdecode(bytes.fromhex(identity.split(" ")[1])))


def check_unchanged(file: SourceFile) -> None:
    """Raise DataError if a file has changed since it was listed.

    Text that was read while the file changed may be neither the old nor the new text.
    """
    try:
        status = os.stat(file.path)
    except OSError as error:
        raise DataError(unreadable(file.path, error)) from error
    if not file.identity.endswith(_state(status)):
        raise changed(file, f"{file.bytes} -> {status.st_size} bytes")


def changed(file: SourceFile, how: str) -> DataError:
    """The error for a file that changes while the sources are read."""
    return DataError(
        f"{show(file.path)} has changed since the sources were listed ({how}): wait until nothing "
        "writes to it, or give a copy, then run the same command again"
    )


def _is_table(root: str, name: str, found: Listing) -> bool:
    """Must the file be converted first? In a folder it is skipped.

    Raises DataError if it is given by name.
    """
    what = TABLES.get(kind_of(name or root)[0])
    if what and not name:
        raise DataError(f"{show(root)} is {what}")
    if what:
        found.leave_out(what, os.path.join(root, name))
    return what is not None


def _sides(
    names: Sequence[str], root: str, for_val: bool, val_given: bool, found: Listing
) -> dict[str, str | None]:
    """The side of each file of a source: "train", "val", or None if it is skipped.

    Names decide only if some files are named train: without them, `test/` may be anything.
    """
    splits = {name: split_of(name or os.path.basename(root)) for name in names}
    if for_val or "train" not in splits.values():
        return dict.fromkeys(names, "val" if for_val else "train")
    sides: dict[str, str | None] = {}
    for name, split in splits.items():
        reason = "a test split" if split == "test" else None
        if split == "val" and val_given:
            reason = "a validation split, replaced by --val"
        if reason:
            found.leave_out(reason, os.path.join(root, name))
        sides[name] = None if reason else split or "train"
    return sides


def _source_file(root: str, name: str, label: str, status: os.stat_result, val: bool) -> SourceFile:
    kind, compression = kind_of(name or root)
    said = os.fsencode(name or os.path.basename(root)).hex()
    side = "v" if val and label[0] != "v" else ""
    return SourceFile(
        path=os.path.join(root, name) if name else root,
        kind=kind,
        compression=compression,
        bytes=status.st_size,
        given=not name,
        identity=f"{side}{label} {said}{_state(status)}",
        val=val,
    )


def _state(status: os.stat_result) -> str:
    """The end of an identity: it differs if the file has changed."""
    return f" {status.st_size} {status.st_mtime_ns}"
