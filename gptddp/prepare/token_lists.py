"""Lists of token ids in a parquet column of a source, as documents.

Nobody can tell which tokenizer has made them: only that every id is in the given one's vocabulary.
A list is cut before every BOS, and BOS is left out, because packing adds it.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from gptddp.data.parquet import open_parquet
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import DataError
from gptddp.prepare.bad_records import BadRecords
from gptddp.prepare.listing import SourceFile
from gptddp.prepare.sources import damaged, find_column, refuse_pointer, values_at
from gptddp.prepare.walk import show


def documents(
    file: SourceFile, field: str, tokenizer: Tokenizer, bad: BadRecords
) -> Iterator[bytes]:
    """The documents of a parquet file as the bytes of their ids, empty ones included.

    Raises DataError, naming the file and where possible the row, for what may not be skipped.
    """
    where, row = show(file.path), 0
    refuse_pointer(file)
    if file.kind != "parquet":
        raise DataError(
            f"{where} is not a parquet file: only those hold tokens; of a folder, take them with "
            "--include '*.parquet'"
        )
    try:
        with open_parquet(file.path) as reader:
            path = _check_column(reader.schema_arrow, field, where)
            for records in reader.iter_batches(1024, columns=[field], use_threads=False):
                for ids in values_at(records, path):
                    row += 1
                    if wrong := _wrong(ids.values, tokenizer):
                        bad.add(file.path, "row", row, *wrong)
                    else:
                        yield from _split(ids.values, tokenizer)
    except (OSError, pa.ArrowException) as error:
        damaged(file, "row", row + 1, error, bad)


def _check_column(schema: pa.Schema, field: str, where: str) -> list[str]:
    """The names that lead to the column of the ids; raises DataError where it has none."""
    fix = "name the column that holds the token ids with --tokens-field"
    path, kind = find_column(schema, field, where, fix)
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_list(kind) for is_list in lists) or not pa.types.is_integer(kind.value_type):
        raise DataError(
            f"{where}: column {field!r} is of type {kind}: it must be a list of whole numbers, as "
            f"list<uint16>; {fix}"
        )
    return path


def _wrong(values: pa.Array | None, tokenizer: Tokenizer) -> tuple[str, str] | None:
    """What is wrong with a list of ids, and the fix."""
    if values is None:
        return None
    if values.null_count:
        return f"{values.null_count} of its ids are null", "mend or remove the row"
    ids = values.to_numpy(zero_copy_only=False)
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if not len(outside):
        return None
    return (
        f"id {outside[0]} is not in the vocabulary, which ends at {tokenizer.vocab_size - 1}",
        "give the tokenizer.json that made these tokens with --tokenizer",
    )


def _split(values: pa.Array | None, tokenizer: Tokenizer) -> Iterator[bytes]:
    """The documents of one list of ids, without their BOS."""
    if values is None:
        yield b""
        return
    ids = values.to_numpy(zero_copy_only=False)
    opens = np.flatnonzero(ids == tokenizer.bos)
    starts, ends = [0, *(opens + 1).tolist()], [*opens.tolist(), len(ids)]
    parts = [ids[i:j] for i, j in zip(starts, ends, strict=True) if i < j]
    for part in parts or [ids[:0]]:
        yield part.astype(np.dtype(tokenizer.dtype).newbyteorder("<")).tobytes()
