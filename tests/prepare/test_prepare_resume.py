"""`gptddp prepare` goes on where another process was stopped, and reads no finished file again."""

import errno
import io
import json
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.prepared import child, contents, killing, run

from gptddp.data.dataset import open_dataset
from gptddp.errors import DataError
from gptddp.prepare import journal
from gptddp.prepare.build import prepare
from gptddp.prepare.progress_bar import ProgressBar
from gptddp.prepare.reading import Reading
from gptddp.prepare.recipe import Settings
from gptddp.prepare.shuffle import Shuffle

FILES = 12
SETTINGS = Settings(vocab_size=300, val_fraction=0.1, on_bad="skip", seed=5)
# Prepares the sources; the journal has a line after each file. Prints every source that is opened.
CHILD = """
import os, sys
from gptddp.prepare import journal
journal._EVERY_S = journal._COST = 0
def hook(event, args):
    if event == "open" and isinstance(args[0], (str, bytes)) and "sources" in os.fsdecode(args[0]):
        name = os.path.basename(os.fsdecode(args[0]))
        name[:2].isdigit() and print(name, flush=True)
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of several pieces, copies, bad lines and arrays."""
    folder = tmp_path_factory.mktemp("resume") / "sources"
    folder.mkdir()
    for n in range(FILES):
        if n % 4 == 0:
            lines = "".join(f"book {n}, line {i}\n" for i in range(9000))
            (folder / f"{n:02}.txt").write_text(lines)
        elif n % 4 == 3:
            (folder / f"{n:02}.json").write_text(json.dumps([{"text": f"{n} {i}"} for i in "abc"]))
        else:
            random.seed(n)
            texts = [f"{i} " * i + random.randbytes(4000).hex() for i in range(12)]
            texts += ["a copy"] * n
            rows = [json.dumps({"text": text}) for text in texts] + ["bad " * n]
            (folder / f"{n:02}.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture(scope="module")
def whole(sources: Path) -> dict[str, bytes]:
    """What an undisturbed process makes of them."""
    prepare([sources], sources.parent / "whole", SETTINGS)
    return contents(sources.parent / "whole")


@pytest.fixture
def killed(sources: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """killed(function, calls): prepare in a process that ends there by SIGKILL.

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
    """finished(): the same command to its end; how many sources it has read."""

    def go() -> int:
        said = io.StringIO()
        with ProgressBar(said) as bar:
            prepare([sources], tmp_path / "out", SETTINGS, bar)
        (number,) = re.findall(r"^reading (\d+) files", said.getvalue(), re.M)
        return int(number)

    return go


READ = "gptddp.prepare.reading.Reading._read_file"


@pytest.mark.parametrize(
    ("moment", "calls", "done"),
    [
        ("gptddp.prepare.shuffle.Shuffle.add", 70, None),
        ("gptddp.prepare.shuffle.Shuffle.save", 5, 4),
        ("gptddp.prepare.journal.os.fsync", 60, None),
        ("gptddp.prepare.journal.fsync", 5, None),
        ("gptddp.prepare.bad_records.fsync", 4, None),
        ("gptddp.prepare.shard_writer.ShardWriter.add", 40, FILES),
        ("gptddp.prepare.bad_records.BadRecords.copy", 1, FILES),
        ("gptddp.prepare.output.fsync", 1, FILES),
    ],
)
def test_killed_it_goes_on_and_ends_with_the_same_bytes(
    killed, finished, tmp_path: Path, whole: dict[str, bytes], moment: str, calls: int, done: int
) -> None:
    """SIGKILL at any moment: finished files are not read again, and no byte is another."""
    first = killed(moment, calls)
    second = finished()
    if done is not None:
        assert second == FILES - done
    assert len(first) + second <= FILES + 2  # the file in work, and one just ended
    assert contents(tmp_path / "out") == whole


def test_killed_many_times(killed, finished, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Each life ends four files and dies in the next: that one alone is opened twice."""
    assert len(killed(READ, 5)) == 4
    assert len(killed("gptddp.prepare.shuffle.Shuffle.save", 4)) == 4
    assert finished() == FILES - 7
    assert contents(tmp_path / "out") == whole


def test_torn_lines_and_missing_files_of_the_scratch_folder(
    killed, finished, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """A torn last line costs its files; a file of the shuffle that is short costs all."""
    scratch = tmp_path / "out/.prepare"
    killed(READ, 7)
    file = scratch / journal.NAME
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:30])
    assert len(killed("gptddp.prepare.build.choose", 1)) == FILES - 5
    assert [json.loads(line) for line in file.read_text().splitlines()]
    bucket = max((scratch / "shuffle").iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(bucket, bucket.stat().st_size - 1)
    assert finished() == FILES
    assert contents(tmp_path / "out") == whole


def test_changed_sources_and_settings_are_noticed(killed, sources: Path, tmp_path: Path) -> None:
    """A read file that has changed or gone, another way of reading: named, and started again.

    Files that are new or not read yet, and what decides only later steps, may change.
    """
    mine, out, left = tmp_path / "sources", tmp_path / "out", tmp_path / "left"
    shutil.copytree(sources, mine)
    killed(READ, 7, mine)
    shutil.copytree(out, left)

    def again(*options: object) -> str:
        shutil.rmtree(out)
        shutil.copytree(left, out)
        result = run(mine, "--out", out, "--on-bad", "skip", "--vocab-size", 300, *options)
        assert result.exit_code == 0, result.output
        return result.stderr

    again_it_says = "what was read before cannot be used, starting again: "
    assert again_it_says + "seed 5 -> 6" in again("--seed", 6)
    (mine / "13.txt").write_text("new")
    (mine / "11.json").write_text('{"text": "mended"}')
    options = ["--seed", 5, "--keep-copies", "--val-fraction", 0.2]
    assert "reading 7 files (6 have been read before)" in again(*options)
    new = tmp_path / "new"
    run(mine, "--out", new, "--on-bad", "skip", "--vocab-size", 300, *options)
    assert contents(new) == contents(out)
    os.utime(mine / "03.json", ns=(2, 2))
    assert again_it_says + "03.json has changed since it was read" in again("--seed", 5)
    (mine / "02.jsonl").unlink()
    assert again_it_says + "02.jsonl and 1 more" in again("--seed", 5)


def test_a_full_disk_keeps_what_was_read(
    finished, sources: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """When there is space again, the same command goes on; no half dataset can be opened."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    args = ["prepare", str(sources), "--out", str(tmp_path / "out"), "--on-bad", "skip"]
    args += ["--vocab-size", "300", "--val-fraction", "0.1", "--seed", "5"]
    main = f"from gptddp import main; sys.argv[1:] = {args}; main()"
    result = child(CHILD + main, preexec_fn=limit)
    assert result.returncode == 2 and "no space left for" in result.stderr, result.stderr
    assert f"What was read is kept in {tmp_path / 'out/.prepare'}" in result.stderr
    assert os.listdir(tmp_path / "out") == [".prepare"]
    assert finished() == 0
    assert contents(tmp_path / "out") == whole


@pytest.mark.parametrize(("method", "calls"), [("_write", 60), ("save", 5)])
def test_a_disk_that_is_full_while_reading(
    finished, sources: Path, tmp_path: Path, whole, monkeypatch, method: str, calls: int
) -> None:
    """Neither the shuffle nor the journal can grow: what was durable before is gone on from."""
    real, left = getattr(Shuffle, method), iter(range(10**6))

    def full(*args: object) -> object:
        if next(left) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(journal, "_EVERY_S", 0)
    monkeypatch.setattr(journal, "_COST", 0)
    monkeypatch.setattr(Shuffle, method, full)
    with pytest.raises(DataError, match=r"no space left .* What was read is kept in .*/\.prepare"):
        prepare([sources], tmp_path / "out", SETTINGS)
    with pytest.raises(DataError, match="preparation has not finished"):
        open_dataset(tmp_path / "out")
    monkeypatch.undo()
    assert 0 < finished() < FILES
    assert contents(tmp_path / "out") == whole


def test_interrupted_it_goes_on(
    finished, sources: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch
) -> None:
    """Ctrl-C while reading keeps the files that are done, and says so."""
    real, calls = Reading._read_file, iter(range(FILES))

    def interrupt(*args: object) -> None:
        if next(calls) == 6:
            raise KeyboardInterrupt
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Reading, "_read_file", interrupt)
    monkeypatch.setattr(journal.Journal, "due", lambda _: True)
    result = run(sources, "--out", tmp_path / "out", "--on-bad", "skip", "--seed", 5)
    assert "6 files that have been read are kept" in result.stderr
    monkeypatch.undo()
    assert finished() == FILES - 6
    assert contents(tmp_path / "out") == whole


def test_a_shuffle_that_is_taken_over_is_the_same(tmp_path: Path) -> None:
    """Its documents, their number and their bytes; what was added after the lengths is gone."""
    texts = [b"%d" % n * (n % 9) for n in range(1, 300)] * 2
    shuffles = [Shuffle(tmp_path / "one", 3), Shuffle(tmp_path / "two", 3)]
    for text in texts:
        key = shuffles[0].add(text, val=text < b"2", first=b"k" * 16)
        assert key == shuffles[1].add(text, val=text < b"2", first=b"k" * 16)
    lengths = shuffles[0].lengths()
    shuffles[0].add(b"more")
    shuffles[0].close()
    shuffles[0] = Shuffle(tmp_path / "one", 3, lengths=lengths)
    assert shuffles[0].finish() == shuffles[1].finish()
    assert shuffles[0].bytes == shuffles[1].bytes == sum(map(len, texts))
    assert list(shuffles[0].counts()) == list(shuffles[1].counts())
    assert list(shuffles[0].pieces()) == list(shuffles[1].pieces())
    assert list(shuffles[0]) == list(shuffles[1])


def test_a_source_that_is_new_has_its_place(tmp_path: Path) -> None:
    """One that comes before those that were read: no byte of the dataset tells when it came."""
    folder = tmp_path / "sources"
    folder.mkdir()

    def add(name: str) -> None:
        (folder / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\nbad\nbad\n')
        (folder / f"{name}.txt").write_text(f"line of {name}\n" * 20_000)

    for name in "bcd":
        add(name)
    how = {"tokenizer": "bytes", "on_bad": "skip"}
    with pytest.raises(DataError, match="bad record 5"):
        prepare([folder], tmp_path / "out", Settings(**how, max_bad=4))
    add("a")
    said = io.StringIO()
    prepare([folder], tmp_path / "out", Settings(**how), ProgressBar(said))
    assert "reading 4 files (4 have been read before)" in said.getvalue()
    prepare([folder], tmp_path / "undisturbed", Settings(**how))
    assert contents(tmp_path / "out") == contents(tmp_path / "undisturbed")
    with pytest.raises(DataError, match="bad record 5"):
        prepare([folder], tmp_path / "other", Settings(**how, max_bad=4))
    prepare([os.path.relpath(folder)], tmp_path / "other", Settings(**how), ProgressBar(said))
    assert said.getvalue().count("have been read before") == 2
    assert len((tmp_path / "other/bad.jsonl").read_bytes().splitlines()) == 8


def test_too_little_text_leaves_nothing(tmp_path: Path) -> None:
    """There is nothing to go on from."""
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(DataError, match="at least 2"):
        prepare([tmp_path / "one.txt"], tmp_path / "out", Settings(tokenizer="bytes"))
    assert not (tmp_path / "out").exists()
