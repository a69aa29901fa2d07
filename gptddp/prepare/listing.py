"""Which files the sources have, and a hash to tell whether any of them has changed."""

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gptddp.errors import DataError

_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_JSONL = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class SourceFile:
    """One file to read; `identity`: its name, size and time of change."""

    path: str
    kind: str  # "text", "jsonl" or "parquet"
    compression: str | None
    bytes: int
    given: bool  # named on the command line, not found in a folder
    identity: str


def find(
    sources: Sequence[str | os.PathLike[str]],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    skip: str | os.PathLike[str] | None = None,
) -> list[SourceFile]:
    """The files of all sources, each once; raises DataError for a source that is not there.

    Folders are read with their subfolders; hidden names, broken links, devices and the folder
    `skip` are passed over. `include` keeps only matching files of a folder, `exclude` leaves out
    files and whole folders. A pattern with a slash is compared with the path below the source
    (`*` takes slashes too), any other with the name alone.
    """
    # real paths, not inode numbers: some network file systems give two files the same number
    seen = set() if skip is None else {os.path.realpath(skip)}
    found: list[SourceFile] = []
    for number, source in enumerate(sources):
        root = os.fspath(source)
        try:
            status = os.stat(root)
        except OSError as error:
            raise DataError(f"cannot read {show(root)}: {error.strerror}; check the path") from None
        if stat.S_ISDIR(status.st_mode):
            names = _walk(root, include, [p.rstrip("/") for p in exclude], seen)
        elif stat.S_ISREG(status.st_mode):
            names = iter([("", status)] if _enter(os.path.realpath(root), seen) else [])
        else:
            raise DataError(f"{show(root)} is neither a file nor a folder: save it as a file first")
        for name, file_status in names:
            found.append(_source_file(root, name, number, file_status))
    return found


def sha256(files: Sequence[SourceFile]) -> str:
    """Hex hash of the names, sizes and times of change of all files."""
    lines = sorted(file.identity for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def show(path: str) -> str:
    """A path for a message, also where its bytes are not UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def _enter(real_path: str, seen: set[str]) -> bool:
    """Note the path; False if it has been seen before."""
    new = real_path not in seen
    seen.add(real_path)
    return new


def _walk(
    root: str, include: Sequence[str], exclude: Sequence[str], seen: set[str]
) -> Iterator[tuple[str, os.stat_result]]:
    """Names below root of the files to read; links are followed, but no folder is entered twice."""
    pending = [""]
    while pending:
        folder = pending.pop()
        path = os.path.join(root, folder)
        real_path = os.path.realpath(path)
        if not _enter(real_path, seen):
            continue
        try:
            entries = sorted(os.listdir(path), key=os.fsencode)
        except OSError as error:
            raise DataError(unreadable(path, error)) from None
        for entry in entries:
            name = os.path.join(folder, entry)
            if entry.startswith(".") or _matches(name, exclude):
                continue
            try:
                status = os.stat(os.path.join(root, name))
            except OSError:  # a broken link, or a file that has just gone
                continue
            if stat.S_ISDIR(status.st_mode):
                pending.append(name)
            elif not stat.S_ISREG(status.st_mode) or (include and not _matches(name, include)):
                continue
            elif _enter(os.path.join(real_path, entry), seen):
                yield name, status


def _matches(name: str, patterns: Sequence[str]) -> bool:
    base = os.path.basename(name)
    return any(fnmatchcase(name if "/" in pattern else base, pattern) for pattern in patterns)


def _source_file(root: str, name: str, number: int, status: os.stat_result) -> SourceFile:
    stem, suffix = os.path.splitext((name or root).lower())
    compression = _COMPRESSION.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    label = os.fsencode(name or os.path.basename(root)).hex()
    lines = suffix in _JSONL or (suffix == ".json" and compression is not None)
    parquet = suffix == ".parquet" and compression is None
    return SourceFile(
        path=os.path.join(root, name) if name else root,
        kind="parquet" if parquet else "jsonl" if lines else "text",
        compression=compression,
        bytes=status.st_size,
        given=not name,
        identity=f"{number} {label} {status.st_size} {status.st_mtime_ns}",
    )


def unreadable(path: str, error: Exception) -> str:
    """The message for a source that fails while it is read."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error)
    return f"cannot read {show(path)}: {reason}; mend it, or leave it out with --exclude"
