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
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from gptddp.files import fsync, lock, write_new
from gptddp.run import progress
from gptddp.run.history import lines_of, log_generations, log_path
from gptddp.run.json_lines import parse

LOCK = ".fold.lock"
NEWEST = 8  # logs that are left alone
MANY = 32  # that a fold would save: for fewer it does not rewrite what was folded before
MOST_BYTES = 16 << 20  # of a log that is made
Lines = dict[int, tuple[int, bytes]]  # by step: the generation of the log, and the line
Prints = tuple[int | None, int | None]  # batch_fp and chain_fp of a line, where it has them
_UNKNOWN: Prints = (None, None)
_FINGERPRINTS = re.compile(rb'"batch_fp": "([0-9a-f]{16})", "chain_fp": "([0-9a-f]{16})"')


def fold(run_dir: str | Path, lost: Callable[[], str] = lambda: "") -> None:
    """Rank 0 only: fold old logs where they are many. Killed anywhere, no line is lost.

    There are at most MANY + NEWEST logs, and two for every MOST_BYTES of lines and for every log
    that is damaged or another run's, which is left as it is. `lost` says
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
    """Make one log of these, or of as many neighbours as follow from each other."""
    while generations:
        marks = [_mark(log_path(run_dir, generation)) for generation in generations]
        lines, count = _that_follow(run_dir, generations)
        if count > 1:
            _replace(run_dir, generations[:count], marks[:count], lines, lost)
        generations = generations[count:]


def _that_follow(run_dir: str | Path, generations: list[int]) -> tuple[Lines, int]:
    """The lines that count of the first of these logs, and of how many.

    Up to one that may be another run's, or damaged: its lines would take the place of others for
    good, and nobody could put them right any more.
    """
    lines: Lines = {}
    prints: dict[int, Prints] = {}
    for count, generation in enumerate(generations):
        own = lines_of(log_path(run_dir, generation))
        own_prints = {step: _prints(line) for step, line in own.items()}
        if count and not _follow(prints, own_prints):
            return lines, count
        lines |= {step: (generation, line) for step, line in own.items()}
        prints |= own_prints
    return lines, len(generations)


def _follow(before: Mapping[int, Prints], own: Mapping[int, Prints]) -> bool:
    """Can these steps of a log be of the same run as those before it, by their fingerprints?"""

    def at(step: int) -> Prints:
        return own.get(step) or before.get(step, _UNKNOWN)

    for step, (_, chain) in own.items():
        if chain is not None and before.get(step, _UNKNOWN)[1] not in (None, chain):
            return False
        for end in (step, step + 1):
            last, (batch, now) = at(end - 1)[1], at(end)
            if _is_wrong(last, batch, now):
                return False
    return True


def _is_wrong(last: int | None, batch: int | None, chain: int | None) -> bool:
    if last is None or batch is None or chain is None:
        return False
    return progress.fold(last, batch) != chain


def _prints(line: bytes) -> Prints:
    found = _FINGERPRINTS.search(line)
    return (int(found[1], 16), int(found[2], 16)) if found else _UNKNOWN


def _replace(
    run_dir: str | Path,
    generations: list[int],
    marks: list[tuple[int, int]],
    lines: Lines,
    lost: Callable[[], str],
) -> None:
    """Put these lines in the place of the logs; not where one of them still grows."""
    paths = [log_path(run_dir, generation) for generation in generations]
    merged = paths[-1].with_name(f".{paths[-1].name}.{uuid.uuid4().hex}.tmp")
    try:
        text = (_of(*lines[step], file=generations[-1]) for step in sorted(lines))
        write_new(merged, b"".join(line + b"\n" for line in text))
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


def _of(generation: int, line: bytes, file: int) -> bytes:
    """The line, with the log that it comes from where that is not the file's."""
    if generation == file:
        return line
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
