"""Documents that are already token ids: a column of lists in the shards, bytes while preparing.

While a dataset is prepared, a document is the bytes of its ids: little-endian, 2 or 4 bytes per
id, as the vocabulary needs. Documents have no BOS: packing adds it.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gptddp.data.tokenizer import Tokenizer

COLUMN = "tokens"  # its name in a prepared dataset


def ids_of(document: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a document's bytes: 1-D, the tokenizer's dtype in little-endian order."""
    return np.frombuffer(document, np.dtype(tokenizer.dtype).newbyteorder("<"))


def to_arrow(documents: Sequence[bytes], tokenizer: Tokenizer) -> pa.ListArray:
    """A column from documents (the bytes of their ids): list<uint16> or list<uint32>."""
    ids = ids_of(b"".join(documents), tokenizer).astype(tokenizer.dtype)
    sizes = [len(document) // ids.itemsize for document in documents]
    offsets = np.cumsum([0, *sizes], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))


def from_arrow(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The documents of a column that `to_arrow` made: 1-D arrays, views into its memory."""
    found = []
    for chunk in column.chunks:
        ids, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy().tolist()
        found += [ids[i:j] for i, j in zip(ends, ends[1:], strict=False)]
    return found
