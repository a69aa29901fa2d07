"""Documents that are already token ids: the same dataset and batches as from their text."""

import contextlib
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.prepared import refused, run
from support.toy import SMALL

from gptddp import train
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.loader import Loader, eval_rows
from gptddp.errors import DataError
from gptddp.prepare.build import prepare
from gptddp.prepare.commands import summary
from gptddp.prepare.recipe import Settings
from gptddp.run.history import history

WORDS = ["".join(random.Random(n).choices("abcdefg", k=1 + n % 9)) for n in range(300)]


def texts(n: int = 400) -> list[str]:
    rng = random.Random(1)
    return [f"{i}: " + " ".join(rng.choices(WORDS, k=rng.randint(1, 90))) for i in range(n)]


@pytest.fixture(scope="module")
def from_text(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("text")
    pq.write_table(pa.table({"text": texts()}), folder / "text.parquet")
    return prepare([folder / "text.parquet"], folder / "data", Settings(vocab_size=400))


def write(path: Path, documents, kind: pa.DataType) -> Path:
    path.parent.mkdir(exist_ok=True)
    column = pa.array([d if d is None else list(map(int, d)) for d in documents], kind)
    pq.write_table(pa.table({"input_ids": column, "n": range(len(documents))}), path)
    return path


def prepared(tmp_path: Path, from_text: Dataset, documents, kind=None) -> Dataset:
    source = write(tmp_path / "in/ids.parquet", documents, kind or pa.list_(pa.uint16()))
    tokenizer = str(from_text.dir / "tokenizer.json")
    settings = Settings(tokens_field="input_ids", tokenizer=tokenizer)
    return prepare([source], tmp_path / "data", settings)


def encoded(dataset: Dataset) -> list[np.ndarray]:
    encode = dataset.tokenizer().encoder()
    return [encode(text) for text in texts()]


def documents_of(dataset: Dataset) -> list[tuple[int, ...]]:
    return sorted(
        tuple(map(int, ids))
        for split in ("train", "val")
        for group in dataset.row_groups(split)
        for ids in dataset.read(group)
    )


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.uint16()),
        pa.list_(pa.uint32()),
        pa.list_(pa.int32()),
        pa.large_list(pa.int64()),
    ],
    ids=str,
)
def test_the_documents_are_the_lists(tmp_path, from_text, kind):
    """Every list is one document, for any integer type; shards hold list<uint16>."""
    ids = encoded(from_text)
    dataset = prepared(tmp_path, from_text, ids, kind)
    assert documents_of(dataset) == sorted(tuple(map(int, document)) for document in ids)
    assert dataset.pretokenized and not from_text.pretokenized
    schema = pq.read_schema(dataset.dir / "train/00000.parquet")
    assert schema.names == ["tokens"] and schema.field("tokens").type == pa.list_(pa.uint16())
    assert dataset.tokenizer().sha256 == from_text.tokenizer().sha256
    size = sum(len(text.encode()) for text in texts())
    splits = dataset.manifest["splits"].values()
    assert sum(split["text_bytes"] for split in splits) == size
    assert f"{size / len(np.concatenate(ids)):.1f}" in summary(
        dataset.dir, dataset.manifest
    )  # bytes a token


def rows_of_an_epoch(dataset: Dataset) -> int:
    targets = 0
    with contextlib.closing(Loader(dataset, lanes=2, batch=2, seq_len=64, seed=1)) as loader:
        while not (batch := loader.next()).cursors[:, 0].all():
            targets += batch.targets
    return targets


def test_batches_hold_the_same_tokens_without_encoding(tmp_path, from_text):
    """An epoch and the validation rows have the tokens of the lists; no encoder is used."""
    dataset = prepared(tmp_path, from_text, encoded(from_text))
    tokenizer = dataset.tokenizer()
    tokenizer.encoder = lambda: 1 / 0
    dataset.tokenizer = lambda: tokenizer
    tokens, valid = eval_rows(dataset, 64, 10**6)
    expected = sum(len(ids) for group in dataset.row_groups("val") for ids in dataset.read(group))
    assert tokens.dtype == np.uint16
    assert (valid & (tokens[:, 1:] != tokenizer.bos)).sum() == expected
    assert rows_of_an_epoch(dataset) == pytest.approx(rows_of_an_epoch(from_text), rel=0.05)


