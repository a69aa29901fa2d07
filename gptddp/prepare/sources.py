"""The documents of a source file.

A text file is one document, or several pieces of about DOCUMENT_BYTES if it is longer. Each record
of a JSON file and each row of a parquet file is a document. Their order does not matter: see
shuffle.py.
"""

import codecs
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gptddp.data.dataset import open_parquet
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import DataError
from gptddp.files import parse_json
from gptddp.prepare.json_files import Problem, any_json, at, lines, text_of
from gptddp.prepare.listing import SourceFile
from gptddp.prepare.recipe import Settings
from gptddp.prepare.walk import show, unreadable

# Longer text files are cut at line ends, so that even one book gives a validation split, and row
# groups have about the same size. A training row is a few KB: the cuts cost hardly any context.
DOCUMENT_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20  # read at once
# A smaller file that starts with _POINTER is a Git LFS pointer.
_POINTER_BYTES, _POINTER = 1024, b"version https://git-lfs.github.com/spec/"
_FIX_JSON = "skip the file with --exclude, or rename it to .txt to read it as plain text"
_FIX_FILE = "mend it, or skip it with --exclude"

Found = tuple[str, int, bytes | Problem]  # "line", "row" or "record", its number, the document


class NotText(ValueError):
    """Why a file is not text."""


def documents(file: SourceFile, settings: Settings, made_by: Tokenizer | None) -> Iterator[Found]:
    """The documents of a file, empty ones included: UTF-8, or the bytes of the ids of `made_by`.

    Raises DataError, with the file name, for errors that are no bad record; NotText, before the
    first document.
    """
    place, number = {"jsonl": "line", "parquet": "row"}.get(file.kind, "record"), 0
    if made_by is not None:
        records = _token_lists(file, str(settings.tokens_field), made_by)
    else:
        read = {"parquet": _texts, "text": _text}.get(file.kind, _json)
        records = read(file, settings.text_field)
    try:
        for found in records:
            place, number, _ = found
            yield found
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the volume
            raise DataError(unreadable(file.path, error)) from error
        what = "not a readable parquet file" if file.kind == "parquet" else "damaged"
        problem = f"{what} ({error}), so the rest of the file cannot be read"
        yield place, number + 1, (problem, _FIX_FILE)


@contextmanager
def _open(file: SourceFile) -> Iterator[IO[bytes]]:
    """Open and decompress a file. Raises DataError for a Git LFS pointer, whatever its name."""
    with open(file.path, "rb") as raw:
        if file.bytes < _POINTER_BYTES and raw.peek().startswith(_POINTER):
            raise DataError(
                f"{show(file.path)} is a Git LFS pointer instead of the file: get the file with "
                "`git lfs pull`, or skip it with --exclude"
            )
        if file.compression is None:
            yield raw
        else:
            with pa.CompressedInputStream(raw, file.compression) as unpacked:
                yield io.BufferedReader(unpacked, _CHUNK_BYTES)


# -- text files ----------------------------------------------------------------------------------


def _text(file: SourceFile, text_field: str) -> Iterator[Found]:
    """Check a whole text file, then yield its pieces. A large file is read twice."""
    with _open(file) as stream:
        # not more than the file has: allocating a chunk costs more than reading a small file
        size = _CHUNK_BYTES if file.compression else min(_CHUNK_BYTES, file.bytes + 1)
        head = stream.read(size)
        _check_text(head, stream)
    if _is_record(head, text_field) and ".txt" not in file.path.lower():
        problem = f"a JSON record with the field {text_field!r} in a file that is read as text"
        fix = "rename the file to end in .jsonl, or in .txt to train on the JSON text itself"
        yield "line", 1, (problem, fix)
    elif len(head) < size:
        yield from _cut(io.BytesIO(head))
    else:
        with _open(file) as stream:
            yield from _cut(stream)


def _is_record(head: bytes, text_field: str) -> bool:
    """Does a text file start like JSON lines, under a name such as part-00000 or x.jsonlines?"""
    with suppress(ValueError, KeyError):
        return isinstance(at(parse_json(head.partition(b"\n")[0]), text_field), str)
    return False


