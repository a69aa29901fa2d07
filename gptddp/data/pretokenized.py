"""Documents that are tokens already: lists of ids in a parquet column, at both ends of `prepare`.

They are believed to be of the tokenizer that is given with them: all that can be checked is that
every id is one of its vocabulary. BOS opens a document here as everywhere: a list is cut in front
of each, and BOS itself is left out, since packing puts it there again. Between the two ends a
document is the bytes of its ids, little-endian, 2 or 4 each as the vocabulary needs.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from gptddp.data.tokenizer import Tokenizer

COLUMN = "tokens"  # of a prepared dataset


def ids_of(document: bytes, tokenizer: Tokenizer) -> np.ndarray:
    """The ids of a document between the two ends, 1-D."""
    return np.frombuffer(document, np.dtype(tokenizer.dtype).newbyteorder("<"))


def to_bytes(column: pa.Array, tokenizer: Tokenizer) -> list[bytes]:
    """The documents of a column of a dataset, as between the two ends; the inverse of to_arrow."""
    dtype = np.dtype(tokenizer.dtype).newbyteorder("<")
    return [ids.astype(dtype).tobytes() for ids in from_arrow(pa.chunked_array([column]))]


def to_arrow(group: Sequence[bytes], tokenizer: Tokenizer) -> pa.ListArray:
    """Documents as a column: list<uint16> or list<uint32>."""
    ids = ids_of(b"".join(group), tokenizer).astype(tokenizer.dtype)
    sizes = [len(document) // ids.itemsize for document in group]
    offsets = np.cumsum([0, *sizes], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))


def from_arrow(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The documents of a column that `to_arrow` made: views into its memory."""
    found = []
    for chunk in column.chunks:
        ids, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy().tolist()
        found += [ids[i:j] for i, j in zip(ends, ends[1:], strict=False)]
    return found
