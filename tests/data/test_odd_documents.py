"""Documents that break tokenizers and packers elsewhere: an epoch has every token of each once."""

import contextlib
import json
import random
import time

import numpy as np
import pytest

from gptddp.data.loader import Loader
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings

LANES = 3
ODD = {
    "ten megabytes": lambda rng: " ".join(rng.choices(["one", "two", "three", "\n"], k=2_400_000)),
    "a word of a megabyte": lambda rng: "".join(rng.choices("abcdefgh", k=2**20)),
    "a megabyte of one letter": lambda rng: "a" * 2**20,
    "a megabyte of spaces": lambda rng: "x" + " " * 2**20,
    "special tokens": lambda rng: "<|bos|><|endoftext|> <|bos|>" * 20,
    "no characters that are common": lambda rng: "e\u0301 \U0010ffff \ufeff\x00 \u2028" * 50,
}


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def dataset(request, tmp_path_factory):
    """One document of each kind, null and empty ones, and a few that are like others."""
    folder, rng = tmp_path_factory.mktemp("odd"), random.Random(3)
    lines = [make(rng) for make in ODD.values()] + [None, "", " \n"]
    lines += [f"an ordinary document, number {n}, of a few words" for n in range(12)]
    (folder / "odd.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    settings = Settings(tokenizer=request.param, vocab_size=400 if request.param == "bpe" else None)
    return prepare([folder / "odd.jsonl"], folder / "data", settings)


def pairs_of(tokens, valid, bos) -> np.ndarray:
    """How often each token is followed by each other one, but by BOS."""
    real = valid & (tokens[:, 1:] != bos)
    codes = tokens[:, :-1][real].astype(np.int64) << 9 | tokens[:, 1:][real]
    return np.bincount(codes, minlength=1 << 18)


def test_an_epoch_has_every_token_of_odd_documents(dataset):
    """Nothing is lost, raised or read as a special token, and it takes seconds."""
    started = time.monotonic()
    tokenizer = dataset.tokenizer()
    encode, bos = tokenizer.encoder(), tokenizer.bos
    assert dataset.manifest["dropped"]["empty"] == 3
    expected = np.zeros(1 << 18, np.int64)
    for group in dataset.row_groups("train"):
        for text in dataset.read(group):
            ids = np.concatenate([[bos], encode(text)])[None]
            assert tokenizer.decode(ids[0].tolist()) == text
            expected += pairs_of(ids, np.ones((1, ids.size - 1), bool), -1)
    found, ended = np.zeros_like(expected), np.zeros(LANES, bool)
    loader = Loader(dataset, lanes=LANES, batch=256 * LANES, seq_len=512, seed=2)
    with contextlib.closing(loader):
        while not ended.all():
            # of a batch that goes on into the next epoch only the rows of this one
            batch = loader.next()
            found += pairs_of(batch.tokens, batch.valid & of_first(batch, ended), bos)
            ended = batch.cursors[:, 0] > 0
    assert np.array_equal(found >= expected, np.ones_like(found, bool))
    assert time.monotonic() - started < 120


def of_first(batch, ended) -> np.ndarray:
    return np.repeat(~ended, len(batch.tokens) // LANES)[:, None]
