"""The documents of a source file.

A text file is a document, or several pieces of about DOCUMENT_BYTES where it is longer. A record of
a JSON file and a row of a parquet file are a document each. Their order here does not matter: see
shuffle.py.
"""

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

import pyarrow as pa
import pyarrow.compute as pc

from gptddp.data.parquet import open_parquet
from gptddp.errors import DataError
from gptddp.files import parse_json
from gptddp.prepare.bad_records import BadRecords
from gptddp.prepare.json_files import any_json, at, lines
from gptddp.prepare.kinds import is_plain_text
from gptddp.prepare.listing import SourceFile
from gptddp.prepare.walk import show, unreadable

# Longer text files are cut at line ends, so that even one book gives a validation split, and row
# groups have about the same size. A training row is a few KB: the model loses no context by that.
DOCUMENT_BYTES = 64 << 10
_MAX_DOCUMENT_BYTES = 1 << 30  # of a line or a parquet row; Arrow's strings end at 2 GiB a column
_CHUNK_BYTES = 1 << 20  # read at once
_POINTER_BYTES = 1024  # a smaller file that begins so is a pointer: of what, and what gets the file
_POINTERS = {
    b"version https://git-lfs.github.com/spec/": ("Git LFS", "git lfs pull"),
    b"/annex/objects/": ("git-annex", "git annex get"),
}


def documents(file: SourceFile, text_field: str, bad: BadRecords) -> Iterator[bytes] | None:
    """The documents of a file as UTF-8, empty ones included; None for a file that is not text.

    Raises DataError, naming file and line, for what cannot be read and may not be skipped, and for
    a file without text that was given by name.
    """
    if file.kind == "text":
        return _text(file, text_field, bad)
    refuse_pointer(file)
    if file.kind == "parquet":
        return _parquet(file, text_field, bad)
    return _json(file, text_field, bad)


def _text(file: SourceFile, text_field: str, bad: BadRecords) -> Iterator[bytes] | None:
    """The documents of a text file; None for one of a folder that is not text.

    A file is read to its end before any part of it is used: a small one once, a large one twice.
    """
    if file.compression is not None:
        refuse_pointer(file)
    try:
        with _open(file) as stream:
            # no more than it has: memory for a chunk costs more than reading a small file
            size = _CHUNK_BYTES if file.compression else min(_CHUNK_BYTES, file.bytes + 1)
            head = stream.read(size)
            if file.compression is None:
                _refuse_pointer(file, head)
            whole = len(head) < size
            reason = _why_not_text(head, stream)
    except OSError as error:
        if error.errno is not None:
            raise DataError(unreadable(file.path, error)) from error
        fix = "mend it, or leave it out with --exclude"
        bad.add(file.path, "record", 1, f"damaged, cannot read the file ({error})", fix)
        return iter(())
    if reason is None and _is_record(file, head, text_field):
        problem = (
            f"a JSON record with the field {text_field!r} in a file that is read as plain text"
        )
        fix = "let the file's name end in .jsonl, or in .txt if its text is meant to be JSON"
        bad.add(file.path, "line", 1, problem, fix)
        return iter(())
    if reason is None:
        if whole:
            return _cut(io.BytesIO(head))
        return _read_again(file)
    if not file.given:
        return None
    raise DataError(
        f"{show(file.path)} {reason}: only UTF-8 text can be read; convert it, as with "
        "`iconv -t utf-8`, or leave it out"
    )


def _is_record(file: SourceFile, head: bytes, text_field: str) -> bool:
    """Does a text file begin like JSON lines, under a name such as part-00000 or x.jsonlines?"""
    line = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0]
    if not line.startswith(b"{") or is_plain_text(file.path):
        return False
    try:
        return isinstance(at(parse_json(line), text_field), str)
    except (ValueError, KeyError):
        return False


def refuse_pointer(file: SourceFile) -> None:
    """Raise DataError for a pointer of Git LFS, whatever its name: it is no bad record either."""
    if file.bytes >= _POINTER_BYTES:
        return
    try:
        with open(file.path, "rb") as raw:
            head = raw.read(max(map(len, _POINTERS)))
    except OSError as error:
        raise DataError(unreadable(file.path, error)) from error
    _refuse_pointer(file, head)


def _refuse_pointer(file: SourceFile, head: bytes) -> None:
    for begin, (of, get) in _POINTERS.items():
        if file.bytes < _POINTER_BYTES and head.startswith(begin):
            raise DataError(
                f"{show(file.path)} is a {of} pointer in place of the file: get the file "
                f"with `{get}`, or leave it out with --exclude"
            )


@contextmanager
def _open(file: SourceFile) -> Iterator[IO[bytes]]:
    with open(file.path, "rb") as raw:
        if file.compression is None:
            yield raw
        else:
            with pa.CompressedInputStream(raw, file.compression) as unpacked:
                yield io.BufferedReader(unpacked, _CHUNK_BYTES)


