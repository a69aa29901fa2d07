"""Saves the documents read so far, so that the next process continues from there.

The scratch folder holds append-only files, and a journal. A line of the journal has the sources
that have been read, the length of each file, and the counts; it is written when all of that is
durable. Data beyond these lengths, and a torn last line, are cut off.
"""

import json
import os
import shutil
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from gptddp import __version__
from gptddp.files import exists, fsync
from gptddp.prepare.listing import name_in

JOURNAL = "journal.jsonl"
# Seconds between two lines: a kill costs at most this much, plus the source that is being read.
_EVERY_S = 5.0
_COST = 20  # and at least this many times as long as the last line took


class Scratch:
    """`done`: identities of the sources that have been read; `counts`: their counts."""

    def __init__(self, folder: Path, how: Mapping[str, Any]) -> None:
        """`how`: the settings that determine how a source is read. All methods raise OSError."""
        self.folder = folder
        self.done: set[str] = set()
        self.counts: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}  # of the files, appended bytes included
        self._how = {"gptddp": __version__, **how}
        self._open = ExitStack()
        self._files: dict[str, IO[bytes]] = {}
        self._line: dict[str, Any] = {"files": []}  # the next line
        self._next_s = time.monotonic() + _EVERY_S

    def load(self, sources: Collection[str]) -> str | None:
        """Continue from the state of another process; if it cannot be used, return the reason.

        `sources`: the identities of all sources to read.
        """
        found = self._lines()
        if not found:
            self.clear()
            return None
        how, *lines = found
        if changed := [name for name, now in self._how.items() if how.get(name) != now]:
            return ", ".join(
                f"{name.replace('_', '-')} {how.get(name)} -> {self._how[name]}" for name in changed
            )
        for line in lines:
            self.done |= set(line["files"])
            self.lengths, self.counts = line["lengths"], line["counts"]
        if gone := sorted(self.done.difference(sources)):
            more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
            return f"{name_in(gone[0])}{more} has changed since it was read, or is not given now"
        return self._cut()

    def clear(self) -> None:
        """Remove everything, the journal first, so that no process continues from a part of it."""
        self.done, self.counts, self.lengths = set(), {}, {}
        (self.folder / JOURNAL).unlink(missing_ok=True)
        fsync(self.folder)
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def append(self, name: str, data: bytes) -> None:
        """Append to a file; the data are durable after `save`."""
        if name not in self._files:
            file = open(self.folder / name, "ab", buffering=1 << 16)  # noqa: SIM115, see close
            self._files[name] = self._open.enter_context(file)
        self._files[name].write(data)
        self.lengths[name] = self.lengths.get(name, 0) + len(data)

    def finish(self, source: str, counts: Mapping[str, Any]) -> None:
        """Record that a source has been read to its end; every few seconds call `save`."""
        self.done.add(source)
        self._line["files"].append(source)
        self._line |= {"lengths": dict(self.lengths), "counts": dict(counts)}
        if time.monotonic() >= self._next_s:
            self.save()

    def save(self) -> None:
        """Make the data of finished sources durable, then add them to the journal."""
        if not self._line["files"]:
            return
        begin, path = time.monotonic(), self.folder / JOURNAL
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        fsync(self.folder)
        rows = [self._line] if exists(path) else [self._how, self._line]
        with open(path, "ab") as journal:
            journal.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            journal.flush()
            os.fsync(journal.fileno())
        fsync(self.folder)
        self._line = {"files": []}
        now = time.monotonic()
        self._next_s = now + max(_EVERY_S, _COST * (now - begin))

    def close(self) -> None:
        """Close the files. The folder stays."""
        self._open.close()

    def _lines(self) -> list[dict[str, Any]]:
        """All whole lines of the journal; cuts off the rest of it."""
        path, found, end = self.folder / JOURNAL, [], 0
        if not exists(path):
            return []
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                found.append(json.loads(line if line.endswith(b"\n") else b""))
            except ValueError:
                break
            end += len(line)
        os.truncate(path, end)
        return found

    def _cut(self) -> str | None:
        """Cut the files to their lengths; returns a message if one is shorter."""
        for path in self.folder.iterdir():
            if path.name != JOURNAL and path.stat().st_size > self.lengths.get(path.name, 0):
                os.truncate(path, self.lengths.get(path.name, 0))
        for name, length in self.lengths.items():
            path = self.folder / name
            if not exists(path) or path.stat().st_size < length:
                return f"{path} is shorter than {length} bytes"
        return None
