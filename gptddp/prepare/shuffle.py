"""One global shuffle of documents, on disk: the order is that of a keyed content hash.

The order is a pure function of the seed and the set of documents: neither the order in which they
were found nor the machine matters. Copies have the same key, so they are adjacent. A document that
is cut has one entry per part: the first has the key of the whole document, the keys of the others
are derived from it. Memory: one bucket, which is 1/128 of the text, and 17 bytes per entry.
"""

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import xxhash

from gptddp.prepare.scratch import Scratch

# Files of the scratch folder, by the key's first bits: the order does not depend on their number.
_BUCKETS = [f"{number:03}" for number in range(128)]
# A file of key pairs: the first piece of a file (or part of a document), and another piece of it.
_PIECES = "pieces"
_KEY_BYTES, _LENGTH_BYTES = 16, 7  # and a byte of flags
_HEAD_BYTES = _KEY_BYTES + _LENGTH_BYTES + 1
# Flags: from a validation source; another part follows; not the first part of a document.
_VAL, _GOES_ON, _LATER = 1, 2, 4
_ENTRY = np.dtype([("key", f"S{_KEY_BYTES}"), ("flags", "u1")])  # in memory, per entry


@dataclass(frozen=True)
class Totals:
    """Documents in the shuffle; `val`: number that validation sources have.

    dropped: copies. cut: number of documents that are cut, into `parts` parts in total.
    """

    documents: int
    val: int
    dropped: int
    cut: int
    parts: int

    @property
    def rows(self) -> int:
        """Rows that the shuffle yields: whole documents, and parts of cut ones."""
        return self.documents - self.cut + self.parts


class Shuffle:
    """Takes documents with `add`; then iterate over it, any number of times.

    It keeps one of several copies: one from a validation source, if there is one.
    """

    def __init__(self, scratch: Scratch, seed: int) -> None:
        """`scratch` may hold documents of an earlier process. All methods raise OSError."""
        self._scratch, self._seed = scratch, seed
        self._keys = [bytearray() for _ in _BUCKETS]
        self.bytes = 0  # total of all documents that were added
        for bucket, name in enumerate(_BUCKETS):
            if not scratch.lengths.get(name):
                continue
            with (
                open(scratch.folder / name, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                for key, start, end, flags in _records(data):
                    self._keys[bucket] += key + bytes([flags])
                    self.bytes += end - start

    def add(self, parts: Sequence[bytes], val: bool = False, first: bytes | None = None) -> bytes:
        """Add a document in its parts, usually one; returns its key.

        `first`: the key of the first piece of its file.
        """
        whole = xxhash.xxh3_128(parts[0], seed=self._seed)
        for part in parts[1:]:
            whole.update(part)
        key = whole.digest()
        for n, part in enumerate(parts):
            flags = val * _VAL | (n + 1 < len(parts)) * _GOES_ON | (n > 0) * _LATER
            if n == 0:
                self._add(key, part, flags, first)
            else:
                of_part = xxhash.xxh3_128_digest(key + n.to_bytes(8, "little"), seed=self._seed)
                self._add(of_part, part, flags, first or key)
        return key

    def _add(self, key: bytes, text: bytes, flags: int, first: bytes | None) -> None:
        bucket = key[0] * len(_BUCKETS) // 256
        head = key + len(text).to_bytes(_LENGTH_BYTES, "little") + bytes([flags])
        self._scratch.append(_BUCKETS[bucket], head + text)
        if first is not None:
            self._scratch.append(_PIECES, first + key)
        self._keys[bucket] += key + bytes([flags])
        self.bytes += len(text)

    def totals(self) -> Totals:
        """Count the documents, without copies."""
        documents = val = cut = parts = added = 0
        for bucket in range(len(_BUCKETS)):
            _, flags = self._different(bucket)
            ends = flags & _GOES_ON == 0  # a document is counted where it ends
            documents += int(np.count_nonzero(ends))
            val += int(np.count_nonzero(ends & (flags & _VAL > 0)))
            cut += int(np.count_nonzero(ends & (flags & _LATER > 0)))
            parts += int(np.count_nonzero(flags & (_GOES_ON | _LATER)))
            entries = np.frombuffer(self._keys[bucket], _ENTRY)
            added += int(np.count_nonzero(entries["flags"] & _GOES_ON == 0))
        return Totals(documents, val, added - documents, cut, parts)

    def counts(self) -> Iterator[tuple[bytes, int]]:
        """Yield (key, documents) of each entry, in order; not after `forget_keys`.

        A document that is cut is counted at its last part.
        """
        for bucket in range(len(_BUCKETS)):
            keys, flags = self._different(bucket)
            ends = (flags & _GOES_ON == 0).tolist()
            for key, end in zip(keys.tolist(), ends, strict=True):
                yield key.ljust(_KEY_BYTES, b"\0"), int(end)  # numpy strips trailing zeros

    def pieces(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key of a first piece or part, key of a later one), in the order of reading."""
        if _PIECES in self._scratch.lengths:
            data = (self._scratch.folder / _PIECES).read_bytes()
            for at in range(0, len(data), 2 * _KEY_BYTES):
                yield data[at : at + _KEY_BYTES], data[at + _KEY_BYTES : at + 2 * _KEY_BYTES]

    def forget_keys(self) -> None:
        """Free the memory of the keys."""
        self._keys.clear()

    def __iter__(self) -> Iterator[tuple[bytes, bytes, bool, bool]]:
        """Yield (key, text, from a validation source?, does another part follow?), by key.

        The scratch folder's files must be closed.
        """
        for name in _BUCKETS:
            if name not in self._scratch.lengths:
                continue
            data = (self._scratch.folder / name).read_bytes()
            for key, group in groupby(sorted(_records(data)), key=itemgetter(0)):
                # copies have the same text and flags, except _VAL
                _, start, end, flags = max(group, key=lambda copy: copy[3])
                yield key, data[start:end], flags & _VAL > 0, flags & _GOES_ON > 0

    def _different(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        """The distinct keys of a bucket, sorted, and the combined flags of each key's copies."""
        entries = np.frombuffer(self._keys[bucket], _ENTRY)
        keys, which = np.unique(entries["key"], return_inverse=True)
        flags = np.zeros(len(keys), np.uint8)
        np.bitwise_or.at(flags, which, entries["flags"])
        return keys, flags


def _records(data: bytes | mmap.mmap) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield (key, start, end, flags) of each entry of a bucket."""
    at, size = 0, len(data)
    while at < size:
        key, start = data[at : at + _KEY_BYTES], at + _HEAD_BYTES
        end = start + int.from_bytes(data[at + _KEY_BYTES : start - 1], "little")
        yield key, start, end, data[start - 1]
        at = end
