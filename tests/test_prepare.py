"""`gptddp prepare`: what comes out, what is refused, and what a crash leaves behind."""

import bz2
import errno
import gzip
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

import gptddp
from gptddp import claim, corpus
from gptddp.cli import cli
from gptddp.corpus import Dataset, RowGroup, open_dataset
from gptddp.errors import DataError
from gptddp.prepare import prepare, unigram_entropy_nats
from gptddp.progress import Progress
from gptddp.recipe import Settings, default_vocab_size
from gptddp.sources import DOCUMENT_BYTES

BYTES = Settings(tokenizer="bytes")
CJK = "".join(chr(0x4E00 + n * 7919 % 20_000) for n in range(70_000))


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A folder of forty small documents, some of them in a subfolder."""
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    for n in range(40):
        path = folder / ("more" if n % 3 else "") / f"{n}.txt"
        path.write_text(f"book {n}: once upon a time\n" * (n + 1), "utf-8")
    return folder


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["prepare", *map(str, args)])


def refused(result: Result, *words: str) -> None:
    """The command ended with one message, exit code 2 and no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == "" and ("\n" + result.stderr).count("\nError: ") == 1
    for word in words:
        assert word in result.stderr


def texts(dataset: Dataset, split: corpus.Split) -> list[str]:
    return [text for group in dataset.row_groups(split) for text in dataset.read(group)]


