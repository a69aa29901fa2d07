"""The records of JSONL and `.json` files.

A `.json` file is an array of objects or one object, read as a whole, or JSON lines.
"""

import codecs
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Any

from gptddp.files import parse_json

_MAX_BYTES = 1 << 30  # largest array: its objects take several times as much memory

Problem = tuple[str, str]  # why a record is unusable, and the fix; no JSON value is a tuple
Record = tuple[str, int, Any]  # "line" or "record", its number, its value or a Problem


def text_of(record: Any, field: str) -> bytes | Problem:
    """The text of a record as UTF-8; empty if it is null."""
    if isinstance(record, tuple):
        return record[0], record[1]
    name_it = "name the field that holds the text with --text-field, as in text or doc.text"
    if not isinstance(record, dict):
        return (
            f"JSON of type {type(record).__name__}; a record must be one object with the field "
            f"{field!r}",
            "mend or remove it",
        )
    try:
        text = at(record, field)
    except KeyError as missing:
        return missing.args[0], name_it
    if text is None:
        return b""
    if not isinstance(text, str):
        return f"field {field!r} is of type {type(text).__name__}; it must be a string", name_it
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can contain, becomes U+FFFD
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def at(record: Any, field: str) -> Any:
    """The value of a field; `a.b` is the field b of the object a, and None if a is null.

    A field whose name contains the dot takes precedence. Raises KeyError with the fields found.
    """
    if isinstance(record, dict) and field in record:
        return record[field]
    outer, dot, inner = field.partition(".")
    if dot and isinstance(record, dict) and outer in record:
        return None if record[outer] is None else at(record[outer], inner)
    if not isinstance(record, dict):
        raise KeyError(f"JSON of type {type(record).__name__} instead of an object with {field!r}")
    has = f"but the fields {', '.join(map(repr, record))}" if record else "the object is empty"
    raise KeyError(f"no field {field!r}, {has}")


def lines(stream: Iterable[bytes]) -> Iterator[Record]:
    """The records of JSON lines."""
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield "line", number, _parsed(line)


def any_json(stream: IO[bytes]) -> Iterator[Record]:
    """The records of a `.json` file, in whatever form.

    It is JSON lines if its first or second line is an object (one of them may be damaged).
    """
    begin: list[bytes] = []
    while sum(bool(line.strip()) for line in begin) < 2 and (line := stream.readline(_MAX_BYTES)):
        begin.append(line)
    is_object = b"".join(begin).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    if is_object and any(isinstance(_parsed(line), dict) for line in begin):
        yield from lines(chain(begin, stream))
        return
    whole = b"".join([*begin, stream.read(_MAX_BYTES)]).removeprefix(codecs.BOM_UTF8)
    if not whole.strip():
        return
    try:
        if len(whole) >= _MAX_BYTES:
            raise ValueError("over 1 GiB, but not JSON lines")
        value = parse_json(whole.decode())
    except ValueError as error:
        rule = "a .json file must be an array of objects, one object or JSON lines"
        fix = "mend it, or convert it to JSON lines, as with `jq -c '.[]'`"
        yield "record", 1, (f"not valid JSON ({error}); {rule}", fix)
        return
    for number, record in enumerate(value if isinstance(value, list) else [value], 1):
        yield "record", number, record


def _parsed(line: bytes) -> Any | Problem:
    try:
        return parse_json(line.decode())
    except ValueError as error:
        return (
            f"not valid JSON ({error}); each line must be one JSON object in UTF-8",
            "mend or remove the line",
        )
