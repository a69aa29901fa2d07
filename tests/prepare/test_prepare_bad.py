"""`gptddp prepare --max-bad`: records that cannot be used are skipped, up to a limit."""

import errno
import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.prepared import BYTES, all_texts, contents, refused, run

from gptddp.data.dataset import open_dataset
from gptddp.prepare import sources
from gptddp.prepare.build import prepare

BAD = ["not json", '["a"]', '{"body": "b"}', '{"text": 5}', '{"text": "cut']


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """JSON lines: every tenth is bad, and the last one is cut."""
    path = tmp_path / "x.jsonl"
    rows = [json.dumps({"text": f"number {n}"}) for n in range(45)]
    for number, bad in enumerate(BAD, 1):
        rows.insert(10 * number - 1, bad)
    path.write_text("\n".join(rows))
    return path


def listed(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "bad.jsonl").read_text().splitlines()]


def test_a_bad_record_ends_prepare_and_finished_files_are_kept(
    lines: Path, books: Path, tmp_path: Path
) -> None:
    """The message has file, line, reason and fix; the same command continues after these files."""
    out = tmp_path / "out"
    result = run(books, lines, "--out", out, "--tokenizer", "bytes")
    refused(result, "x.jsonl:10: not valid JSON", "mend or remove the line", "higher --max-bad")
    assert f"40 files have been read and are kept in {out}/.prepare" in result.stderr
    lines.write_text("\n".join(row for row in lines.read_text().splitlines() if row not in BAD))
    result = run(books, lines, "--out", out, "--tokenizer", "bytes")
    assert result.exit_code == 0 and "reading 1 files (40 have been read before)" in result.stderr
    prepare([books, lines], tmp_path / "whole", BYTES)
    assert contents(out) == contents(tmp_path / "whole")


def test_skipped_records_are_listed_and_counted(lines: Path, tmp_path: Path) -> None:
    """bad.jsonl of the dataset has each skipped record with file, line and reason."""
    out = tmp_path / "out"
    result = run(lines, "--max-bad", 100, "--out", out, "--tokenizer", "bytes")
    assert result.exit_code == 0, result.output
    assert all_texts(open_dataset(out)) == sorted(f"number {n}" for n in range(45))
    assert [(bad["file"], bad["line"]) for bad in listed(out)] == [
        (str(lines), 10 * number) for number in range(1, 6)
    ]
    reasons = ["not valid JSON", "type list", "no field 'text'", "type int", "Unterminated"]
    for bad, reason in zip(listed(out), reasons, strict=True):
        assert reason in bad["reason"]
    assert "bad         5 records, see bad.jsonl" in result.stdout
    again = run(lines, "--max-bad", 7, "--out", out, "--tokenizer", "bytes")
    assert "already prepared" in again.stderr  # the limit does not matter
    again = run(lines, "--out", out, "--tokenizer", "bytes")
    refused(again, "other settings: --max-bad 100 -> 0")


def test_the_limit_holds_for_all_files_together(lines: Path, books: Path, tmp_path: Path) -> None:
    """One bad record more than --max-bad is an error with its fix; the list of the others can be
    read. With a lower limit, earlier progress with more skipped records is not used."""
    out, other = tmp_path / "out", tmp_path / "y.jsonl"
    other.write_text("bad\n")
    args = [books, lines, other, "--tokenizer", "bytes", "--out", out]
    result = run(*args, "--max-bad", 5)
    refused(result, "y.jsonl:1: not valid JSON", "higher --max-bad (5 others")
    assert len(listed(out / ".prepare")) == 5
    assert run(*args, "--max-bad", 6).exit_code == 0
    assert [Path(bad["file"]).name for bad in listed(out)] == ["x.jsonl"] * 5 + ["y.jsonl"]
    assert run(*args[:-1], tmp_path / "whole", "--max-bad", 6).exit_code == 0
    assert contents(out) == contents(tmp_path / "whole")
    args = [lines, other, "--tokenizer", "bytes", "--out", tmp_path / "less"]
    refused(run(*args, "--max-bad", 5), "y.jsonl:1")
    refused(run(*args, "--max-bad", 3), "starting again: --max-bad is 3, and 5", "x.jsonl:40")


def test_rows_and_damaged_files_are_records_too(tmp_path: Path) -> None:
    """A row that is not UTF-8, and the rest of a truncated file, compressed text included, count as
    one record each."""
    rows = pa.array([b"a", b"\xff", b"b"]).view(pa.string())  # as from a careless writer
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    random.seed(0)
    text = b"".join(b'{"text": "%d"}\n' % random.getrandbits(8000) for _ in range(1000))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(text)[:-100])
    pq.write_table(pa.table({"text": ["c"] * 9}), tmp_path / "c.parquet")
    cut = (tmp_path / "c.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(cut[: len(cut) // 2])
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(random.randbytes(10**6).hex().encode())[:-99])
    sources = sorted(tmp_path.iterdir())
    args = ["--tokenizer", "bytes", "--out", tmp_path / "out"]
    for source in sources[1:]:  # each alone is refused, too
        refused(run(source, *args), f"{source.name}", "--exclude, or skip such records with")
    assert run(*sources, *args, "--max-bad", 100).exit_code == 0
    row, gz, parquet, txt = listed(tmp_path / "out")
    assert row["row"] == 2 and "column 'text' is not UTF-8" in row["reason"]
    kept = all_texts(open_dataset(tmp_path / "out"))
    assert len(kept) > 300 and {"a", "b"} < set(kept)
    assert gz["line"] == len(kept) - 2 + 1 and "the rest of the file" in gz["reason"]
    assert parquet["row"] == 1 and "not a readable parquet file" in parquet["reason"]
    assert txt["record"] == 1 and "damaged" in txt["reason"]


def test_an_error_of_the_volume_is_no_bad_record(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such an error ends prepare: it may pass, and the dataset would be different next time."""

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sources, "lines", broken)
    result = run(lines, "--max-bad", 100, "--out", tmp_path / "out")
    refused(result, "cannot read", "x.jsonl: Input/output error")
    (tmp_path / "x.txt").write_text("text")
    monkeypatch.setattr(sources, "_check_text", broken)
    result = run(tmp_path / "x.txt", "--max-bad", 100, "--out", tmp_path / "out")
    refused(result, "cannot read", "x.txt: Input/output error")


def test_impossible_limits_are_refused(lines: Path, tmp_path: Path) -> None:
    """A negative --max-bad, a --val-fraction over 0.5, and sources with only bad records."""
    out = tmp_path / "out"
    (tmp_path / "y.jsonl").write_text("bad\n" * 7)
    result = run(tmp_path / "y.jsonl", "--max-bad", 100, "--out", out)
    refused(result, "the sources hold 0 documents (dropped: 7 bad records)")
    assert not out.exists()  # there is no progress to keep
    refused(run(lines, "--max-bad", -1, "--out", out), "a number from 0")
    refused(run(lines, "--val-fraction", 0.6, "--out", out), "at most 0.5", "--val")
