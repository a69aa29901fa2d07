"""The loader on prepared datasets: real parquet files and tokenizers."""

import contextlib
import json
import random
import shutil
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.prepared import texts

from gptddp.data import blocks
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.lanes import deal
from gptddp.data.loader import Batch, Loader, eval_rows
from gptddp.prepare import shard_writer
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings

LANES = 6


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def dataset(request, tmp_path_factory) -> Dataset:
    """Documents of random words, no two the same."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefg", k=rng.randint(1, 9))) for _ in range(500)]
    documents = [
        f"{i}: " + " ".join(rng.choices(words, k=int(4 / (0.02 + rng.random())))) + " <|bos|>"
        for i in range(600)
    ]
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "_SHARD_BYTES", 20_000)
        return prepare([source], folder / "dataset", Settings(tokenizer=request.param))


def open_loader(dataset: Dataset, **changes) -> contextlib.closing[Loader]:
    settings = {"lanes": LANES, "batch": LANES, "seq_len": 64, "seed": 7} | changes
    return contextlib.closing(Loader(dataset, **settings))


def batches_of(dataset: Dataset, steps: int, **changes) -> list[Batch]:
    with open_loader(dataset, **changes) as loader:
        return [loader.next() for _ in range(steps)]


def expected_pairs(dataset: Dataset, split: str) -> Counter:
    """(token, next token) of every document of a split, its end included."""
    tokenizer, pairs = dataset.tokenizer(), Counter()
    encode = tokenizer.encoder()
    for text in texts(dataset, split):
        tokens = [tokenizer.bos, *encode(text).tolist(), tokenizer.bos]
        pairs.update(zip(tokens, tokens[1:], strict=False))
    return pairs


def pairs_of(tokens: np.ndarray, valid: np.ndarray) -> Counter:
    """(token, next token) of every target."""
    return Counter(zip(tokens[:, :-1][valid].tolist(), tokens[:, 1:][valid].tolist(), strict=True))


def test_validation_rows_are_the_validation_split(dataset):
    """The rows have every document; a literal special token in a text is plain text."""
    tokens, valid = eval_rows(dataset, 64, 10**9)
    tokenizer = dataset.tokenizer()
    assert pairs_of(tokens, valid) == expected_pairs(dataset, "val")
    starts = tokens == tokenizer.bos
    assert (starts[:, 1:] & valid).sum() == len(texts(dataset, "val"))
    assert "<|bos|>" in tokenizer.decode(tokens.reshape(-1).tolist())


def test_the_place_of_the_files_does_not_matter(dataset, tmp_path):
    """A copy in another folder, with its files in reverse order, gives the same batches."""
    copy = open_dataset(shutil.copytree(dataset.dir, tmp_path / "elsewhere"))
    files = copy.manifest["splits"]["train"]["files"]
    files.reverse()
    assert len(files) > 1
    alone = batches_of(dataset, 20)
    with open_loader(copy, state={**loader_state(dataset, alone[9])}) as loader:
        assert [loader.next().fp for _ in range(10)] == [batch.fp for batch in alone[10:]]


def loader_state(dataset: Dataset, batch: Batch) -> dict:
    with open_loader(dataset) as loader:
        return loader.state(batch.cursors)


def test_lanes_have_equally_many_rows_of_real_text(tmp_path):
    """Files of Python's standard library differ in length and in tokens per byte. At most 0.5 % of
    their rows are unseen after one epoch's tokens, because row groups have token estimates."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    dataset = prepare(files, tmp_path / "data", Settings(vocab_size=512))
    groups = dataset.row_groups("train")
    source = blocks.Source(dataset, "train", groups, dataset.tokenizer(), 64)
    encode = source.encoder()
    n_rows = [len(source.pack_rows(source.documents(g), encode)) for g in range(len(groups))]
    assert len(groups) >= 64
    for lanes in (5, 12, 48, 64):
        dealt = deal([group.tokens for group in groups], lanes, seed=7)
        rows = np.array([sum(len(b.rows(n_rows[b.group], 7)) for b in mine) for mine in dealt])
        assert np.maximum(0, rows - rows.mean()).sum() <= 0.005 * rows.sum()
