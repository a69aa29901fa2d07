"""`gptddp prepare`: the content of a `.json` file decides its form; descriptions are no data."""

import gzip
import json
from pathlib import Path

import pytest
from support.prepared import BYTES, all_texts, refused, run

from gptddp.data.dataset import open_dataset
from gptddp.prepare import json_files
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings

RECORDS = [{"id": n, "text": f'number {n}: é "quoted" \\ {"x" * n}'} for n in range(50)]
TEXTS = sorted(record["text"] for record in RECORDS)
FORMS = {
    "lines": "".join(json.dumps(record) + "\n" for record in RECORDS),
    "lines, unicode": "\ufeff\n" + "\n\n".join(json.dumps(r, ensure_ascii=False) for r in RECORDS),
    "array": json.dumps(RECORDS),
    "array, indented": json.dumps(RECORDS, indent=2),
    "array, a line each": "[\n" + ",\n".join(json.dumps(r) for r in RECORDS) + "\n]\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_lines_and_an_array_give_the_same_documents(tmp_path: Path, form: str) -> None:
    """This holds for compressed files, and for any indentation of the array."""
    (tmp_path / "x.json").write_text(FORMS[form], "utf-8")
    (tmp_path / "y.json.gz").write_bytes(gzip.compress(FORMS[form].encode()))
    for name in ("x.json", "y.json.gz"):
        dataset = prepare([tmp_path / name], tmp_path / f"of-{name}", BYTES)
        assert all_texts(dataset) == TEXTS
        assert dataset.manifest["read"] == {"json": [1, 50]}


def test_one_object_is_a_document(tmp_path: Path) -> None:
    """The object may have one line or several; an empty file has no document."""
    (tmp_path / "a.json").write_text('{"text": "one line"}')
    (tmp_path / "b.json").write_text('{\n  "text": "several\\nlines"\n}\n')
    (tmp_path / "c.json").write_text("\n")
    dataset = prepare([tmp_path], tmp_path / "out", BYTES)
    assert all_texts(dataset) == ["one line", "several\nlines"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{\n"name": "a package"\n}', ["x.json, record 1: no field 'text'"]),
        ('["a", "b"]', ["record 1: JSON of type str", "one object with the field 'text'"]),
        (
            '[{"text": "a"}',
            ["record 1: not valid JSON", "a .json file must be an array of objects"],
        ),
        ('{"text": tru}', ["record 1: not valid JSON"]),
        ('[{"text": "\xff"}]', ["record 1: not valid JSON", "utf-8"]),
        ('[{"text": ' + "[" * 100_000, ["record 1: not valid JSON", "jq -c"]),
        (f"[{' ' * 999}", ["record 1: not valid JSON (over 1 GiB"]),
    ],
)
def test_other_json_is_refused_and_not_read_as_text(
    tmp_path: Path, books: Path, monkeypatch: pytest.MonkeyPatch, content: str, words: list[str]
) -> None:
    """The message has the file, the rule and the fix; with --max-bad it is skipped and listed."""
    if "over 1 GiB" in words[0]:
        monkeypatch.setattr(json_files, "_MAX_BYTES", 1000)
    (books / "x.json").write_bytes(content.encode("latin-1"))
    result = run(books, "--out", tmp_path / "out", "--tokenizer", "bytes")
    refused(result, *words, "skip the file with --exclude", "to .txt")
    args = ["--tokenizer", "bytes", "--max-bad", 100, "--out", tmp_path / "skipped"]
    result = run(books, *args)
    assert result.exit_code == 0, result.output
    kept = all_texts(open_dataset(tmp_path / "skipped"))
    assert kept == sorted(path.read_text("utf-8") for path in books.rglob("*.txt"))
    assert str(books / "x.json") in (tmp_path / "skipped" / "bad.jsonl").read_text()


