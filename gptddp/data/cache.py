"""Packed row groups on the pod's own disk: a restart or the next epoch need not tokenise again.

A file holds the packed rows of one row group, before they are shuffled, so lanes, epochs, seeds
and the processes of a pod share it. Its name is a hash of all that determines the rows: dataset,
tokenizer and its library, packing, row length, row group; and the size and mtime of the parquet
file, so that a changed file is read and checked again. Its content is a hash and the rows:

    16 bytes         xxh3_128 of the name and of the rest
    n * (T+1) * w    tokens, little-endian, w = 2 or 4 bytes
    n * ceil(T/8)    one bit per target: is it valid?

A file appears by rename. A file that does not match its hash is removed and built again. Training
never needs the cache: after an error of the disk it warns, and caches no more.
"""

import contextlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from gptddp.data.packing import Packed

log = logging.getLogger(__name__)

LIMIT_BYTES = 1 << 30  # ten blocks of a million tokens for each of 48 lanes
_HASH_BYTES = 16
_ROWS, _UNFINISHED = ".rows", ".tmp"
_STALE_S = 600.0  # an unfinished file this old belongs to a process that was killed


def open_cache(folder: str) -> "Cache | None":
    """The cache in a subfolder of `folder`; "auto" is TMPDIR; None for "none".

    Also None, with a warning, if the folder cannot be made or other users could write to it.
    """
    if folder == "none":
        return None
    parent = tempfile.gettempdir() if folder == "auto" else folder
    path = Path(parent) / f"gptddp-rows-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(None, "not a folder that only this user can write to")
        return Cache(path, min(LIMIT_BYTES, shutil.disk_usage(path).free // 4))
    except OSError as error:
        log.warning("no cache of packed rows in %s: %s", path, error.strerror)
        return None


class Cache:
    """Packed rows by identity, in one folder; threads and processes may share it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Beyond `limit_bytes` in total, the least recently used files are removed."""
        self.folder, self.limit_bytes = folder, limit_bytes
        self._writable = True
        self._lock = threading.Lock()
        self._written_bytes = limit_bytes  # since the last _evict: the first `put` calls it

    def get(self, identity: Sequence[object], seq_len: int, dtype: npt.DTypeLike) -> Packed | None:
        """The rows that were stored under this identity, or None."""
        name = _name(identity)
        path = self.folder / (name + _ROWS)
        try:
            content = path.read_bytes()
            rows = _decoded(content, name, seq_len, np.dtype(dtype).newbyteorder("<"))
            if rows is None:
                log.warning("%s is damaged: its rows are packed again", path)
                path.unlink()
            else:
                os.utime(path)  # _evict sorts by the time of the last use
            return rows
        except OSError:
            return None

    def put(self, identity: Sequence[object], rows: Packed) -> None:
        """Store rows. After an error of the disk it warns, and later calls do nothing."""
        if not self._writable:
            return
        name = _name(identity)
        unfinished = self.folder / f"{name}.{uuid.uuid4().hex}{_UNFINISHED}"
        tokens = rows.tokens.astype(rows.tokens.dtype.newbyteorder("<"), copy=False)
        content = [
            np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            for part in (tokens, np.packbits(rows.valid, axis=1))
        ]
        try:
            with open(unfinished, "xb") as file:
                file.write(_hash(name, *content))
                file.writelines(content)
            unfinished.rename(self.folder / (name + _ROWS))
            with self._lock:
                self._written_bytes += sum(map(len, content))
                if self._written_bytes > self.limit_bytes // 16:
                    self._written_bytes = 0
                    self._evict()
        except OSError as error:
            self._writable = False
            log.warning("no more rows are cached in %s: %s", self.folder, error.strerror)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _evict(self) -> None:
        """Remove the oldest files beyond the limit, and unfinished files of killed processes."""
        files, total = [], 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith((_ROWS, _UNFINISHED)):
                    with contextlib.suppress(FileNotFoundError):  # another process was faster
                        found = entry.stat(follow_symlinks=False)
                        files.append((found.st_mtime_ns, entry.path, found.st_size))
                        total += found.st_size
        stale_ns = time.time_ns() - int(_STALE_S * 1e9)
        for mtime_ns, path, size in sorted(files):
            if total > self.limit_bytes or (path.endswith(_UNFINISHED) and mtime_ns < stale_ns):
                Path(path).unlink(missing_ok=True)
                total -= size


def _name(identity: Sequence[object]) -> str:
    return xxhash.xxh3_128_hexdigest(repr(tuple(identity)).encode())


def _hash(name: str, *parts: memoryview) -> bytes:
    digest = xxhash.xxh3_128(name.encode())
    for part in parts:
        digest.update(part)
    return digest.digest()


def _decoded(content: bytes, name: str, seq_len: int, dtype: np.dtype) -> Packed | None:
    tokens_bytes, valid_bytes = (seq_len + 1) * dtype.itemsize, -(-seq_len // 8)
    n, rest = divmod(len(content) - _HASH_BYTES, tokens_bytes + valid_bytes)
    if n < 0 or rest or _hash(name, memoryview(content)[_HASH_BYTES:]) != content[:_HASH_BYTES]:
        return None
    tokens = np.frombuffer(content, dtype, n * (seq_len + 1), _HASH_BYTES)
    bits = np.frombuffer(content, np.uint8, n * valid_bytes, _HASH_BYTES + n * tokens_bytes)
    valid = np.unpackbits(bits.reshape(n, valid_bytes), axis=1, count=seq_len).view(bool)
    return Packed(tokens.reshape(n, seq_len + 1).astype(dtype.newbyteorder("="), copy=False), valid)
