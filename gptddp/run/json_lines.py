"""Read files of JSON lines, forwards or backwards; torn lines are skipped."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gptddp.files import parse_json

MOST_STEPS = 1 << 31  # valid step numbers are below this
MOST_LIVES = 10**9  # valid generations are below this: the metric and file names need a limit
_FIRST_BYTES, _MOST_BYTES = 8 << 10, 1 << 20  # sizes of the blocks for reading backwards


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None if a killed writer or a disk tore it."""
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
    """Yield the lines of a file from its last to its first, without line ends.

    Nothing if the file does not exist. Reads only as much as needed. Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for _, line in lines_back(file):
            yield line


def lines_back(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Like `backwards`, for an open file; each line comes with the byte at which it begins."""
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
