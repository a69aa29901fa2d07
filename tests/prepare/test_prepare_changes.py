"""`gptddp prepare`: sources that change while they are read."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.prepared import BYTES, contents

from gptddp.errors import DataError
from gptddp.prepare.build import prepare
from gptddp.prepare.phases import Phases
from gptddp.prepare.recipe import Settings

TEXT = "a line of text é\n" * 150_000  # more than is read at once
JSONL = "".join(json.dumps({"text": f"{n} " * 60}) + "\n" for n in range(5_000))


class Meanwhile(Phases):
    """Calls `act` while a file is read, after its first document."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self._act: Callable[[], object] | None = act

    def begin(self, what: str, total: int = 0) -> None:
        self.reading = what.startswith("reading")

    def advance(self, units: int) -> None:
        if self.reading and units > 100 and self._act:  # in the large file
            self._act()
            self._act = None


def append(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(path.read_bytes() + data)


def overwrite(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(
        (data * (path.stat().st_size // len(data) + 1))[: path.stat().st_size]
    )


@pytest.mark.parametrize(
    ("name", "max_bad", "change"),
    [
        ("z.txt", 10**6, append(b"more\n")),
        ("z.txt", 10**6, append("é".encode()[:1])),
        ("z.txt", 10**6, lambda path: os.truncate(path, 500_000)),
        ("z.txt", 10**6, lambda path: os.truncate(path, 500_001)),
        ("z.txt", 10**6, overwrite(b"\0")),
        ("z.txt", 10**6, overwrite(b"\xbf")),  # no byte starts a character
        ("z.txt", 10**6, lambda path: os.utime(path, ns=(1, 1))),
        ("z.jsonl", 10**6, append(b'{"text": "half a li')),
        ("z.jsonl", 0, append(b'{"text": "half a li')),
        ("z.jsonl", 10**6, append(b'{"text": "a whole line"}\n')),
        ("z.jsonl", 10**6, lambda path: os.truncate(path, 500_000)),
        ("z.jsonl", 10**6, overwrite(b"x" * 999 + b"\n")),
        ("z.jsonl.gz", 10**6, overwrite(b"\0")),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, name: str, max_bad: int, change: Callable[[Path], object]
) -> None:
    """No part of it is used and no bad record is counted, however it changes; the error says so.

    Earlier files are kept, and the same command then uses the present content of the file.
    """
    folder, out = tmp_path / "sources", tmp_path / "out"
    folder.mkdir()
    for n in range(3):
        (folder / f"{n}.txt").write_text(f"text {n}")
    file = folder / name
    data = (TEXT if name == "z.txt" else JSONL).encode()
    file.write_bytes(gzip.compress(data, 1) if name.endswith("gz") else data)
    settings = Settings(tokenizer="bytes", max_bad=max_bad)
    with pytest.raises(DataError, match=rf"/{name} has changed since .* run the same command"):
        prepare([folder], out, settings, Meanwhile(lambda: change(file)))
    journal = (out / ".prepare/journal.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["files"]) for line in journal[1:]] == [3]
    file.write_text("the new text\n" if name == "z.txt" else '{"text": "the new text\\n"}\n')
    if name.endswith("gz"):
        file.write_bytes(gzip.compress(file.read_bytes()))
    prepare([folder], out, settings)
    prepare([folder], tmp_path / "whole", settings)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_file_that_is_removed_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """It could still be read to its end, but the dataset could not be made again."""
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "z.txt").write_text(TEXT)
    phases = Meanwhile((tmp_path / "z.txt").unlink)
    with pytest.raises(DataError, match=r"cannot read .*z\.txt: No such file"):
        prepare([tmp_path / "b.txt", tmp_path / "z.txt"], tmp_path / "out", BYTES, phases)
