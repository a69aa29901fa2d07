"""`gptddp prepare` continues after it was stopped, and reads no finished file again."""

import errno
import io
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.prepared import child, contents, killing, run

from gptddp.data.dataset import open_dataset
from gptddp.errors import DataError
from gptddp.prepare import reading, scratch
from gptddp.prepare.build import prepare
from gptddp.prepare.phases import Phases
from gptddp.prepare.recipe import Settings
from gptddp.prepare.scratch import Scratch

FILES = 12
SETTINGS = Settings(vocab_size=300, val_fraction=0.1, max_bad=100, seed=5)
# Prepares the sources; the journal has a line after each file. Prints every source that is opened.
CHILD = """
import os, sys
from gptddp.prepare import reading, scratch
scratch._EVERY_S = scratch._COST = 0
reading.PART_BYTES = 5000
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and "sources" in os.fsdecode(args[0]):
        name = os.path.basename(os.fsdecode(args[0]))
        name[:2].isdigit() and print(name, flush=True)
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module", autouse=True)
def small_parts() -> Iterator[None]:
    """Most documents are cut into marked parts, like huge ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "PART_BYTES", 5000)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of several pieces, copies, bad lines and arrays."""
    folder = tmp_path_factory.mktemp("resume") / "sources"
    folder.mkdir()
    for n in range(FILES):
        if n % 4 == 0:
            lines = "".join(f"book {n}, line {i}\n" for i in range(4000))
            (folder / f"{n:02}.txt").write_text(lines)
        elif n % 4 == 3:
            (folder / f"{n:02}.json").write_text(json.dumps([{"text": f"{n} {i}"} for i in "abc"]))
        else:
            texts = [f"{i} " * i + f"text {n} {i} " * 700 for i in range(12)]
            texts += ["a copy"] * n
            rows = [json.dumps({"text": text}) for text in texts] + ["bad " * n]
            (folder / f"{n:02}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def whole(sources: Path) -> dict[str, bytes]:
    """The dataset that an undisturbed process makes of them."""
    prepare([sources], sources.parent / "whole", SETTINGS)
    return contents(sources.parent / "whole")


@pytest.fixture
def killed(sources: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """killed(function, calls): prepare in a process that is killed at this call.

    Returns the sources that it has opened, each once.
    """

    def go(moment: str, calls: int, given: Path = sources) -> list[str]:
        code = CHILD + killing(moment, calls)
        result = child(f"{code}prepare([{str(given)!r}], {str(tmp_path / 'out')!r}, {SETTINGS})")
        assert result.returncode == -signal.SIGKILL, result.stderr
        return list(dict.fromkeys(result.stdout.split()))

    return go


@pytest.fixture
def finished(sources: Path, tmp_path: Path) -> Callable[[], int]:
    """finished(): run the same command to its end; returns the number of sources that it read."""

    def go() -> int:
        said = io.StringIO()
        prepare([sources], tmp_path / "out", SETTINGS, Phases(said))
        number = re.search(r"^reading (\d+) files", said.getvalue(), re.M)
        return int(number[1]) if number else 0

    return go


SAVE = "gptddp.prepare.scratch.Scratch.save"


@pytest.mark.parametrize(
    ("moment", "calls", "done"),
    [
        ("gptddp.prepare.shuffle.Shuffle.add", 70, None),
        (SAVE, 5, 4),
        ("gptddp.prepare.scratch.fsync", 6, None),
        ("gptddp.prepare.shard_writer.ShardWriter.add", 40, FILES),
        ("gptddp.prepare.shard_writer.fsync", 2, FILES),
        ("gptddp.prepare.build.fsync", 1, FILES),
        ("gptddp.prepare.output.fsync", 1, FILES),
        ("gptddp.prepare.output.fsync", 3, FILES),  # after the rename
    ],
)
def test_prepare_continues_after_a_kill_with_the_same_bytes(
    killed, finished, tmp_path: Path, whole: dict[str, bytes], moment: str, calls: int, done: int
) -> None:
    """SIGKILL at any moment leaves no partial dataset; finished files are not read again."""
    first = killed(moment, calls)
    if not (tmp_path / "out/dataset.json").exists():
        words = "preparation has not finished.*run the same command again"
        with pytest.raises(DataError, match=words):
            open_dataset(tmp_path / "out")
    second = finished()
    if done is not None:
        assert second == FILES - done
    assert len(first) + second <= FILES + 2  # the file being read, and one just finished
    assert contents(tmp_path / "out") == whole


def test_prepare_recovers_from_a_torn_journal_and_a_short_file(
    killed, finished, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """The files of a torn last line are read again, and the next line is separate. If a file is
    shorter than in the journal, everything is read again."""
    folder = tmp_path / "out/.prepare"
    assert len(killed("gptddp.prepare.reading.Reading._read_file", 7)) == 6
    journal = folder / scratch.JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    assert len(killed(SAVE, 4)) == 4  # three of them are saved
    journal.write_bytes(journal.read_bytes() + lines[-1][:-1])  # complete except for its line end
    assert len(killed("gptddp.prepare.build.choose", 1)) == FILES - 8
    assert [json.loads(line) for line in journal.read_text().splitlines()]
    bucket = max(folder.glob("[0-9]*"), key=lambda path: path.stat().st_size)
    os.truncate(bucket, bucket.stat().st_size - 1)
    assert finished() == FILES
    assert contents(tmp_path / "out") == whole


def test_changed_sources_and_settings_are_noticed(killed, sources: Path, tmp_path: Path) -> None:
    """Prepare starts again if a finished file has changed, is gone, or must be read differently.

    New files, files not read yet, and settings of later steps may change.
    """
    mine, out, left = tmp_path / "sources", tmp_path / "out", tmp_path / "left"
    shutil.copytree(sources, mine)
    killed("gptddp.prepare.reading.Reading._read_file", 7, mine)
    shutil.copytree(out, left)

    def again(*options: object) -> str:
        shutil.rmtree(out)
        shutil.copytree(left, out)
        result = run(mine, "--out", out, "--max-bad", 100, "--vocab-size", 300, *options)
        assert result.exit_code == 0, result.output
        return result.stderr

    starts_again = "earlier progress cannot be used, starting again: "
    assert starts_again + "seed 5 -> 6" in again("--seed", 6)
    (mine / "13.txt").write_text("new")
    (mine / "11.json").write_text('{"text": "mended"}')
    options = ["--seed", 5, "--val-fraction", 0.2]
    assert "reading 7 files (6 have been read before)" in again(*options)
    new = tmp_path / "new"
    run(mine, "--out", new, "--max-bad", 100, "--vocab-size", 300, *options)
    assert contents(new) == contents(out)
    os.utime(mine / "03.json", ns=(2, 2))
    assert starts_again + "03.json has changed since it was read" in again("--seed", 5)
    (mine / "02.jsonl").unlink()
    assert starts_again + "02.jsonl and 1 more" in again("--seed", 5)


@pytest.mark.parametrize(
    ("method", "calls", "error"),
    [
        ("append", 150, OSError(errno.ENOSPC, "No space left")),
        ("save", 5, OSError(errno.ENOSPC, "No space left")),
        ("append", 150, KeyboardInterrupt()),
    ],
)
def test_prepare_continues_after_a_full_disk_or_ctrl_c(
    finished, sources: Path, tmp_path: Path, whole, monkeypatch, method: str, calls: int, error
) -> None:
    """The shuffle or the journal cannot grow, or Ctrl-C is pressed: saved progress is used."""
    real, left = getattr(Scratch, method), iter(range(10**6))

    def failing(*args: object) -> object:
        if next(left) >= calls:
            raise error
        return real(*args)

    monkeypatch.setattr(scratch, "_EVERY_S", 0)
    monkeypatch.setattr(scratch, "_COST", 0)
    monkeypatch.setattr(Scratch, method, failing)
    result = run(sources, "--out", tmp_path / "out", "--max-bad", 100, "--seed", 5)
    if isinstance(error, OSError):
        assert result.exit_code == 2 and "Progress is kept in" in result.stderr
    else:
        assert result.exit_code == 130
    monkeypatch.undo()
    assert 0 < finished() < FILES
    assert contents(tmp_path / "out") == whole
