"""How far the reading of the sources has come, so that the next process goes on from there.

A line of JSON that says what is read and how, then a line whenever some files are done: their
identities, the lengths of all files that hold what was read, and the counts so far. A line is
written when all that it tells of is durable; a torn last line is as if it were not there.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptddp import __version__
from gptddp.files import fsync
from gptddp.prepare.listing import SourceFile, name_in

NAME = "read.jsonl"  # in the scratch folder
# Seconds between two lines: what a kill costs at most, besides the file being read.
_EVERY_S = 5.0
_COST = 20  # and at least so many times what the last line took


@dataclass
class Done:
    """What earlier processes have done."""

    files: set[str] = field(default_factory=set)  # identities
    lengths: dict[str, int] = field(default_factory=dict)
    tally: dict[str, Any] = field(default_factory=dict)


class Journal:
    """Of the process that reads now."""

    def __init__(self, scratch: Path, head: Mapping[str, Any]) -> None:
        """`head`: what decides how the files are read."""
        self._path = scratch / NAME
        self._head = {"gptddp": __version__, **head}
        self._next_s = time.monotonic() + _EVERY_S

    def load(self, files: Sequence[SourceFile]) -> tuple[Done, str | None]:
        """What is done already, and why that is nothing where there was something to go on from."""
        lines = self._lines()
        if not lines:
            self.begin()
            return Done(), None
        if changed := [name for name, now in self._head.items() if lines[0].get(name) != now]:
            return Done(), ", ".join(
                f"{name.replace('_', '-')} {lines[0].get(name)} -> {self._head[name]}"
                for name in changed
            )
        done = Done()
        for line in lines[1:]:
            done.files |= set(line["files"])
            done.lengths, done.tally = line["lengths"], line["tally"]
        if gone := sorted(done.files - {file.identity for file in files}):
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            how = "has changed since it was read, or is given otherwise"
            return Done(), f"{name_in(gone[0])}{more} {how}"
        return done, None

    def begin(self) -> None:
        """Start anew: nothing is done."""
        self._path.unlink(missing_ok=True)
        fsync(self._path.parent)

    def due(self) -> bool:
        """Is it time for a line?"""
        return time.monotonic() >= self._next_s

    def add(self, done: Done) -> None:
        """Add a line for files that are done; all that it tells of must be durable."""
        line = {"files": sorted(done.files), "lengths": done.lengths, "tally": done.tally}
        with open(self._path, "ab") as file:
            before = file.tell()
            try:
                for row in [line] if before else [self._head, line]:
                    file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            except OSError:  # a full disk: what follows must not be glued to half a line
                os.ftruncate(file.fileno(), before)
                raise
        fsync(self._path.parent)

    def took(self, seconds: float) -> None:
        """Say what the last line cost, with all that had to be made durable for it."""
        self._next_s = time.monotonic() + max(_EVERY_S, _COST * seconds)

    def _lines(self) -> list[dict[str, Any]]:
        """All whole lines; a torn one is cut off the file."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self._path, len(whole))
        with contextlib.suppress(ValueError):
            return [json.loads(line) for line in whole.splitlines()]
        return []
