"""Sources, options and outputs that `gptddp prepare` refuses."""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.prepared import BYTES, all_texts, contents, refused, run

from gptddp.prepare.build import prepare


def test_wrong_sources_are_refused(books: Path, tmp_path: Path) -> None:
    """A missing, binary or empty source gives one message with the fix, and no files are kept."""
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


DEEP = '{"text": ' + "[" * 100_000
LINES: list[tuple[str | bytes, str, list[str]]] = [
    ('{"text": "cut', "text", ["not valid JSON", "mend or remove"]),
    ('"only a string"', "text", ["JSON of type str", "one object with the field 'text'"]),
    ('{"body": "x"}', "text", ["no field 'text', but the fields 'body'", "as in text or doc.text"]),
    ('{"text": 5}', "text", ["of type int", "must be a string"]),
    (DEEP, "text", ["not valid JSON"]),
    (b'{"text": "\xff"}', "text", ["UTF-8"]),
    ('{"doc": {"body": "x"}}', "doc.text", ["no field 'text', but the fields 'body'"]),
    ('{"doc": 5}', "doc.text", ["JSON of type int instead of an object with 'text'"]),
    ('{"n": 5}', "doc.text", ["no field 'doc.text', but the fields 'n'"]),
]


@pytest.mark.parametrize(("line", "field", "words"), LINES, ids=range(len(LINES)))
def test_a_wrong_line_is_refused(
    tmp_path: Path, line: str | bytes, field: str, words: list[str]
) -> None:
    """The message has file, line, rule and fix."""
    line = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a", "doc": {"text": "a"}}\n\n' + line + b"\n")
    result = run(tmp_path / "x.jsonl", "--text-field", field, "--out", tmp_path / "out")
    refused(result, "x.jsonl:3: ", *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("table", "field", "words"),
    [
        ({"body": ["a"], "text": [1]}, "text", ["column 'text' is of type int64", "--text-field"]),
        ({"body": ["a"], "text": [1]}, "words", ["no column 'words', but 'body', 'text'"]),
        ({"doc": [{"body": "a"}]}, "doc.text", ["no column 'text', but 'body'; name the column"]),
        ({"doc": [{"text": 1}]}, "doc.text", ["column 'doc.text' is of type int64"]),
        ({"text": ["a"], "n": [1]}, "n.text", ["no column 'n.text', but 'text', 'n'"]),
    ],
)
def test_a_wrong_column_is_refused(
    tmp_path: Path, table: dict[str, list[object]], field: str, words: list[str]
) -> None:
    """The message has the existing columns and the fix."""
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    result = run(tmp_path / "x.parquet", "--out", tmp_path / "out", "--text-field", field)
    refused(result, "x.parquet: ", *words)
    twice = pa.table([["a", "b"], ["c", "d"]], names=["text", "text"])
    pq.write_table(twice, tmp_path / "x.parquet")
    result = run(tmp_path / "x.parquet", "--out", tmp_path / "out")
    refused(result, "x.parquet: 2 columns are called 'text': rename all but one")
    assert not (tmp_path / "out").exists()


def test_wrong_options_are_refused(books: Path, tmp_path: Path) -> None:
    """Each message has the rule of the option, and a misspelt option the right name."""
    out = tmp_path / "out"
    cases = {
        "--val-fraction=0": "more than 0",
        "--vocab-size=100": "257",
        "--seed=-1": "from 0",
        "--tokenizer=absent.json": "use bpe, bytes, or a tokenizer.json that exists",
        "--vocab-siz=300": "--vocab-size",
    }
    for option, words in cases.items():
        refused(run(books, "--out", out, option), words)
    refused(run(books, "--out", out, "--tokenizer=bytes", "--vocab-size=300"), "omit it here")
    (tmp_path / "t.json").write_text("{}")
    refused(run(books, "--out", out, "--tokenizer", tmp_path / "t.json"), "t.json", "byte-level")
    assert not out.exists()


def test_wrong_outputs_are_refused(books: Path, tmp_path: Path) -> None:
    """An --out with other files, a file as --out, and one that holds a source are not changed."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    refused(run(books, "--out", other), "other files (mine.txt)", "--out")
    assert contents(other) == {"mine.txt": b"mine"}
    refused(run(books, "--out", other / "mine.txt"), "cannot write to", "mine.txt", "--out")
    refused(run(books, "--out", other / "mine.txt" / "below"), "cannot write to")
    refused(run(books, "--out", tmp_path), "is inside --out", "choose an --out")
    refused(run(books / "0.txt", "--out", books), "is inside --out")
    assert contents(other) == {"mine.txt": b"mine"}


def test_a_dataset_is_no_source(books: Path, tmp_path: Path) -> None:
    """A dataset's folder is refused; its shards may be given, and have the same documents."""
    made = prepare([books], tmp_path / "made", BYTES)
    refused(run(made.dir, "--out", tmp_path / "out"), f"{made.dir} is already a dataset", "/train")
    again = prepare([made.dir / "train", made.dir / "val"], tmp_path / "out", BYTES)
    assert all_texts(again) == all_texts(made)


def test_an_output_with_lost_and_found_counts_as_empty(books: Path, tmp_path: Path) -> None:
    """The root of a new ext4 volume can be the output; its lost+found stays after an error."""
    (tmp_path / "out" / "lost+found").mkdir(parents=True)
    (tmp_path / "one.txt").write_text("one")
    assert run(tmp_path / "one.txt", "--out", tmp_path / "out").exit_code == 2
    assert os.listdir(tmp_path / "out") == ["lost+found"]
    assert run(books, "--out", tmp_path / "out").exit_code == 0
