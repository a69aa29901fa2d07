"""`gptddp prepare`: its output, and its reproducibility."""

import io
import json
import os
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.prepared import BYTES, all_texts, contents, refused, run, texts

from gptddp.data.tokenizer import byte_tokenizer
from gptddp.prepare import shard_writer
from gptddp.prepare.build import prepare, unigram_entropy_nats
from gptddp.prepare.phases import Phases
from gptddp.prepare.recipe import Settings, default_vocab_size
from gptddp.prepare.shard_writer import ShardWriter


def test_every_document_is_in_one_split(books: Path, tmp_path: Path) -> None:
    """Train and validation together hold each document once; the recorded counts are right."""
    dataset = prepare([books], tmp_path / "out", BYTES)
    assert all_texts(dataset) == sorted(p.read_text("utf-8") for p in books.rglob("*.txt"))
    assert len(texts(dataset, "val")) == 1
    for split in ("train", "val"):
        about, groups = dataset.manifest["splits"][split], dataset.row_groups(split)
        assert about["documents"] == len(texts(dataset, split)) == sum(g.rows for g in groups)
        assert about["text_bytes"] == sum(len(t.encode()) for t in texts(dataset, split))
        for group in groups:
            assert group.text_bytes == sum(len(t.encode()) for t in dataset.read(group))


def test_command_prints_a_summary_and_the_next_command(books: Path, tmp_path: Path) -> None:
    """The result is on stdout, with the next command to type; notes are on stderr."""
    out = tmp_path / "new" / "out"
    result = run(books, "--out", out)
    assert result.exit_code == 0, result.output
    assert "39 train, 1 validation" in result.stdout
    assert f"gptddp train --data {out} --run-dir RUN" in result.stdout
    assert "reading 40 files" in result.stderr
    assert sorted(os.listdir(out)) == ["dataset.json", "tokenizer.json", "train", "val"]


def test_a_dataset_has_its_tokenizer_and_its_figures(books: Path, tmp_path: Path) -> None:
    """The trained tokenizer is saved with the validation split's tokens and entropy; a tokenizer
    given with --tokenizer is copied."""
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
    assert str(unigram_entropy_nats(np.array([0, 7]))) == "0.0"
    file = tmp_path / "out" / "tokenizer.json"
    given = prepare([books], tmp_path / "two", Settings(tokenizer=str(file)))
    assert (tmp_path / "two" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert given.tokenizer().vocab_size == 280


def test_row_groups_are_small_enough_for_many_lanes(tmp_path: Path) -> None:
    """A row group has documents / 192 rows; columns are zstd, without a dictionary."""
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
    """A row group ends before its limit of text bytes, a shard after its limit."""
    monkeypatch.setattr(shard_writer, "_ROW_GROUP_BYTES", 1000)
    monkeypatch.setattr(shard_writer, "_SHARD_BYTES", 3000)
    with ShardWriter(tmp_path, "train", 1024, byte_tokenizer()) as writer:
        for n in range(20):
            writer.add(b"%03d" % n * 100)
        writer.add(b"long" * 1000)
        about = writer.close()
    assert [len(file["row_groups"]) for file in about["files"]] == [4, 4]
    assert about["files"][0]["row_groups"] == [[3, 900, 903]] * 4
    assert about["documents"] == 21 and about["text_bytes"] == 10_000


def test_order_depends_only_on_content_and_seed(books: Path, tmp_path: Path) -> None:
    """Other names, folders and formats give the same shards; another seed gives other shards."""
    renamed = tmp_path / "renamed.jsonl"
    documents = [path.read_text("utf-8") for path in sorted(books.rglob("*.txt"), reverse=True)]
    renamed.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    one = prepare([books], tmp_path / "one", BYTES)
    two = prepare([renamed], tmp_path / "two", BYTES)
    three = prepare([books], tmp_path / "three", Settings(tokenizer="bytes", seed=2))
    assert one.sha256 == two.sha256 != three.sha256
    assert texts(one, "train") == texts(two, "train") != sorted(texts(one, "train"))
    assert all_texts(one) == all_texts(three) and texts(one, "train") != texts(three, "train")


def test_a_prepared_folder_is_not_changed(books: Path, tmp_path: Path) -> None:
    """The same command does nothing; other settings or sources are refused, with differences."""
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


def test_the_default_vocabulary_grows_with_the_text() -> None:
    """A few megabytes, a demo and a real corpus get different vocabularies."""
    assert [default_vocab_size(n) for n in (10**6, 10**8, 10**10)] == [2048, 4096, 32768]


def test_a_long_phase_reports_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints a line at its start, and one every ten seconds; other lines delay the next one."""
    now, stream = iter(range(0, 100, 6)), io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    said = Phases(stream)
    said.begin("reading", total=10)
    for _ in range(3):
        said.advance(2)
    said.say("a fact")
    said.advance(2)
    assert stream.getvalue() == "reading\nreading  40 %\na fact\n"