def all_texts(dataset: Dataset) -> list[str]:
    return sorted(texts(dataset, "train") + texts(dataset, "val"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# -- what comes out ------------------------------------------------------------------------------


def test_every_document_is_in_one_split(books: Path, tmp_path: Path) -> None:
    """Train and validation together hold each document once, with the counts that are recorded."""
    dataset = prepare([books], tmp_path / "out", BYTES)
    assert all_texts(dataset) == sorted(p.read_text("utf-8") for p in books.rglob("*.txt"))
    assert len(texts(dataset, "val")) == 1
    for split in ("train", "val"):
        about, groups = dataset.manifest["splits"][split], dataset.row_groups(split)
        assert about["documents"] == len(texts(dataset, split)) == sum(g.rows for g in groups)
        assert about["text_bytes"] == sum(len(t.encode()) for t in texts(dataset, split))
        for group in groups:
            assert group.text_bytes == sum(len(t.encode()) for t in dataset.read(group))


def test_command_prints_a_summary_and_what_is_next(books: Path, tmp_path: Path) -> None:
    """The result is on stdout, with the command to type next; notes are on stderr."""
    out = tmp_path / "new" / "out"
    result = run(books, "--out", out)
    assert result.exit_code == 0, result.output
    assert "39 train, 1 validation" in result.stdout
    assert f"gptddp train --data {out} --run-dir RUN" in result.stdout
    assert "reading 40 files" in result.stderr
    assert sorted(os.listdir(out)) == ["dataset.json", "tokenizer.json", "train", "val"]


def test_tokenizer_and_its_figures(books: Path, tmp_path: Path) -> None:
    """The trained tokenizer is the dataset's, and the entropy is that of the validation split."""
    dataset = prepare([books], tmp_path / "out", Settings(vocab_size=280, val_fraction=0.2))
    tokenizer, about = dataset.tokenizer(), dataset.manifest["splits"]["val"]
    ids = np.concatenate([tokenizer.encoder()(text) for text in texts(dataset, "val")])
    assert (
        tokenizer.vocab_size == 280 and tokenizer.sha256 == dataset.manifest["tokenizer"]["sha256"]
    )
    assert about["tokens"] == len(ids)
    share = np.unique(ids, return_counts=True)[1] / len(ids)
    assert about["unigram_entropy_nats"] == pytest.approx(-(share * np.log(share)).sum(), abs=1e-5)
    assert unigram_entropy_nats(np.array([3, 0, 3])) == pytest.approx(np.log(2))


def test_shards_are_written_for_lanes(tmp_path: Path) -> None:
    """Row groups hold documents / 192 rows, at most 1024; zstd, checksums, no dictionary."""
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(2000)), "utf-8")
    dataset = prepare([lines], tmp_path / "out", BYTES)
    rows = [group.rows for group in dataset.row_groups("train")]
    assert set(rows[:-1]) == {1980 // 192} and sum(rows) == 1980
    file = pq.ParquetFile(tmp_path / "out" / "train" / "00000.parquet")
    column = file.metadata.row_group(0).column(0)
    assert (column.compression, column.path_in_schema) == ("ZSTD", "text")
    assert not any("DICT" in encoding for encoding in column.encodings)
    file.close()


def test_large_row_groups_and_shards_are_cut_by_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row group ends before its limit of text bytes, and a shard after its own."""
    monkeypatch.setattr(corpus, "_ROW_GROUP_BYTES", 1000)
    monkeypatch.setattr(corpus, "_SHARD_BYTES", 3000)
    with corpus.ShardWriter(tmp_path, "train", 1024) as writer:
        for n in range(20):
            writer.add(b"%03d" % n * 100)
        writer.add(b"long" * 1000)
        about = writer.close()
    assert [len(file["row_groups"]) for file in about["files"]] == [4, 4]
    assert about["files"][0]["row_groups"] == [[3, 900]] * 4
    assert about["documents"] == 21 and about["text_bytes"] == 10_000


def test_text_files_jsonl_and_parquet_mix(tmp_path: Path) -> None:
    """Every format, compressed too, in one folder, with each suffix read as it should be."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    line = json.dumps({"id": 1, "text": "from %s é"}, ensure_ascii=False) + "\n\n"
    (folder / "a.jsonl").write_text("\ufeff" + line % "jsonl", "utf-8")
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress((line % "gz one").encode()) + gzip.compress((line % "gz two").encode())
    )
    zst = pa.BufferOutputStream()
    with pa.CompressedOutputStream(zst, "zstd") as stream:
        stream.write((line % "zst").encode())
    (folder / "c.ndjson.zst").write_bytes(zst.getvalue())
    (folder / "d.json.gz").write_bytes(gzip.compress((line % "json.gz").encode()))
    (folder / "e.txt.bz2").write_bytes(bz2.compress("from bz2 é".encode()))
    (folder / "f.json").write_text('{"a document": "as it is"}', "utf-8")
    (folder / "g").write_text("\ufefffrom text é", "utf-8")
    pq.write_table(pa.table({"text": ["from parquet é", None, ""]}), folder / "h.parquet")
    words = pa.array([b"from binary", b"from dictionary"]).dictionary_encode()
    pq.write_table(pa.table({"text": words, "n": [1, 2]}), folder / "i.parquet")
    dataset = prepare([folder], tmp_path / "out", BYTES)
    names = ["bz2", "gz one", "gz two", "json.gz", "jsonl", "parquet", "text", "zst"]
    expected = [f"from {name} é" for name in names]
    expected += ["from binary", "from dictionary", '{"a document": "as it is"}']
    assert all_texts(dataset) == sorted(expected)
    assert dataset.manifest["dropped"] == {"empty": 2, "duplicate": 0, "binary_files": 0}


def test_text_field_names_field_and_column(tmp_path: Path) -> None:
    """--text-field is for JSONL and parquet alike."""
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n', "utf-8")
    pq.write_table(pa.table({"body": ["three"], "text": ["no"]}), tmp_path / "b.parquet")
    sources = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    result = run(*sources, "--text-field", "body", "--tokenizer", "bytes", "--out", tmp_path / "o")
    assert result.exit_code == 0, result.output
    assert all_texts(open_dataset(tmp_path / "o")) == ["one", "three", "two"]


