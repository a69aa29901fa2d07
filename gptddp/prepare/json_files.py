"""The records of JSON files: lines of JSONL, and `.json` files by what is in them.

A `.json` file is an array of objects, objects one after the other, or JSON lines. An array may be
larger than memory: it is read piece by piece.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import IO, Any

_HEAD = 1 << 20  # of the first line: an array may be all on one
_CHUNK = 1 << 20  # read at once
_MAX_VALUE = 1 << 30  # characters of one object
_MAY_BE_CUT = 32  # characters at the end of what has been read: half a literal or escape
_NOT_JSON = "not valid JSON; a .json file must be an array of objects, one object or JSON lines"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")

Problem = tuple[str, str]  # why a record cannot be used, and the fix; no value of JSON is a tuple
Record = tuple[str, int, Any]  # "line" or "record", its number, its value or a Problem


def text_of(record: Any, field: str) -> bytes | Problem:
    """The text of a record as UTF-8, empty where it is null."""
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
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell: U+FFFD
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def at(record: Any, field: str) -> Any:
    """The value of a field, or of `a.b` the field b of the object a; None where a is null.

    A field whose own name has a dot goes first. Raises KeyError with what is there instead.
    """
    if isinstance(record, dict) and field in record:
        return record[field]
    outer, dot, inner = field.partition(".")
    if dot and isinstance(record, dict) and outer in record:
        return None if record[outer] is None else at(record[outer], inner)
    if not isinstance(record, dict):
        raise KeyError(f"JSON of type {type(record).__name__} in place of an object with {field!r}")
    has = f"but the fields {', '.join(map(repr, record))}" if record else "and no other"
    raise KeyError(f"no field {field!r}, {has}")


def lines(stream: Iterable[bytes], first: int = 1) -> Iterator[Record]:
    """The records of JSON lines; `first`: the number of the first line."""
    for number, line in enumerate(stream, first):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield "line", number, _parsed(line)


def any_json(stream: IO[bytes]) -> Iterator[Record]:
    """The records of a `.json` file, in the form that its content has.

    JSON lines, where the first or the second line is an object (one of them may be damaged).
    """
    head, number = b"", 0
    while not head.strip():
        head = stream.readline(_HEAD)
        number += 1
        if not head:
            return
        if number == 1:
            head = head.removeprefix(codecs.BOM_UTF8)
    if head.lstrip().startswith(b"{"):
        if not head.endswith(b"\n"):
            head += stream.readline(_MAX_VALUE)
        second = stream.readline(_MAX_VALUE)
        if isinstance(_parsed(head), dict) or isinstance(_parsed(second), dict):
            yield from lines(chain([head, second], stream), number)
            return
        head += second
    number = 0
    try:
        for number, value in enumerate(_Values(head, stream), 1):
            yield "record", number, value
    except (ValueError, RecursionError) as error:  # where the next record begins is not known
        problem = f"{_NOT_JSON} ({error}), so that the rest of the file cannot be read"
        yield "record", number + 1, (problem, "mend it")


def _parsed(line: bytes) -> Any | Problem:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        return (
            f"not valid JSON ({error}); each line must be one JSON object in UTF-8",
            "mend or remove the line",
        )


class _Values:
    """The values of an array, or of objects one after the other; raises ValueError."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._head, self._text, self._at = head, "", 0

    def __iter__(self) -> Iterator[Any]:
        self._text = self._decoder.decode(self._head)
        if self._next() != "[":
            while char := self._next():
                if char != "{":
                    raise ValueError(f"{char!r} in place of an object")
                yield self._take()
            return
        end = self._skip()
        while end != "]":
            yield self._take()
            end = self._next()
            if end not in ("]", ","):
                raise ValueError(f"{end!r} in place of a comma" if end else "the array is cut")
            if end == ",":
                self._skip()
        if char := self._skip():
            raise ValueError(f"{char!r} after the end of the array")

    def _take(self) -> Any:
        """The next value."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self._text) - _MAY_BE_CUT
                if not (near_end or error.msg.startswith("Unterminated")) or not self._more():
                    raise
            else:
                if end < len(self._text) or not self._more():
                    self._at = end
                    return value

    def _skip(self) -> str:
        """Pass over a character; returns the next one, as `_next` does."""
        self._at += 1
        return self._next()

    def _next(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _more(self) -> bool:
        """Read on, twice as much each time a value does not end; False at the end of the file."""
        rest = self._text[self._at :]
        if len(rest) > _MAX_VALUE:
            raise ValueError("a value of over 1 GiB")
        data = self._stream.read(max(_CHUNK, len(rest)))
        self._text, self._at = rest + self._decoder.decode(data, final=not data), 0
        return bool(data)
