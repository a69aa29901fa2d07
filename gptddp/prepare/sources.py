"""The documents of a source file.

A text file is a document, or several of about DOCUMENT_BYTES where it is longer. A line of a JSONL
file and a row of a parquet file are a document each. Their order here does not matter: see
shuffle.py.
"""

import codecs
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa

from gptddp.data.parquet import open_parquet
from gptddp.errors import DataError
from gptddp.prepare.listing import SourceFile, show, unreadable

# Longer text files are cut at line ends, so that even one book gives a validation split, and row
# groups have about the same size. A training row is a few KB: the model loses no context by that.
DOCUMENT_BYTES = 64 << 10
_MAX_DOCUMENT_BYTES = 1 << 30  # of a line or a parquet row; Arrow's strings end at 2 GiB a column
_CHUNK_BYTES = 1 << 20  # read at once


def documents(file: SourceFile, text_field: str) -> Iterator[bytes] | None:
    """The documents of a file as UTF-8, empty ones included; None for a file that is not text.

    Raises DataError, naming file and line, for what cannot be read, and for a file without text
    that was given by name.
    """
    if file.kind == "jsonl":
        return _jsonl(file, text_field)
    if file.kind == "parquet":
        return _parquet(file, text_field)
    try:
        reason = _why_not_text(file)
    except OSError as error:
        raise DataError(unreadable(file.path, error)) from error
    if reason is None:
        return _text(file)
    if not file.given:
        return None
    raise DataError(
        f"{show(file.path)} {reason}: only UTF-8 text can be read; convert it, as with "
        "`iconv -t utf-8`, or leave it out"
    )


@contextmanager
def _open(file: SourceFile) -> Iterator[IO[bytes]]:
    with open(file.path, "rb") as raw:
        if file.compression is None:
            yield raw
        else:
            with pa.CompressedInputStream(raw, file.compression) as unpacked:
                yield io.BufferedReader(unpacked, _CHUNK_BYTES)


def _why_not_text(file: SourceFile) -> str | None:
    """Why a file is not text, or None. It reads to the end before any part of the file is used."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open(file) as stream:
        chunk = b"-"
        while chunk:
            chunk = stream.read(_CHUNK_BYTES)
            if b"\0" in chunk:
                return "has NUL bytes"
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError:
                return "is not UTF-8"
    return None


def _text(file: SourceFile) -> Iterator[bytes]:
    """The file, cut after the last line end within each DOCUMENT_BYTES."""
    try:
        with _open(file) as stream:
            rest = stream.read(_CHUNK_BYTES).removeprefix(codecs.BOM_UTF8)
            while len(rest) > DOCUMENT_BYTES:
                end = _end_of_document(rest)
                yield rest[:end]
                rest = rest[end:]
                if len(rest) <= DOCUMENT_BYTES:
                    rest += stream.read(_CHUNK_BYTES)
            yield rest
    except OSError as error:
        raise DataError(unreadable(file.path, error)) from error


def _end_of_document(text: bytes) -> int:
    """Where to cut: after a line end, or between two characters where one line is longer."""
    end = text.rfind(b"\n", 0, DOCUMENT_BYTES) + 1
    if not end:
        end = DOCUMENT_BYTES
        while text[end] & 0xC0 == 0x80:  # within a character
            end -= 1
    return end


def _jsonl(file: SourceFile, text_field: str) -> Iterator[bytes]:
    name = show(file.path)
    try:
        with _open(file) as stream:
            for number, line in enumerate(stream, 1):
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    yield _json_text(line, text_field, f"{name}:{number}")
    except OSError as error:
        raise DataError(unreadable(file.path, error)) from error


def _json_text(line: bytes, text_field: str, where: str) -> bytes:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not valid JSON ({error}); each line must be one JSON object in UTF-8: "
            "mend or remove the line"
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            f"{where}: JSON of type {type(record).__name__}: each line must be one object with the "
            f"field {text_field!r}: mend or remove the line"
        )
    if text_field not in record:
        raise DataError(
            f"{where}: no field {text_field!r}, but the fields {', '.join(map(repr, record))}; "
            "name the field that holds the text with --text-field"
        )
    return _encoded(record[text_field], text_field, where)


def _encoded(text: Any, text_field: str, where: str) -> bytes:
    if text is None:
        return b""
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field {text_field!r} is of type {type(text).__name__}: it must be a string; "
            "name the field that holds the text with --text-field"
        )
    try:
        encoded = text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell: U+FFFD
        encoded = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    return _bounded(encoded, where)


def _bounded(encoded: bytes, where: str) -> bytes:
    if len(encoded) > _MAX_DOCUMENT_BYTES:
        raise DataError(f"{where}: a document of {len(encoded)} bytes; split it below 1 GiB")
    return encoded


def _parquet(file: SourceFile, text_field: str) -> Iterator[bytes]:
    where = show(file.path)
    row = 0
    try:
        with open_parquet(file.path) as reader:
            _check_column(reader.schema_arrow, text_field, where)
            for records in reader.iter_batches(1024, columns=[text_field], use_threads=False):
                column = records.column(0).cast(pa.large_binary())
                column.validate(full=True)
                for text in column.to_pylist():
                    row += 1
                    yield _checked(text or b"", text_field, f"{where}, row {row}")
    except (OSError, pa.ArrowException) as error:
        after = f" after row {row}" if row else ""
        raise DataError(f"{where}{after}: not a readable parquet file ({error})") from error


def _checked(text: bytes, text_field: str, where: str) -> bytes:
    try:
        text.decode()  # a column of type string may have bytes that are not UTF-8
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: column {text_field!r} is not UTF-8 ({error}): convert or remove the row"
        ) from None
    return _bounded(text, where)


def _check_column(schema: pa.Schema, text_field: str, where: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"{where}: no column {text_field!r}, but {', '.join(map(repr, schema.names))}; "
            "name the column that holds the text with --text-field"
        )
    check_unique(schema, text_field, where)
    kind = schema.field(text_field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary"):
        raise DataError(
            f"{where}: column {text_field!r} is of type {kind}: it must be a string; "
            "name the column that holds the text with --text-field"
        )


def check_unique(schema: pa.Schema, column: str, where: str) -> None:
    """Raise DataError where several columns have this name."""
    if (count := schema.names.count(column)) > 1:
        raise DataError(f"{where}: {count} columns are called {column!r}: rename all but one")