def _why_not_text(head: bytes, stream: IO[bytes]) -> str | None:
    """Why a file, of which the head has been read, is not text, or None."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    chunk = head
    while True:
        if b"\0" in chunk:
            return "has NUL bytes"
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError:
            return "is not UTF-8"
        if not chunk:
            return None
        chunk = stream.read(_CHUNK_BYTES)


def _read_again(file: SourceFile) -> Iterator[bytes]:
    try:
        with _open(file) as stream:
            yield from _cut(stream)
    except OSError as error:
        raise DataError(unreadable(file.path, error)) from error


def _cut(stream: IO[bytes]) -> Iterator[bytes]:
    """The text, cut after the last line end within each DOCUMENT_BYTES."""
    rest = stream.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
    while len(rest) > DOCUMENT_BYTES:
        end = _end_of_document(rest)
        yield rest[:end]
        rest = rest[end:]
        if len(rest) <= DOCUMENT_BYTES:
            rest += stream.read(_CHUNK_BYTES)
    yield rest


def _end_of_document(text: bytes) -> int:
    """Where to cut: after a line end, or between two characters where one line is longer."""
    end = text.rfind(b"\n", 0, DOCUMENT_BYTES) + 1
    if not end:
        end = DOCUMENT_BYTES
        # within a character; one has 4 bytes at most, unless the file has changed since the check
        while text[end] & 0xC0 == 0x80 and end > DOCUMENT_BYTES - 4:
            end -= 1
    return end


def _json(file: SourceFile, text_field: str, bad: BadRecords) -> Iterator[bytes]:
    read = any_json if file.kind == "json" else lines
    place, number = "line", 0
    try:
        with _open(file) as stream:
            for place, number, text in read(stream, text_field, partial(bad.add, file.path)):
                if _is_bounded(text, file, place, number, bad):
                    yield text
    except OSError as error:
        damaged(file, place, number + 1, error, bad)


def _is_bounded(text: bytes, file: SourceFile, place: str, number: int, bad: BadRecords) -> bool:
    if len(text) <= _MAX_DOCUMENT_BYTES:
        return True
    bad.add(file.path, place, number, f"a document of {len(text)} bytes", "split it below 1 GiB")
    return False


def _parquet(file: SourceFile, text_field: str, bad: BadRecords) -> Iterator[bytes]:
    row = 0
    try:
        with open_parquet(file.path) as reader:
            path = _check_column(reader.schema_arrow, text_field, show(file.path))
            for records in reader.iter_batches(1024, columns=[text_field], use_threads=False):
                column = values_at(records, path).cast(pa.large_binary())
                column.validate(full=True)
                for text in column.to_pylist():
                    row += 1
                    text = text or b""
                    if problem := _why_not_utf8(text):
                        problem = f"column {text_field!r} {problem}"
                        bad.add(file.path, "row", row, problem, "convert or remove the row")
                    elif _is_bounded(text, file, "row", row, bad):
                        yield text
    except (OSError, pa.ArrowException) as error:
        damaged(file, "row", row + 1, error, bad)


def _why_not_utf8(text: bytes) -> str | None:
    """A column of type string may have bytes that are not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8 ({error})"
    return None


def _check_column(schema: pa.Schema, text_field: str, where: str) -> list[str]:
    """The names that lead to the column of the text; raises DataError where it has none."""
    fix = "name the column that holds the text with --text-field, as in text or doc.text"
    path, kind = find_column(schema, text_field, where, fix)
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary"):
        raise DataError(
            f"{where}: column {text_field!r} is of type {kind}: it must be a string; {fix}"
        )
    return path


def find_column(
    within: pa.Schema | pa.StructType, column: str, where: str, fix: str
) -> tuple[list[str], pa.DataType]:
    """The names that lead to a column, and its type: itself, or of `a.b` the field b of struct a.

    A column whose own name has a dot goes first. Raises DataError where there is none, or several.
    """
    names = [field.name for field in within]
    outer, dot, inner = column.partition(".")
    name = column if column in names else outer
    if (count := names.count(name)) > 1:
        raise DataError(f"{where}: {count} columns are called {name!r}: rename all but one")
    kind = within.field(name).type if count else None
    if name == column and count:
        return [name], kind
    if dot and isinstance(kind, pa.StructType):
        path, kind = find_column(kind, inner, where, fix)
        return [name, *path], kind
    raise DataError(f"{where}: no column {column!r}, but {', '.join(map(repr, names))}; {fix}")


def values_at(records: pa.RecordBatch, path: list[str]) -> pa.Array:
    """The values of the column that `find_column` found; null where a struct is."""
    column = records.column(path[0])
    return pc.struct_field(column, path[1:]) if path[1:] else column


def damaged(file: SourceFile, place: str, number: int, error: Exception, bad: BadRecords) -> None:
    """A file that cannot be read from a record on; an error of the volume may pass: no record."""
    if isinstance(error, OSError) and error.errno is not None:
        raise DataError(unreadable(file.path, error)) from error
    what = "not a readable parquet file" if file.kind == "parquet" else "damaged"
    problem = f"{what} ({error}), so that the rest of the file cannot be read"
    bad.add(file.path, place, number, problem, "mend it, or leave it out with --exclude")
