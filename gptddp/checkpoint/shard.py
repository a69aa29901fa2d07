"""The tensor bytes of a checkpoint: one file, with a hash of each chunk in the manifest."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from gptddp.distributed.pulse import beat
from gptddp.errors import Unusable
from gptddp.files import TRANSIENT, bypass_cache, write_all
from gptddp.run import progress

FILE = "shard-0-of-1.bin"
CHUNK_BYTES = 16 << 20  # hashed and written at once
# These errors prove damage: the file is missing, or not a file. Other errors prove nothing.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


@contextlib.contextmanager
def reading(path: Path, file: str) -> Iterator[None]:
    """Turn an OSError into Unusable, which has the flags `damaged` and `transient`."""
    try:
        yield
    except OSError as error:
        reason, code = f"{file}: {error.strerror}", error.errno
        raise Unusable(
            path, reason, damaged=code in _DAMAGE, transient=code in TRANSIENT
        ) from error


_KINDS = {"nbytes": int, "chunk_bytes": int, "xxh3_128": list}


def wrong(entry: Any, where: str) -> Iterator[str]:
    """Yield the invalid fields of an entry, each with the rule. Use only the first."""
    yield from progress.wrong(entry, _KINDS, where)
    if (file := entry.get("file")) != FILE:
        yield f"{where}.file is {file!r:.40}: it must be {FILE}"
    if (size := entry["chunk_bytes"]) < 1 or len(entry["xxh3_128"]) != -(-entry["nbytes"] // size):
        yield f"{where}.xxh3_128 must have one hash for each chunk of chunk_bytes"


def write(folder: Path, data: memoryview) -> dict[str, Any]:
    """Write the file durably; return its entry in the manifest."""
    hashes = []
    fd = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        bypass_cache(fd)
        for begin in range(0, len(data), CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            hashes.append(xxh3_128_hexdigest(chunk))
            write_all(fd, chunk)
        os.fsync(fd)
    finally:
        os.close(fd)  # NFS may report a failed write only here
    return {"file": FILE, "nbytes": len(data), "chunk_bytes": CHUNK_BYTES, "xxh3_128": hashes}


def read(
    path: Path,
    entry: Mapping[str, Any],
    buffer: memoryview | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Read every chunk into the buffer, or with None nowhere, and compare its hash.

    With None, durable pages are first dropped from the page cache, if the volume allows it, so that
    the device is read. `tell` gets how much was read. Raises Unusable.
    """
    chunk_bytes, nbytes = entry["chunk_bytes"], entry["nbytes"]
    with reading(path, entry["file"]), open(path / entry["file"], "rb") as file:
        if buffer is None:
            scratch = memoryview(bytearray(min(chunk_bytes, nbytes)))
            with contextlib.suppress(OSError):  # a file system without a page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for begin, expected in zip(range(0, nbytes, chunk_bytes), entry["xxh3_128"], strict=True):
            beat()  # a large file may take many minutes
            end = min(begin + chunk_bytes, nbytes)
            tell(f"reading {path.name}, {begin / 1e9:.2f} of {nbytes / 1e9:.2f} GB")
            into = scratch[: end - begin] if buffer is None else buffer[begin:end]
            if file.readinto(into) < len(into) or xxh3_128_hexdigest(into) != expected:
                reason = f"{entry['file']}: bytes {begin} to {end} do not match their hash"
                raise Unusable(path, reason)