def test_empty_documents_and_copies_are_dropped(books: Path, tmp_path: Path) -> None:
    """Files without text and exact copies are dropped and counted, whatever they are called."""
    (books / "empty.txt").write_text("")
    (books / "blank.txt").write_text(" \n\t\n")
    shutil.copy(books / "0.txt", books / "copy.md")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        json.dumps({"text": (books / "3.txt").read_text("utf-8")}) + '\n{"text": null}'
    )
    dataset = prepare([books, lines], tmp_path / "out", BYTES)
    assert len(all_texts(dataset)) == 40
    assert dataset.manifest["dropped"] == {"empty": 3, "duplicate": 2, "binary_files": 0}


def test_odd_text_survives(tmp_path: Path) -> None:
    """NUL bytes in JSON, half surrogates, carriage returns and <|bos|> come out as they should."""
    cases = ["a\x00b", "\ud83d alone", "\ud83d\ude42", "a\r\nb", "<|bos|>", "\ufeffmark", "e\u0301"]
    lines = tmp_path / "odd.jsonl"
    lines.write_text("".join(json.dumps({"text": case}) + "\n" for case in cases))
    dataset = prepare([lines], tmp_path / "out", Settings(vocab_size=257))
    cases[1:3] = ["\ufffd alone", "🙂"]
    assert all_texts(dataset) == sorted(cases)


def test_a_long_text_file_is_several_documents(tmp_path: Path) -> None:
    """One book is enough: it is cut at line ends, or between characters, and nothing is lost."""
    book = "".join(f"line {n} é\n" for n in range(20_000)) + CJK + "\nend"
    (tmp_path / "book.txt").write_text(book, "utf-8")
    dataset = prepare([tmp_path / "book.txt"], tmp_path / "out", BYTES)
    pieces = all_texts(dataset)
    assert 6 < len(pieces) < 12 and sum(map(len, pieces)) == len(book)
    assert max(len(piece.encode()) for piece in pieces) <= DOCUMENT_BYTES
    assert all(piece in book for piece in pieces)
    assert sum(piece.endswith("\n") for piece in pieces) >= len(pieces) - 5