@pytest.mark.parametrize("number", [0, 1, 25, 49])
def test_a_bad_line_affects_no_other_line(tmp_path: Path, number: int) -> None:
    """JSON lines with one bad line, even the first, are recognised."""
    rows = [json.dumps(record) for record in RECORDS]
    rows[number] = rows[number][:-3]
    (tmp_path / "x.json").write_text("\n".join(rows))
    dataset = prepare([tmp_path / "x.json"], tmp_path / "out", Settings(max_bad=100, seed=1))
    assert len(all_texts(dataset)) == 49
    assert json.loads((tmp_path / "out/bad.jsonl").read_text())["line"] == number + 1


def test_descriptions_in_folders_are_skipped_and_named(books: Path, tmp_path: Path) -> None:
    """Cards, infos, licenses and hidden files are counted and named, and only read if given."""
    for name in ("README.md", "LICENSE", "LICENSE-MIT.txt", "more/readme_de.md", "COPYING"):
        (books / name).write_text("about")
    for name in ("dataset_infos.json", "more/dataset_info.json", "state.json"):
        (books / name).write_text('{"text": "about"}')
    for name in (".gitattributes", ".gitignore"):
        (books / name).write_text("hidden")
    (books / "licensed plays.txt").write_text("a text like any other")
    (books / "readme.jsonl").write_text('{"text": "a data set of READMEs"}')
    result = run(books, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert result.exit_code == 0, result.output
    found = all_texts(open_dataset(tmp_path / "out"))
    assert len(found) == 42 and {"about", "hidden"}.isdisjoint(found)
    assert "skipped, about a dataset or a program: 8 (" in result.stderr
    assert "skipped, hidden: 2 (" in result.stderr and ".gitattributes" in result.stderr
    assert "skipped     2 hidden; 8 about a dataset or a program" in result.stdout
    assert "read        jsonl 1 files, 1 documents; text 41 files, 41 documents" in result.stdout
    for number, how in enumerate([[books / "README.md"], ["--include", "README.md"]]):
        args = [*how, "--include", "*.txt", "--tokenizer", "bytes", "--out", tmp_path / f"{number}"]
        assert run(books, *args).exit_code == 0
        assert "about" in all_texts(open_dataset(tmp_path / f"{number}"))


@pytest.mark.parametrize(
    "name", ["large.txt", "large.txt.gz", "large.jsonl", "large.jsonl.zst", "x.json", "x.parquet"]
)
def test_a_git_lfs_pointer_is_neither_text_nor_a_bad_record(
    books: Path, tmp_path: Path, name: str
) -> None:
    """A clone without its large files is refused, with the command that gets them."""
    oid = "oid sha256:" + "0" * 64
    pointer = f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 123456789\n"
    (books / name).write_text(pointer)
    result = run(books, "--out", tmp_path / "out", "--max-bad", 100)
    refused(result, f"{name} is a Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("name", ["part-00000", "x.ldjson.gz"])
def test_json_lines_under_another_name_are_no_text(books: Path, tmp_path: Path, name: str) -> None:
    """They are a bad record with a fix, also if the file is given; a `.txt` file is always text."""
    lines = b'{"id": 1, "text": "once"}\n{"text": "upon"}\n'
    (books / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    for source in (books, books / name):
        refused(run(source, "--out", tmp_path / "out"), f"{name}:1", "end in .jsonl")
    (books / name).rename(books / "x.txt")
    (books / "x.txt").write_bytes(lines)
    assert run(books, "--out", tmp_path / "b", "--tokenizer", "bytes").exit_code == 0
    assert lines.decode() in all_texts(open_dataset(tmp_path / "b"))


def test_a_cache_of_downloads_is_refused(tmp_path: Path) -> None:
    """Its nameless blobs would be read as text; a snapshot is read by the names of its links."""
    cache, data = tmp_path / "datasets--x", tmp_path / "datasets--x/snapshots/abc/data"
    data.mkdir(parents=True), (cache / "blobs").mkdir()
    (cache / "blobs/0b").write_text('{"text": "three"}\n{"text": "four"}\n')
    (data / "more.jsonl").symlink_to("../../../blobs/0b")
    refused(run(cache, "--out", tmp_path / "out"), " is a cache", "snapshots/")
    dataset = prepare([cache / "snapshots/abc"], tmp_path / "out", BYTES)
    assert all_texts(dataset) == ["four", "three"]
