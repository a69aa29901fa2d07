"""Reading files of JSON lines: forwards, or backwards from the end. What is torn is left out."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gptddp.files import parse_json

MOST_STEPS = 1 << 31  # a step from here on is a foreign one
MOST_LIVES = 10**9  # a generation from here on is a foreign one: its metric and files need a limit
_FIRST_BYTES, _MOST_BYTES = 8 << 10, 1 << 20  # of a block that is read backwards


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None where a killed writer or a disk has torn it."""
    with contextlib.suppress(ValueError):
        if isinstance(obj := parse_json(line), dict):
            return obj
    return None


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line of the ledger; None for anything else."""
    if (event := parse(line)) is None:
        return None
    name, time, generation = (event.get(key) for key in ("event", "time", "generation"))
    is_life = type(generation) is int and 0 <= generation < MOST_LIVES
    return event if is_life and isinstance(name, str) and isinstance(time, float) else None


def backwards(path: Path) -> Iterator[bytes]:
    """The lines of a file from its last to its first; none of a file that is not there.

    Without their ends; no more is read than is asked for. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in lines_back(file):
            yield line


def lines_back(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The same of an open file; with each line the byte at which it begins."""
    end, rest, size = file.seek(0, 2), b"", _FIRST_BYTES
    while end:
        begin = max(0, end - size)
        file.seek(begin)
        block = file.read(end - begin) + rest
        at = begin + len(block) + 1
        rest, *lines = block.split(b"\n")
        for line in reversed(lines):
            at -= len(line) + 1
            if line:
                yield at, line
        end, size = begin, min(2 * size, _MOST_BYTES)
    if rest:
        yield 0, rest
