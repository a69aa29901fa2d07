"""Documents that are tokens already: lists of ids in a parquet column, at both ends of `prepare`.

They are believed to be of the tokenizer that is given with them: all that can be checked is that
every id is one of its vocabulary. BOS opens a document here as everywhere: a list is cut in front
of each, and BOS itself is left out, since packing puts it there again. Between the two ends a
document is the bytes of its ids, little-endian, 2 or 4 each as the vocabulary needs.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from gptddp.errors import DataError
from gptddp.listing import SourceFile, show
from gptddp.sources import check_unique, open_parquet
from gptddp.tokens import Tokenizer

COLUMN = "tokens"  # of a prepared dataset


def documents(file: SourceFile, field: str, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The documents of a parquet file, empty ones included; raises DataError, naming the row."""
    where, row = show(file.path), 0
    if file.kind != "parquet":
        raise DataError(
            f"{where} is not a parquet file: only those hold tokens; of a folder, take them with "
            "--include '*.parquet'"
        )
    try:
        with open_parquet(file.path) as reader:
            _check_column(reader.schema_arrow, field, where)
            for batch in reader.iter_batches(1024, columns=[field], use_threads=False):
                for ids in batch.column(0):
                    row += 1
                    yield from _split(ids.values, tokenizer, f"{where}, row {row}")
    except (OSError, pa.ArrowException) as error:
        after = f" after row {row}" if row else ""
        raise DataError(f"{where}{after}: not a readable parquet file ({error})") from error


def _check_column(schema: pa.Schema, field: str, where: str) -> None:
    fix = "name the column that holds the token ids with --tokens-field"
    if field not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise DataError(f"{where}: no column {field!r}, but {names}; {fix}")
    check_unique(schema, field, where)
    kind = schema.field(field).type
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not pa.types.is_integer(kind.value_type):
        raise DataError(
            f"{where}: column {field!r} is of type {kind}: it must be a list of whole numbers, as "
            f"list<uint16>; {fix}"
        )


def _split(values: pa.Array | None, tokenizer: Tokenizer, where: str) -> Iterator[bytes]:
    """The documents of one list of ids, without their BOS."""
    if values is None:
        yield b""
        return
    if values.null_count:
        raise DataError(f"{where}: {values.null_count} of its ids are null: mend or remove the row")
    ids = values.to_numpy(zero_copy_only=False)
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(outside):
        raise DataError(
            f"{where}: id {outside[0]} is not in the vocabulary, which ends at "
            f"{tokenizer.vocab_size - 1}: give the tokenizer.json that made these tokens with "
            "--tokenizer"
        )
    opens = np.flatnonzero(ids == tokenizer.bos)
    starts, ends = [0, *(opens + 1).tolist()], [*opens.tolist(), len(ids)]
    parts = [ids[i:j] for i, j in zip(starts, ends, strict=True) if i < j]
    for part in parts or [ids[:0]]:
        yield part.astype(np.dtype(tokenizer.dtype).newbyteorder("<")).tobytes()


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
