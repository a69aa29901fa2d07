"""The records of JSON files: lines of JSONL, and `.json` files by what is in them.

A `.json` file is an array of objects, objects one after the other, or JSON lines. An array may be
larger than memory: it is read piece by piece.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import IO, Any

_HEAD = 1 << 20  # of the first line: an array may be all on one
_CHUNK = 1 << 20  # read at once
_MAX_VALUE = 1 << 30  # characters of one object
_MAY_BE_CUT = 32  # characters at the end of what has been read: half a literal or escape
_NOT_JSON = "not valid JSON; a .json file must be an array of objects, one object or JSON lines"
_FIX_FILE = "leave the file out with --exclude, or make it a .txt file to read it as plain text"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")

Bad = Callable[[str, int, str, str], None]  # (place, number, problem, fix)


class BadValue(ValueError):
    """A record that cannot be used: the problem and the fix."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


def text_of(record: Any, field: str) -> bytes:
    """The text of a record as UTF-8, empty where it is null; raises BadValue."""
    if not isinstance(record, dict):
        raise BadValue(
            f"JSON of type {type(record).__name__}; a record must be one object with the field "
            f"{field!r}",
            "mend or remove it",
        )
    name_it = "name the field that holds the text with --text-field, as in text or doc.text"
    try:
        text = at(record, field)
    except KeyError as missing:
        raise BadValue(missing.args[0], name_it) from None
    if text is None:
        return b""
    if not isinstance(text, str):
        raise BadValue(
            f"field {field!r} is of type {type(text).__name__}; it must be a string", name_it
        )
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


def lines(
    stream: Iterable[bytes], field: str, bad: Bad, first: int = 1
) -> Iterator[tuple[str, int, bytes]]:
    """("line", its number, the text) of each line of JSONL that can be used."""
    for number, line in enumerate(stream, first):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            text = text_of(_parsed(line), field)
        except BadValue as error:
            bad("line", number, error.problem, error.fix)
        else:
            yield "line", number, text


def any_json(stream: IO[bytes], field: str, bad: Bad) -> Iterator[tuple[str, int, bytes]]:
    """(place, number, text) of each record of a `.json` file that can be used.

    What is in the file tells its form: JSON lines where the first or the second line is an object
    of its own (one of them may be damaged).
    """

    def bad_here(place: str, number: int, problem: str, fix: str) -> None:
        bad(place, number, problem, f"{fix}; {_FIX_FILE}")

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
        if _is_whole(head) or _is_whole(second):
            yield from lines(chain([head, second], stream), field, bad_here, number)
            return
        head += second
    yield from _from_values(head, stream, field, bad_here)


def _from_values(
    head: bytes, stream: IO[bytes], field: str, bad: Bad
) -> Iterator[tuple[str, int, bytes]]:
    values = None
    for number in count(1):
        try:
            values = values or _Values(head, stream)
            if not values.another():
                return
            record = values.take()
        except (ValueError, RecursionError) as error:  # where the next record begins is not known
            problem = f"{_NOT_JSON} ({error}), so that the rest of the file cannot be read"
            return bad("record", number, problem, "mend it")
        try:
            text = text_of(record, field)
        except BadValue as error:
            bad("record", number, error.problem, error.fix)
        else:
            yield "record", number, text


def _is_whole(line: bytes) -> bool:
    try:
        return isinstance(_parsed(line), dict)
    except BadValue:
        return False


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise BadValue(
            f"not valid JSON ({error}); each line must be one JSON object in UTF-8",
            "mend or remove the line",
        ) from None


class _Values:
    """The values of an array, or of a text of one value after the other."""

    def __init__(self, head: bytes, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at = self._decoder.decode(head), 0
        self._array = self._next() == "["
        self._at += self._array
        self._first = True

    def another(self) -> bool:
        """Is there one more value? Raises ValueError for anything else that follows."""
        char = self._next()
        if self._array and char == "]":
            self._at += 1
            if char := self._next():
                raise ValueError(f"{char!r} after the end of the array")
            self._array = False
            return False
        if self._array and not self._first:
            if char != ",":
                raise ValueError(f"{char!r} in place of a comma" if char else "the array is cut")
            self._at += 1
        elif not self._array and char not in ("", "{"):
            raise ValueError(f"{char!r} in place of an object")
        self._first = False
        return self._array or bool(char)

    def take(self) -> Any:
        """The next value; raises ValueError."""
        self._next()
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
