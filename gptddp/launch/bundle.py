"""Own code in one file: a gzipped tar of plain files, named by the hash of their contents.

One archive replaces many files: paths with folders cannot be keys of a ConfigMap, and the archive
has a quarter of the size. The hash is over paths, contents and executable bits, not over the
archive: another zlib packs the same files into other bytes. gzip and tarfile are imported where
they are used: a job without own code does not need them.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tarfile import TarFile, TarInfo

MOST_BYTES = 64 << 20  # of all files: code, not data
OPTION = "--code"  # of the launcher, before the trainer's options: the archive, named by its hash
SUFFIX = ".tar.gz"


@dataclass(frozen=True)
class File:
    """One file of own code."""

    data: bytes
    executable: bool = False


Files = Mapping[str, File]  # by path with slashes, relative to the folder


def split(args: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The archive at the begin of a launcher's arguments, if any, and the trainer's arguments."""
    if list(args[:1]) == [OPTION] and len(args) > 1:
        return Path(args[1]), list(args[2:])
    return None, list(args)


def names(archive: str, parts: int) -> list[str]:
    """The names of an archive's files: its name, or one name for each part, in order."""
    return [f"{archive}.{part:02}" for part in range(parts)] if parts > 1 else [archive]


def read(archive: Path) -> bytes:
    """The archive, or its parts joined, if they exist in its place. Raises OSError."""
    parts = sorted(archive.parent.glob(f"{archive.name}.[0-9][0-9]"))
    return b"".join(it.read_bytes() for it in parts or [archive])


def sha256(files: Files) -> str:
    """The hash of the files (64 hex digits), independent of their order."""
    total = hashlib.sha256()
    for path, file in sorted(files.items()):
        name = path.encode()
        total.update(b"%d %d %d " % (len(name), file.executable, len(file.data)))
        total.update(name + file.data)
    return total.hexdigest()


def pack(files: Files) -> bytes:
    """The archive: the same bytes for the same files, without times, owners and order."""
    import gzip
    import io
    import tarfile

    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, file in sorted(files.items()):
            head = tarfile.TarInfo(path)
            head.size, head.mode = len(file.data), 0o755 if file.executable else 0o644
            tar.addfile(head, io.BytesIO(file.data))
    packed = bytearray(gzip.compress(raw.getvalue(), mtime=0))
    packed[9] = 255  # the system that packed it: Python 3.13 and 3.12 write different values
    return bytes(packed)


def unpack(archive: bytes) -> dict[str, File]:
    """The files of an archive. Raises ValueError for an archive that `pack` cannot have written."""
    import gzip
    import io
    import tarfile
    import zlib

    try:
        raw = gzip.GzipFile(fileobj=io.BytesIO(archive)).read(2 * MOST_BYTES + 1)
        if len(raw) > 2 * MOST_BYTES:
            raise ValueError(f"it holds more than {MOST_BYTES >> 20} MiB")
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
            return {head.name: _file(tar, head) for head in tar}
    except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
        raise ValueError(f"it is no gzipped tar ({error})") from None


def _file(tar: "TarFile", head: "TarInfo") -> File:
    inside = all(part not in ("", ".", "..") for part in head.name.split("/"))
    content = tar.extractfile(head) if head.isreg() and inside else None
    if content is None:
        raise ValueError(f"{head.name!r} is no plain file inside a folder")
    return File(content.read(), bool(head.mode & 0o100))


def changes(old: Files, new: Files) -> list[str]:
    """The paths of the changed, removed and added files, in order."""
    return sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