def test_folders_are_read_with_care(books: Path, tmp_path: Path) -> None:
    """Hidden names, loops of links, broken links, pipes, and what is excluded are passed over."""
    (books / ".git").mkdir()
    (books / ".git" / "config").write_text("hidden")
    (books / ".hidden.txt").write_text("hidden")
    (books / "more" / "loop").symlink_to(books)
    (books / "again.txt").symlink_to(books / "0.txt")
    (books / "broken").symlink_to(books / "nothing")
    os.mkfifo(books / "pipe")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "linked.txt").write_text("behind a link")
    (books / "link").symlink_to(elsewhere)
    (books / "more" / "tests").mkdir()
    (books / "more" / "tests" / "t.txt").write_text("excluded")
    (books / "more" / "x.log").write_text("not included")
    args = ["--include", "*.txt", "--exclude", "tests/", "--exclude", "more/1*.txt"]
    result = run(
        books, elsewhere, books / "0.txt", *args, "--tokenizer", "bytes", "--out", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    dataset = open_dataset(tmp_path / "out")
    assert dataset.manifest["dropped"]["duplicate"] == 1  # again.txt; nothing else was read twice
    found = all_texts(dataset)
    kept = [p for p in books.glob("[0-9]*.txt")] + [
        p for p in books.glob("more/[0-9]*.txt") if not p.name.startswith("1")
    ]
    assert found == sorted([p.read_text("utf-8") for p in kept] + ["behind a link"])


def test_binary_files_of_a_folder_are_skipped_and_named(books: Path, tmp_path: Path) -> None:
    """Files with NUL bytes or broken UTF-8, wherever in them, give one warning with a count."""
    (books / "nul.bin").write_bytes(b"text\0text")
    (books / "late.txt").write_bytes(b"text\n" * 500_000 + b"\xff")
    (books / "cut.txt").write_bytes("é".encode()[:1])
    result = run(books, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "not UTF-8 text: 3 (" in result.stderr
    assert "nul.bin" in result.stderr and "late.txt" in result.stderr
    assert len(all_texts(open_dataset(tmp_path / "out"))) == 40


def test_given_tokenizer_is_copied(books: Path, tmp_path: Path) -> None:
    """--tokenizer FILE puts that very file into the dataset."""
    prepare([books], tmp_path / "one", Settings(vocab_size=280))
    file = tmp_path / "one" / "tokenizer.json"
    result = run(books, "--tokenizer", file, "--out", tmp_path / "two")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert open_dataset(tmp_path / "two").tokenizer().vocab_size == 280


# -- the same again ------------------------------------------------------------------------------


def test_same_input_gives_the_same_bytes(books: Path, tmp_path: Path) -> None:
    """Twice the same sources, in another process with other hashing: every byte is the same."""
    prepare([books], tmp_path / "one", Settings(vocab_size=300))
    child(f"prepare([{str(books)!r}], {str(tmp_path / 'two')!r}, Settings(vocab_size=300))")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_order_follows_content_and_seed_only(books: Path, tmp_path: Path) -> None:
    """Other names, folders and formats give the same shards; another seed gives other ones."""
    renamed = tmp_path / "renamed.jsonl"
    documents = [path.read_text("utf-8") for path in sorted(books.rglob("*.txt"), reverse=True)]
    renamed.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    one = prepare([books], tmp_path / "one", BYTES)
    two = prepare([renamed], tmp_path / "two", BYTES)
    three = prepare([books], tmp_path / "three", Settings(tokenizer="bytes", seed=2))
    assert one.sha256 == two.sha256 != three.sha256
    assert texts(one, "train") == texts(two, "train") != sorted(texts(one, "train"))
    assert all_texts(one) == all_texts(three) and texts(one, "train") != texts(three, "train")


def test_prepared_is_prepared(books: Path, tmp_path: Path) -> None:
    """The same command again does nothing; other settings or sources are refused, with the diff."""
    out = tmp_path / "out"
    assert run(books, "--out", out, "--vocab-size", 300).exit_code == 0
    before = contents(out)
    again = run(books, "--out", out, "--vocab-size", 300)
    assert again.exit_code == 0 and "already prepared" in again.stderr
    assert "next        gptddp train" in again.stdout
    refused(run(books, "--out", out), "--vocab-size 300 -> None", "choose another --out")
    refused(run(books, "--out", out, "--vocab-size", 300, "--include", "*"), "--include [] -> ")
    os.utime(books / "0.txt", ns=(1, 1))
    refused(run(books, "--out", out, "--vocab-size", 300), "the source files", "remove")
    assert contents(out) == before


def test_output_inside_the_source_is_not_read(books: Path, tmp_path: Path) -> None:
    """`gptddp prepare . --out data` does not read its own output the second time."""
    for _ in range(2):
        result = run(books, "--out", books / "data", "--tokenizer", "bytes")
        assert result.exit_code == 0, result.output
    assert len(all_texts(open_dataset(books / "data"))) == 40


# -- wrong input ---------------------------------------------------------------------------------


def test_wrong_sources_are_refused(books: Path, tmp_path: Path) -> None:
    """A missing, binary or empty source gets one message with the fix, and nothing is left."""
    binary = tmp_path / "image.png"
    binary.write_bytes(b"\x89PNG\0\0")
    only_binary, empty = tmp_path / "binaries", tmp_path / "empty"
    only_binary.mkdir(), empty.mkdir()
    shutil.copy(binary, only_binary)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "one.txt").write_text("just one document")
    out = tmp_path / "new" / "out"
    cases: list[tuple[Path, list[str]]] = [
        (tmp_path / "absent", ["absent: No such file", "check the path"]),
        (binary, ["image.png has NUL bytes", "UTF-8", "iconv"]),
        (only_binary, ["0 documents", "1 binary files", "give more text"]),
        (empty, ["no files to read", "give text"]),
        (tmp_path / "pipe", ["neither a file nor a folder"]),
        (tmp_path / "one.txt", ["1 documents", "at least 2"]),
    ]
    for source, words in cases:
        refused(run(source, "--out", out), *words)
        assert not (tmp_path / "new").exists()
    refused(run(books, "--include", "*.rs", "--out", out), "no files", "--include")
    assert not (tmp_path / "new").exists()


def test_wrong_lines_and_columns_are_refused(tmp_path: Path) -> None:
    """A bad record is named by file and line or row, with the rule and the fix."""
    good = '{"text": "fine"}\n'
    deep = '{"text": ' + "[" * 100_000
    lines = {
        '{"text": "cut': ["not valid JSON", "mend or remove"],
        '"only a string"': ["no field 'text'"],
        '{"body": "x"}': ["no field 'text', but the fields 'body'", "--text-field"],
        '{"text": 5}': ["of type int", "must be a string"],
        deep: ["not valid JSON"],
    }
    for line, words in lines.items():
        (tmp_path / "x.jsonl").write_text(good + "\n" + line + "\n")
        result = run(tmp_path / "x.jsonl", "--out", tmp_path / "out")
        refused(result, "x.jsonl:3: ", *words)
    (tmp_path / "x.jsonl").write_bytes(good.encode() + b'{"text": "\xff"}')
    refused(run(tmp_path / "x.jsonl", "--out", tmp_path / "out"), "x.jsonl:2: ", "UTF-8")
    pq.write_table(pa.table({"body": ["a"], "text": [1]}), tmp_path / "x.parquet")
    result = run(tmp_path / "x.parquet", "--out", tmp_path / "out")
    refused(result, "column 'text' is of type int64", "--text-field")
    result = run(tmp_path / "x.parquet", "--out", tmp_path / "out", "--text-field", "words")
    refused(result, "no column 'words', but 'body', 'text'")
    assert not (tmp_path / "out").exists()


def test_damaged_sources_are_refused(tmp_path: Path) -> None:
    """Truncated gzip and parquet files are named; nothing of them is used."""
    lines = "".join(f'{{"text": "document {n}"}}\n' for n in range(5000)).encode()
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    refused(run(tmp_path / "x.jsonl.gz", "--out", tmp_path / "out"), "x.jsonl.gz", "Truncated")
    (tmp_path / "x.txt.gz").write_bytes(b"not gzip")
    refused(run(tmp_path / "x.txt.gz", "--out", tmp_path / "out"), "x.txt.gz", "cannot read")
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "x.parquet")
    data = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(data[: len(data) // 2])
    refused(run(tmp_path / "x.parquet", "--out", tmp_path / "out"), "not a readable parquet file")
    invalid = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")]
    )
    pq.write_table(pa.table({"text": invalid}), tmp_path / "x.parquet")
    refused(run(tmp_path / "x.parquet", "--out", tmp_path / "out"), "UTF8")
    assert not (tmp_path / "out").exists()


def test_wrong_options_are_refused(books: Path, tmp_path: Path) -> None:
    """Each option says its rule; a misspelt one is recognised."""
    out = tmp_path / "out"
    cases = {
        "--val-fraction=0": "between 0 and 1",
        "--vocab-size=100": "257",
        "--seed=-1": "from 0",
        "--tokenizer=absent.json": "use bpe, bytes, or a tokenizer.json that exists",
        "--vocab-siz=300": "--vocab-size",
    }
    for option, words in cases.items():
        refused(run(books, "--out", out, option), words)
    refused(run(books, "--out", out, "--tokenizer=bytes", "--vocab-size=300"), "leave it out")
    (tmp_path / "t.json").write_text("{}")
    refused(run(books, "--out", out, "--tokenizer", tmp_path / "t.json"), "t.json", "byte-level")
    assert not out.exists()


def test_wrong_outputs_are_refused(books: Path, tmp_path: Path) -> None:
    """An output with other files, that is a file, or that holds a source, stays as it was."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    refused(run(books, "--out", other), "other files (mine.txt)", "--out")
    assert contents(other) == {"mine.txt": b"mine"}
    refused(run(books, "--out", other / "mine.txt"), "cannot write to", "mine.txt", "--out")
    refused(run(books, "--out", other / "mine.txt" / "below"), "cannot write to")
    refused(run(books, "--out", tmp_path), "lies in the output", "choose an --out")
    refused(run(books / "0.txt", "--out", books), "lies in the output")
    assert contents(other) == {"mine.txt": b"mine"}


def test_a_volume_with_lost_and_found_is_empty_enough(books: Path, tmp_path: Path) -> None:
    """The root of a fresh ext4 volume can be the output; it is left in place after an error."""
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    (tmp_path / "one.txt").write_text("one")
    assert run(tmp_path / "one.txt", "--out", tmp_path / "out").exit_code == 2
    assert os.listdir(tmp_path / "out") == ["lost+found"]
    assert run(books, "--out", tmp_path / "out").exit_code == 0


# -- crashes, full disks, two at once ------------------------------------------------------------


def child(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with everything that these tests import."""
    head = "from gptddp import *\nfrom gptddp.prepare import *\nfrom gptddp.recipe import *\n"
    env = {**os.environ, "PYTHONPATH": str(Path(gptddp.__file__).parents[1]), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        ("gptddp.shuffle.Shuffle.finish", 1),
        ("gptddp.tokens.train_bpe", 1),
        ("gptddp.corpus.ShardWriter.add", 10),
        *(("gptddp.corpus.fsync", calls) for calls in range(1, 5)),
        *(("gptddp.prepare.fsync", calls) for calls in range(1, 5)),
        ("gptddp.claim._remove", 1),
    ],
)
def test_killed_at_any_moment_it_starts_cleanly(
    books: Path, tmp_path: Path, moment: str, calls: int
) -> None:
    """SIGKILL in each phase leaves no half dataset, and the next run gives the very same bytes."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    prepare([books], whole, Settings(vocab_size=300))
    owner, name = moment.rsplit(".", 1)
    result = child(
        f"""
