"""The logs of old lives, folded into few files: ten thousand lives do not leave as many.

Neighbours become one log, that of their highest generation: for each step the line that counts, in
order. A reader that begins with the lowest generation finds every line at any moment: the new file
takes the name of the highest by one rename, and only then the others are removed. The logs of the
newest lives are left alone, as a late writer may still add to them.

One process folds at a time, by a lock. Without it, that of a life which is over and does not know
it yet could look at the logs, be stopped, then put its file in the place of one with more lines.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from gptddp.files import fsync, lock, write_new
from gptddp.run.history import lines_of, log_generations, log_path
from gptddp.run.json_lines import parse

LOCK = ".fold.lock"
NEWEST = 8  # logs that are left alone
MANY = 32  # that a fold would save: for fewer it does not rewrite what was folded before
MOST_BYTES = 16 << 20  # of a log that is made


def fold(run_dir: str | Path, lost: Callable[[], str] = lambda: "") -> None:
    """Rank 0 only: fold old logs where they are many. Killed anywhere, no line is lost.

    There are at most MANY + NEWEST logs, and two for every MOST_BYTES of lines. `lost` says
    why the run is another's, if it is: then nothing is done, nor while another process folds.
    Raises OSError; a disk that is full changes nothing.
    """
    path = Path(run_dir) / LOCK
    if not _worthwhile(run_dir) and not os.path.lexists(path):  # that of a killed process
        return
    try:
        held = lock(path)
    except BlockingIOError:
        return
    try:
        for group in _worthwhile(run_dir):
            if len(group) > 1:
                _merge(run_dir, group, lost)
    finally:
        with contextlib.suppress(OSError):  # while it is locked: who waits for it makes a new one
            os.unlink(path)
        os.close(held)


def _worthwhile(run_dir: str | Path) -> list[list[int]]:
    """The logs to be folded, in groups; none where that would save only few."""
    groups = _groups(run_dir, log_generations(run_dir)[:-NEWEST])
    return groups if sum(len(group) - 1 for group in groups) >= MANY else []


def _groups(run_dir: str | Path, generations: list[int]) -> list[list[int]]:
    """Neighbours that fit into one log."""
    groups: list[list[int]] = []
    room = 0
    for generation in generations:
        size = _size(log_path(run_dir, generation))
        if not groups or size > room:
            groups.append([])
            room = MOST_BYTES
        groups[-1].append(generation)
        room -= size
    return groups


def _merge(run_dir: str | Path, generations: list[int], lost: Callable[[], str]) -> None:
    """Make one log of these, in its place; not where one of them still grows."""
    paths = [log_path(run_dir, generation) for generation in generations]
    marks = [_mark(path) for path in paths]
    lines: dict[int, bytes] = {}
    for generation, path in zip(generations, paths, strict=True):
        for step, line in lines_of(path).items():
            lines[step] = _of(generation, line) if path != paths[-1] else line
    merged = paths[-1].with_name(f".{paths[-1].name}.{uuid.uuid4().hex}.tmp")
    try:
        write_new(merged, b"".join(lines[step] + b"\n" for step in sorted(lines)))
        if lost() or marks != [_mark(path) for path in paths]:
            return
        os.replace(merged, paths[-1])
    finally:
        with contextlib.suppress(OSError):
            os.unlink(merged)
    fsync(run_dir)  # before what it replaces is removed
    for path, mark in zip(paths[:-1], marks, strict=False):
        if _mark(path) == mark:  # else it has lines that are not in `merged`
            path.unlink(missing_ok=True)


def _of(generation: int, line: bytes) -> bytes:
    """The line, with the log that it comes from."""
    return json.dumps({"log": generation, **(parse(line) or {})}).encode()


def _size(path: Path) -> int:
    """In bytes; 0 where it is gone."""
    return _mark(path)[1]


def _mark(path: Path) -> tuple[int, int]:
    """By which a log is known to be the same, and no longer than before: its file and size."""
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        return status.st_ino, status.st_size
    return 0, 0
