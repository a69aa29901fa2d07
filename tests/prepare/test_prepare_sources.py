"""`gptddp prepare`: documents from files and folders."""

import bz2
import gzip
import json
import os
import shutil
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.prepared import BYTES, CJK, all_texts, refused, run

from gptddp.data.dataset import open_dataset
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
from gptddp.prepare.sources import DOCUMENT_BYTES


def test_text_files_jsonl_and_parquet_mix(tmp_path: Path) -> None:
    """A folder may have every format, also compressed; each file is read by its suffix."""
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
    (folder / "f.json").write_text(f"[{line % 'json'}]", "utf-8")
    (folder / "g").write_text("\ufefffrom text é", "utf-8")
    pq.write_table(pa.table({"text": ["from parquet é", None, ""]}), folder / "h.parquet")
    words = pa.array([b"from binary", b"from dictionary"]).dictionary_encode()
    pq.write_table(pa.table({"text": words, "n": [1, 2]}), folder / "i.parquet")
    dataset = prepare([folder], tmp_path / "out", BYTES)
    names = ["bz2", "gz one", "gz two", "json", "json.gz", "jsonl", "parquet", "text", "zst"]
    expected = [f"from {name} é" for name in names]
    expected += ["from binary", "from dictionary"]
    assert all_texts(dataset) == sorted(expected)
    assert dataset.manifest["dropped"] == {"empty": 2, "duplicate": 0, "binary_files": 0}