def test_lists_are_cut_at_every_bos(tmp_path, from_text):
    """A BOS at the start, at the end or between cuts a list; documents contain no BOS."""
    bos = from_text.tokenizer().bos
    lists = [[bos, 5, 6], [7, 8, bos], [9, bos, 10, 11, bos, bos, 12], [bos], [], None, [13]]
    dataset = prepared(tmp_path, from_text, lists)
    assert documents_of(dataset) == [(5, 6), (7, 8), (9,), (10, 11), (12,), (13,)]
    assert dataset.manifest["dropped"]["empty"] == 3


def test_ids_that_look_like_white_space_are_documents(tmp_path, from_text):
    """As bytes 0x20 and 0x0A0A are spaces and line ends; as ids they are ordinary tokens."""
    lists = [[0x20], [0x0A, 0x20], [0x0109, 0x20]]
    assert documents_of(prepared(tmp_path, from_text, lists)) == [(10, 32), (32,), (265, 32)]


@pytest.mark.parametrize("bad", [400, 65535, -1])
def test_ids_outside_the_vocabulary_are_refused_with_file_and_row(tmp_path, from_text, bad):
    """The first such id is an error, and no files are kept."""
    kind = pa.list_(pa.int32())
    with pytest.raises(DataError, match=rf"ids.parquet, row 3: id {bad} is not in the vocabulary"):
        prepared(tmp_path, from_text, [[1, 2], [399 - 1], [5, bad, 6], [bad]], kind)
    assert not (tmp_path / "data").exists()


def test_a_wrong_column_of_ids_is_refused(tmp_path, from_text):
    """On the command line, each mistake has a message with its fix."""
    tokenizer, out = from_text.dir / "tokenizer.json", tmp_path / "out"
    good = write(tmp_path / "in/a.parquet", [[1], [2]], pa.list_(pa.uint16()))
    nulls = write(tmp_path / "nulls.parquet", [[1], [2]], pa.list_(pa.uint16()))
    pq.write_table(pa.table({"x": pa.array([[1, None]], pa.list_(pa.uint16()))}), nulls)
    twice = tmp_path / "twice.parquet"
    pq.write_table(pa.table([pa.array([[1]]), pa.array([[2]])], names=["x", "x"]), twice)
    given = ["--tokenizer", tokenizer, "--out", out]
    refused(run(twice, "--tokens-field", "x", *given), "2 columns are called 'x'")
    refused(run(good, "--tokens-field", "ids", *given), "no column 'ids', but 'input_ids', 'n'")
    refused(run(good, "--tokens-field", "n", *given), "'n' is of type int64", "list<uint16>")
    refused(run(nulls, "--tokens-field", "x", *given), "row 1: 1 of its ids are null")
    refused(run(good, "--tokens-field", "input_ids", "--out", out), "give the tokenizer.json")
    (tmp_path / "in/notes.txt").write_text("text")
    refused(run(tmp_path / "in", "--tokens-field", "input_ids", *given), "notes.txt is not a parq")
    args = ["--tokens-field", "input_ids", *given, "--include", "*.parquet"]
    assert run(tmp_path / "in", *args).exit_code == 0
    refused(
        run(tmp_path / "in", *args[2:], "--text-field", "n"), "--tokens-field input_ids -> None"
    )
    assert open_dataset(out).pretokenized


def test_training_on_tokens(tmp_path, from_text, train_here):
    """The loss falls, and the trainer reports bits per byte of the text."""
    dataset = prepared(tmp_path, from_text, encoded(from_text))
    flags = ["--data", str(dataset.dir), "--run-dir", str(tmp_path / "run"), "--lr", "1e-2"]
    assert train.main([*SMALL, *flags, "--steps", "30"]) == 0
    lines = list(history(tmp_path / "run"))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3 and lines[-1]["val_bpb"] > 0