def _check_text(head: bytes, stream: IO[bytes]) -> None:
    """Raise NotText unless a file is text; `head` has been read, `stream` has the rest."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    chunk = head
    while True:
        if b"\0" in chunk:
            raise NotText("has NUL bytes")
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError:
            raise NotText("is not UTF-8") from None
        if not chunk:
            return
        chunk = stream.read(_CHUNK_BYTES)


def _cut(stream: IO[bytes]) -> Iterator[Found]:
    """Cut the text after the last line end within each DOCUMENT_BYTES, or within a longer line."""
    rest = stream.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while len(rest) > DOCUMENT_BYTES:
        end = rest.rfind(b"\n", 0, DOCUMENT_BYTES) + 1 or DOCUMENT_BYTES
        # In a long line, cut in front of a character. It has at most 4 bytes, unless the file has
        # changed since the check.
        while rest[end] & 0xC0 == 0x80 and end > DOCUMENT_BYTES - 4:
            end -= 1
        yield "record", 0, rest[:end]
        rest = rest[end:]
        if len(rest) <= DOCUMENT_BYTES:
            rest += stream.read(_CHUNK_BYTES)
    yield "record", 0, rest


# -- JSON and parquet ----------------------------------------------------------------------------


def _json(file: SourceFile, text_field: str) -> Iterator[Found]:
    is_json = file.kind == "json"

    with _open(file) as stream:
        for place, number, value in any_json(stream) if is_json else lines(stream):
            found = text_of(value, text_field)
            if is_json and isinstance(found, tuple):
                found = found[0], f"{found[1]}; {_FIX_JSON}"
            yield place, number, found


def _texts(file: SourceFile, text_field: str) -> Iterator[Found]:
    holds = "the text with --text-field, as in text or doc.text"
    columns = _column(file, text_field, _is_text, "a string", holds)
    for number, text in enumerate(chain.from_iterable(map(_as_bytes, columns)), 1):
        try:
            text.decode()
        except UnicodeDecodeError as error:  # a string column may hold other bytes
            problem = f"column {text_field!r} is not UTF-8 ({error})"
            yield "row", number, (problem, "convert or remove the row")
        else:
            yield "row", number, text


def _as_bytes(column: pa.Array) -> Iterator[bytes]:
    binary = column.cast(pa.large_binary())
    binary.validate(full=True)
    return (text or b"" for text in binary.to_pylist())


def _token_lists(file: SourceFile, field: str, tokenizer: Tokenizer) -> Iterator[Found]:
    """The ids of a file. The only possible check is that all are in this vocabulary."""
    if file.kind != "parquet":
        raise DataError(
            f"{show(file.path)} is not a parquet file: --tokens-field reads only parquet; in a "
            "folder, select the files with --include '*.parquet'"
        )
    what, holds = "a list of whole numbers, as list<uint16>", "the token ids with --tokens-field"
    columns = _column(file, field, _is_ids, what, holds)
    for number, ids in enumerate(chain.from_iterable(columns), 1):
        for found in _without_bos(ids.values, tokenizer):
            yield "row", number, found


def _without_bos(values: pa.Array | None, tokenizer: Tokenizer) -> list[bytes] | list[Problem]:
    """The documents of a list of ids, cut at each BOS. BOS is dropped, as packing adds it."""
    if values is None:
        return [b""]
    if values.null_count:
        return [(f"{values.null_count} of its ids are null", "mend or remove the row")]
    ids = values.to_numpy(zero_copy_only=False)
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(outside):
        last = tokenizer.vocab_size - 1
        problem = f"id {outside[0]} is not in the vocabulary, which ends at {last}"
        return [(problem, "give the tokenizer.json that made these tokens with --tokenizer")]
    opens = np.flatnonzero(ids == tokenizer.bos)
    starts, ends = [0, *(opens + 1).tolist()], [*opens.tolist(), len(ids)]
    parts = [ids[i:j] for i, j in zip(starts, ends, strict=True) if i < j]
    dtype = np.dtype(tokenizer.dtype).newbyteorder("<")
    return [part.astype(dtype).tobytes() for part in parts or [ids[:0]]]


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return str(kind).removeprefix("large_").removesuffix("_view") in ("string", "binary")


def _is_ids(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists) and pa.types.is_integer(kind.value_type)


def _column(
    file: SourceFile, name: str, is_right: Callable[[pa.DataType], bool], what: str, holds: str
) -> Iterator[pa.Array]:
    """Yield a column of a parquet file, some rows at a time; null if a struct around it is null.

    Raises DataError if the column is missing, or has a wrong type (`what`: the right type).
    """
    where, fix = show(file.path), f"name the column that holds {holds}"
    with _open(file), open_parquet(file.path) as reader:
        path, kind = _find_column(reader.schema_arrow, name, where, fix)
        if not is_right(kind):
            raise DataError(f"{where}: column {name!r} is of type {kind}: it must be {what}; {fix}")
        for records in reader.iter_batches(1024, columns=[name], use_threads=False):
            column = records.column(path[0])
            yield pc.struct_field(column, path[1:]) if path[1:] else column


def _find_column(
    within: pa.Schema | pa.StructType, name: str, where: str, fix: str
) -> tuple[list[str], pa.DataType]:
    """The path to a column, and its type; `a.b` is the field b of the struct a.

    A column whose name contains the dot goes first. Raises DataError if there is none, or several.
    """
    names = [field.name for field in within]
    outer, dot, inner = name.partition(".")
    own = name if name in names else outer
    if (count := names.count(own)) > 1:
        raise DataError(f"{where}: {count} columns are called {own!r}: rename all but one")
    kind = within.field(own).type if count else None
    if own == name and count:
        return [own], kind
    if dot and isinstance(kind, pa.StructType):
        path, kind = _find_column(kind, inner, where, fix)
        return [own, *path], kind
    raise DataError(f"{where}: no column {name!r}, but {', '.join(map(repr, names))}; {fix}")