def test_text_field_with_dots_names_a_nested_field(tmp_path: Path) -> None:
    """In objects and structs, a null is an empty document; a name with a dot has precedence."""
    nested = [{"doc": {"text": "one"}}, {"doc": None}, {"doc": {"text": None}}]
    own = [{"doc.text": "two", "doc": {"text": "no"}}, {"doc": {"text": "three"}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(it) + "\n" for it in nested + own))
    (tmp_path / "b.json").write_text(json.dumps([{"doc": {"text": "four"}}]))
    table = pa.table({"doc": [{"text": "five", "n": 1}, None, {"text": None, "n": 1}]})
    pq.write_table(table, tmp_path / "c.parquet")
    table = pa.table({"doc.text": ["six", "seven"], "doc": [{"text": "no"}, {"text": "no"}]})
    pq.write_table(table, tmp_path / "d.parquet")
    args = ["--text-field", "doc.text", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    result = run(*sorted(tmp_path.iterdir()), *args)
    assert result.exit_code == 0, result.output
    dataset = open_dataset(tmp_path / "out")
    assert all_texts(dataset) == sorted(["one", "two", "three", "four", "five", "six", "seven"])
    assert dataset.manifest["dropped"]["empty"] == 4


@pytest.mark.parametrize("name", ["x.csv", "x.TSV", "x.csv.gz", "x.arrow"])
def test_csv_and_arrow_tables_are_not_read(books: Path, tmp_path: Path, name: str) -> None:
    """They are refused if given, and skipped in a folder with a note; both messages have the
    fix."""
    (tmp_path / name).write_text('text,n\n"a, b",1\n')
    given = run(tmp_path / name, books, "--out", tmp_path / "out")
    (tmp_path / "folder").mkdir()
    (tmp_path / name).rename(tmp_path / "folder" / name)
    alone = run(tmp_path / "folder", "--out", tmp_path / "out")
    for result in (given, alone):
        refused(result, "an Arrow file" if "arrow" in name else "a CSV table", "to parquet first")
    assert "(skipped: 1 a" in alone.stderr
    both = run(tmp_path / "folder", books, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert both.exit_code == 0 and "convert it to parquet" in both.stderr
    assert f"({tmp_path / 'folder' / name})" in both.stderr
    assert len(all_texts(open_dataset(tmp_path / "out"))) == 40


def test_empty_documents_and_copies_are_dropped(books: Path, tmp_path: Path) -> None:
    """Files without text and exact copies are dropped and counted, whatever their names."""
    (books / "empty.txt").write_text("")
    (books / "blank.txt").write_text(" \n\t\n")
    (books / "wide.txt").write_text("\u3000\u00a0\n", "utf-8")
    (books / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    shutil.copy(books / "0.txt", books / "copy.md")
    lines = tmp_path / "lines.jsonl"
    lines.write_text(
        json.dumps({"text": (books / "3.txt").read_text("utf-8")}) + '\n{"text": null}'
    )
    dataset = prepare([books, lines], tmp_path / "out", BYTES)
    assert len(all_texts(dataset)) == 40
    assert dataset.manifest["dropped"] == {"empty": 5, "duplicate": 2, "binary_files": 0}


def test_odd_text_is_preserved(tmp_path: Path) -> None:
    """NUL bytes in JSON, carriage returns and <|bos|> are kept; half surrogates become U+FFFD."""
    cases = ["a\x00b", "\ud83d alone", "\ud83d\ude42", "a\r\nb", "<|bos|>", "\ufeffmark", "e\u0301"]
    lines = tmp_path / "odd.jsonl"
    lines.write_text("".join(json.dumps({"text": case}) + "\n" for case in cases))
    dataset = prepare([lines], tmp_path / "out", Settings(vocab_size=257))
    cases[1:3] = ["\ufffd alone", "🙂"]
    assert all_texts(dataset) == sorted(cases)


def test_a_long_text_file_is_several_documents(tmp_path: Path) -> None:
    """A single book is cut at line ends, or between characters, and no text is lost."""
    book = "".join(f"line {n} é\n" for n in range(20_000)) + CJK + "\nend"
    (tmp_path / "book.txt").write_text(book, "utf-8")
    dataset = prepare([tmp_path / "book.txt"], tmp_path / "out", BYTES)
    pieces = all_texts(dataset)
    assert 6 < len(pieces) < 12 and sum(map(len, pieces)) == len(book)
    assert max(len(piece.encode()) for piece in pieces) <= DOCUMENT_BYTES
    assert all(piece in book for piece in pieces)
    assert sum(piece.endswith("\n") for piece in pieces) >= len(pieces) - 5


def test_hidden_linked_and_special_files_are_skipped(books: Path, tmp_path: Path) -> None:
    """Hidden and excluded names, loops of links, broken links, pipes, sockets and devices are
    skipped; special files are counted, and do not block."""
    (books / ".git").mkdir()
    (books / ".git" / "config").write_text("hidden")
    (books / ".hidden.txt").write_text("hidden")
    (books / "more" / "loop").symlink_to(books)
    (books / "again.txt").symlink_to(books / "0.txt")
    (books / "broken").symlink_to(books / "nothing")
    os.mkfifo(books / "pipe.txt")
    (books / "null.txt").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(books / "socket.txt"))
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
    assert "skipped, neither a file nor a folder: 3 (" in result.stderr
    dataset = open_dataset(tmp_path / "out")
    left_out = {"hidden": 2, "a broken link": 1, "neither a file nor a folder": 3}
    assert dataset.manifest["left_out"] == left_out
    assert dataset.manifest["dropped"]["duplicate"] == 0  # again.txt too: nothing was read twice
    found = all_texts(dataset)
    kept = [p for p in books.glob("[0-9]*.txt")] + [
        p for p in books.glob("more/[0-9]*.txt") if not p.name.startswith("1")
    ]
    assert found == sorted([p.read_text("utf-8") for p in kept] + ["behind a link"])


def test_binary_files_of_a_folder_are_skipped_and_named(books: Path, tmp_path: Path) -> None:
    """Files with NUL bytes or broken UTF-8 anywhere are named and counted."""
    (books / "nul.bin").write_bytes(b"text\0text")
    (books / "late.txt").write_bytes(b"text\n" * 500_000 + b"\xff")
    (books / "cut.txt").write_bytes("é".encode()[:1])
    result = run(books, "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "3 binary" in result.stdout
    assert "nul.bin has NUL bytes: skipped" in result.stderr
    assert "late.txt is not UTF-8: skipped" in result.stderr
    assert len(all_texts(open_dataset(tmp_path / "out"))) == 40


def test_output_inside_the_source_is_not_read(books: Path, tmp_path: Path) -> None:
    """`gptddp prepare . --out data` does not read its own output the second time."""
    for _ in range(2):
        result = run(books, "--out", books / "data", "--tokenizer", "bytes")
        assert result.exit_code == 0, result.output
    assert len(all_texts(open_dataset(books / "data"))) == 40


def test_a_dataset_in_a_source_is_not_read(books: Path, tmp_path: Path) -> None:
    """Neither its shards nor its tokenizer are read; another file named dataset.json is data."""
    prepare([books], books / "before", Settings(tokenizer="bytes", val_fraction=0.5))
    (books / "mine").mkdir()
    records = [{"format": 1, "text": "mine"}, {"text": "[" * 100_000}]
    (books / "mine/dataset.json").write_text(json.dumps(records))
    result = run(books, "--out", tmp_path / "out", "--tokenizer", "bytes", "--max-bad", 100)
    assert f"skipped, a dataset made before: 1 ({books / 'before'})" in result.stderr
    dataset = open_dataset(tmp_path / "out")
    assert dataset.manifest["splits"]["val"]["documents"] == 1
    assert dataset.manifest["sources"]["val_files"] == dataset.manifest["bad_records"] == 0
    assert "mine" in all_texts(dataset)


def test_any_parquet_encoding_and_file_name_can_be_read(tmp_path: Path) -> None:
    """Any string type, encoding, codec, row group size and file name gives its documents."""
    folder = tmp_path / "lang=en" / "part one"
    folder.mkdir(parents=True)
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()]
    options = [
        {"compression": "none"},
        {"compression": "brotli", "data_page_version": "2.0"},
        {"compression": "lz4", "row_group_size": 1},
        {"compression": "gzip"},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    ]
    names = [b"a b", "\u540d\u524d \u00e9".encode(), b"new\nline", b"quote'\"$", b"\xff\xfe"]
    expected = []
    for i, (kind, how, name) in enumerate(zip(kinds, options, names, strict=True)):
        texts = [f"{i}.{j} é" for j in range(3)]
        expected += texts
        column = pa.array([text.encode() for text in texts]).cast(kind)
        table = pa.table({"text.length": [1, 2, 3], "text": column})
        with open(os.path.join(os.fsencode(folder), name + b".parquet"), "wb") as file:
            pq.write_table(table, file, **how)
    (folder / "_SUCCESS").touch()
    dataset = prepare([tmp_path / "lang=en"], tmp_path / "out", BYTES)
    assert all_texts(dataset) == expected


def test_control_characters_in_file_names_are_escaped(books: Path, tmp_path: Path) -> None:
    """Messages show them as escapes, so no name looks like another line; bad.jsonl keeps them."""
    odd = "\nError: \x1b[31m"
    (books / f"b{odd}.txt").write_bytes(b"\0")
    (books / f"l{odd}").symlink_to("nothing")
    (books / f"r{odd}.jsonl").write_text("bad")
    (books / os.fsdecode(b"s\xff.txt")).write_text("a name that is not UTF-8")
    args = books, "--tokenizer", "bytes", "--out", tmp_path / "out"
    results = [run(*args), run(*args, "--max-bad", 100)]
    assert [result.exit_code for result in results] == [2, 0]
    said = "".join(result.stderr for result in results)
    assert "\x1b" not in said and said.count("\nError: ") == 1
    for name in "blr":
        assert f"/{name}\\nError: \\x1b[31m" in said
    (bad,) = map(json.loads, (tmp_path / "out/bad.jsonl").read_text().splitlines())
    assert bad["file"] == str(books / f"r{odd}.jsonl")
