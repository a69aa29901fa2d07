"""One global shuffle of documents, on disk: they come back in the order of a keyed content hash.

The order is a pure function of the seed and the set of documents: neither the order in which they
were found nor the machine matters. Copies have the same key, so they come side by side and all but
one are dropped. Memory: one bucket, which is 1/128 of the text, and 16 bytes a document.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

_BUCKETS = 128  # by the key's first bits, so that the order does not depend on their number
_KEY_BYTES, _LENGTH_BYTES = 16, 8


class Shuffle:
    """Takes documents with `add`; after `finish`, iterate over it, any number of times."""

    def __init__(self, folder: Path, seed: int) -> None:
        """`folder`: to be made, for the documents; raises OSError, as all methods do."""
        self._folder = folder
        self._seed = seed
        self._files: dict[int, IO[bytes]] = {}
        self._open = ExitStack()
        self._keys = [bytearray() for _ in range(_BUCKETS)]
        self.bytes = 0  # of all documents that were added
        folder.mkdir()

    def add(self, text: bytes) -> None:
        """Add a document."""
        key = xxhash.xxh3_128_digest(text, seed=self._seed)
        bucket = key[0] * _BUCKETS // 256
        if bucket not in self._files:
            file = open(self._path(bucket), "wb", buffering=1 << 16)  # noqa: SIM115, see close
            self._files[bucket] = self._open.enter_context(file)
        self._files[bucket].write(key + len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        self._keys[bucket] += key
        self.bytes += len(text)

    def finish(self) -> tuple[int, int]:
        """End the input; returns the numbers of different documents and of dropped copies."""
        self.close()
        added = sum(map(len, self._keys)) // _KEY_BYTES
        different = sum(len(np.unique(np.frombuffer(keys, "S16"))) for keys in self._keys)
        self._keys.clear()
        return different, added - different

    def close(self) -> None:
        """Close the files; the folder is left to the caller."""
        self._open.close()

    def __iter__(self) -> Iterator[bytes]:
        """The documents in the order of their keys, each once."""
        for bucket in sorted(self._files):
            data = self._path(bucket).read_bytes()
            for _, copies in groupby(sorted(_records(data)), key=itemgetter(0)):
                _, start, end = next(copies)
                yield data[start:end]

    def _path(self, bucket: int) -> Path:
        return self._folder / f"{bucket:03}"


def _records(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """(key, start, end) of each document of a bucket."""
    at = 0
    while at < len(data):
        start = at + _KEY_BYTES + _LENGTH_BYTES
        end = start + int.from_bytes(data[at + _KEY_BYTES : start], "little")
        yield data[at : at + _KEY_BYTES], start, end
        at = end