import os, pydoc, signal
owner = pydoc.locate({owner!r})
real, calls = owner.{name}, 0
def killing(*args, **kwargs):
    global calls
    calls += 1
    if calls == {calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
owner.{name} = killing
prepare([{str(books)!r}], {str(out)!r}, Settings(vocab_size=300))
"""
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    if not (out / "dataset.json").exists():
        with pytest.raises(
            DataError, match="preparation has not finished.*run the same command again"
        ):
            open_dataset(out)
    prepare([books], out, Settings(vocab_size=300))
    assert contents(out) == contents(whole)


def test_leftovers_of_another_kind_are_not_touched(books: Path, tmp_path: Path) -> None:
    """Only a folder that bears the mark of an unfinished run is cleaned."""
    (tmp_path / "out" / "train").mkdir(parents=True)
    (tmp_path / "out" / "train" / "00000.parquet").write_text("someone's")
    refused(run(books, "--out", tmp_path / "out"), "other files (train)")
    assert (tmp_path / "out" / "train" / "00000.parquet").read_text() == "someone's"


def test_two_at_once(books: Path, tmp_path: Path) -> None:
    """A second process is told that the folder is in use and does not disturb the first."""
    out = tmp_path / "out"
    with claim.claim(out, ["train"], last="dataset.json") as scratch:
        result = child(f"prepare([{str(books)!r}], {str(out)!r}, Settings())")
        assert "another process is preparing" in result.stderr
        assert scratch.exists()
        (out / "train").mkdir()
        (out / "dataset.json").touch()
    assert sorted(os.listdir(out)) == ["dataset.json", "train"]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two megabytes that do not compress."""
    random = np.random.RandomState(0)
    lines = (json.dumps({"text": random.bytes(500).hex()}) + "\n" for _ in range(2000))
    (tmp_path / "large.jsonl").write_text("".join(lines))
    return tmp_path / "large.jsonl"


@pytest.mark.parametrize("limit_bytes", [10_000, 100_000, 600_000])
def test_a_full_disk_is_one_message(large: Path, tmp_path: Path, limit_bytes: int) -> None:
    """A file that cannot grow, in the shuffle or in a shard, ends it cleanly with exit code 2."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    args = ["prepare", str(large), "--out", str(tmp_path / "new" / "out"), "--tokenizer", "bytes"]
    result = child(f"import sys; sys.argv[1:] = {args}; main()", preexec_fn=limit)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("Error: no space left for ") == 1 and "free some" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert not (tmp_path / "new").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for the shuffle, but not for the shards as well."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no mount command; the limit on file sizes stands in for a full disk")
    if mounted.returncode:
        pytest.skip(f"mounting needs root ({mounted.stderr.strip()}); see the test above")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_file_system_is_one_message(large: Path, small_disk: Path) -> None:
    """On a disk that really is full the message is the same, and the space is given back."""
    free = shutil.disk_usage(small_disk).free
    result = run(large, "--out", small_disk / "out", "--tokenizer", "bytes")
    refused(result, "no space left for", "No space left on device", "Nothing was left behind")
    assert os.listdir(small_disk) == [] and shutil.disk_usage(small_disk).free == free


def test_a_disk_without_room_for_a_name_is_one_message(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that were just made go away when not even the lock file can be made in them."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(claim, "_lock", full)
    refused(run(books, "--out", tmp_path / "new" / "out"), "no space left for")
    assert not (tmp_path / "new").exists()


def test_interrupt_leaves_nothing(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of the shards removes what there is."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.ShardWriter, "_close_file", interrupt)
    assert run(books, "--out", tmp_path / "new" / "out").exit_code == 1
    assert not (tmp_path / "new").exists()


# -- opening and reading -------------------------------------------------------------------------


def test_open_dataset_says_what_is_wrong(books: Path, tmp_path: Path) -> None:
    """No dataset, another format or version, and missing or short files each have their message."""
    out = tmp_path / "out"
    with pytest.raises(DataError, match="no such folder; make a dataset with `gptddp prepare"):
        open_dataset(out)
    prepare([books], out, Settings(vocab_size=300))
    with pytest.raises(DataError, match="there is no prepared dataset in it"):
        open_dataset(books)
    manifest = json.loads((out / "dataset.json").read_text())
    for content in ("{", "[]", '{"format": "other", "version": 1}'):
        (out / "dataset.json").write_text(content)
        with pytest.raises(DataError, match="is not of a dataset of gptddp"):
            open_dataset(out)
    (out / "dataset.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(DataError, match="version 99.*prepare the data again"):
        open_dataset(out)
    (out / "dataset.json").write_text(json.dumps(manifest))
    for name in ("tokenizer.json", "train/00000.parquet"):
        content_bytes = (out / name).read_bytes()
        (out / name).write_bytes(content_bytes[:-1])
        with pytest.raises(DataError, match=f"{name} has .* bytes instead of"):
            open_dataset(out)
        (out / name).unlink()
        with pytest.raises(DataError, match=f"{name}: No such file"):
            open_dataset(out)
        (out / name).write_bytes(content_bytes)
    assert len(all_texts(open_dataset(out))) == 40


def test_read_finds_damage(books: Path, tmp_path: Path) -> None:
    """A flipped bit, a missing row group and a replaced file are errors that name the place."""
    dataset = prepare([books], tmp_path / "out", BYTES)
    group, path = dataset.row_groups("train")[0], tmp_path / "out" / "train" / "00000.parquet"
    good, expected = path.read_bytes(), dataset.read(group)
    found = 0
    for at in range(4, 150):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        try:
            assert dataset.read(group) == expected  # a bit that says nothing about this row group
        except DataError as error:
            assert "00000.parquet, row group 0" in str(error)
            found += 1
    assert found > 20
    path.write_bytes(good)
    with pytest.raises(DataError, match="row group 999"):
        dataset.read(RowGroup(group.path, 999, 1, 1))
    with pytest.raises(DataError, match="instead of 7: the file has been replaced"):
        dataset.read(RowGroup(group.path, 0, 7, 1))
    assert len(dataset.read(group)) == group.rows


def test_read_sees_that_a_file_was_replaced(tmp_path: Path) -> None:
    """Documents come from the file that is there now, also after another was read in its place."""
    (tmp_path / "one.jsonl").write_text("".join(f'{{"text": "one {n}"}}\n' for n in range(900)))
    (tmp_path / "two.jsonl").write_text(
        "".join(f'{{"text": "two times {n}"}}\n' for n in range(900))
    )
    one, two = (prepare([tmp_path / f"{n}.jsonl"], tmp_path / n, BYTES) for n in ("one", "two"))
    path, others = one.dir / "train/00000.parquet", texts(two, "train")
    assert all(text.startswith("one") for text in texts(one, "train"))
    good = path.read_bytes()
    os.replace(two.dir / "train/00000.parquet", path)
    assert texts(one, "train") == others
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=r"cannot read .*00000\.parquet, row group 0"):
        texts(one, "train")
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        texts(one, "train")
    path.write_bytes(good)
    assert all(text.startswith("one") for text in texts(one, "train"))


def test_threads_read_every_shard_and_leave_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More shards than footers are kept, many readers: each gets what pyarrow reads by itself."""
    monkeypatch.setattr(corpus, "_SHARD_BYTES", 20)
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(f'{{"text": "document {n:05}"}}\n' for n in range(400)), "utf-8")
    dataset = prepare([lines], tmp_path / "out", BYTES)
    groups = dataset.row_groups("train")
    assert len({group.path for group in groups}) > corpus._FOOTERS
    expected = [
        pq.ParquetFile(dataset.dir / group.path).read_row_group(group.index)["text"].to_pylist()
        for group in groups
    ]
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(dataset.read, [*groups, *reversed(groups)])] == [
            *expected, *reversed(expected),
        ]  # fmt: skip
    assert len(os.listdir("/proc/self/fd")) <= before
    assert corpus._footer.cache_info().currsize <= corpus._FOOTERS


def test_another_tokenizer_is_noticed(books: Path, tmp_path: Path) -> None:
    """A tokenizer.json of the same size but with other merges does not pass for the dataset's."""
    dataset = prepare([books], tmp_path / "out", Settings(vocab_size=300))
    path = tmp_path / "out" / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    merges = definition["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    path.write_text(json.dumps(definition), "utf-8")
    with pytest.raises(DataError, match="not the tokenizer of this dataset.*put the file back"):
        dataset.tokenizer()


def test_default_vocabulary_follows_the_text() -> None:
    """A few megabytes, a demo and a real corpus get different vocabularies."""
    assert [default_vocab_size(n) for n in (10**6, 10**8, 10**10)] == [2048, 4096, 32768]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_rewrites_one_line_on_a_terminal_only() -> None:
    """A terminal gets a moving line that is wiped at the end, a log a line a phase."""
    terminal, log = _Terminal(), io.StringIO()
    for stream in (terminal, log):
        with Progress(stream) as progress:
            progress.start("reading", total=10)
            time.sleep(0.11)
            progress.advance(5)
            progress.note("a fact")
    assert "reading  50 % [####" in terminal.getvalue() and terminal.getvalue().endswith("\x1b[K")
    assert log.getvalue() == "reading\na fact\n"
