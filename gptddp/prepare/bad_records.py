"""Records of the sources that cannot be used: an error, or a line each in a list and a limit."""

import json
from collections.abc import Sequence
from pathlib import Path

from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare.walk import as_utf8, show

LIST = "bad.jsonl"
MAX_BAD = 100  # of --on-bad skip, where --max-bad is not given


class BadRecords:
    """Takes each bad record; `count` of them so far."""

    def __init__(self, folder: Path, on_bad: str, max_bad: int, done: tuple[int, int]) -> None:
        """The list is `folder`/bad.jsonl, of which an earlier process has made `done`: the number
        of records, and of bytes.
        """
        self._path = folder / LIST
        self._skip, self._max_bad = on_bad == "skip", max_bad
        self.count, self.bytes = done
        self._written, self._lines = self.bytes, bytearray()  # of bytes, a line more costs a copy

    def add(self, path: str, place: str, number: int, problem: str, fix: str) -> None:
        """Note a bad record, `number` of the `place` ("line", "row", "record") of a file.

        Raises DataError, naming all of it, unless it may be skipped. It writes nothing: its caller
        would take a full disk for a source that cannot be read.
        """
        between = ":" if place == "line" else f", {place} "
        where = f"{show(path)}{between}{number}"
        if not self._skip:
            raise DataError(
                f"{where}: {problem}: {fix}, or leave such records out with --on-bad skip"
            )
        self.count += 1
        line = {"file": as_utf8(path), place: number, "reason": problem}
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        self._lines += data
        self.bytes += len(data)
        if self.count > self._max_bad:
            raise DataError(
                f"{where}: {problem}; that is bad record {self.count}, and --max-bad is "
                f"{self._max_bad}: {fix}, or raise --max-bad; all of them are in {self._path}"
            )

    def save(self) -> None:
        """Make the list durable; raises OSError."""
        if not self.count:
            return
        with open(self._path, "ab") as file:
            file.truncate(self._written)
            file.write(self._lines)
        fsync(self._path)
        self._written, self._lines = self.bytes, bytearray()

    def copy(self, out: Path, files: Sequence[str]) -> None:
        """Put the list into the dataset, where there is any, in the order of `files`.

        A process that goes on reads what is new after what was read before. Raises OSError.
        """
        if self.count:
            self.save()
            place = {as_utf8(path): number for number, path in enumerate(files)}
            lines = self._path.read_bytes().splitlines(keepends=True)
            # a folder may be given by another path now
            lines.sort(key=lambda line: place.get(json.loads(line)["file"], 0))
            (out / LIST).write_bytes(b"".join(lines))
            fsync(out / LIST)
