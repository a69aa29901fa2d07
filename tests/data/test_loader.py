"""The loader: the same batches at any world size, from any state, with any threads."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from support.loaders import (
    LANES,
    SEQ_LEN,
    Dataset,
    corpus,
    expected_pairs,
    fingerprints,
    open_loader,
    run,
    same,
)

from gptddp.data import blocks
from gptddp.data.loader import Batch, eval_rows
from gptddp.errors import DataError

# Fingerprints of three steps, as existing runs have them.
GOLDEN = ["1d966ba6d4eebe14", "6f81d8f2dd3606cb", "44989043f50dab3b"]
# row group of the corpus: the first step that needs it
BAD_STEPS = {2: 0, 4: 2, 9: 3}


@pytest.fixture(scope="module")
def alone() -> tuple[Dataset, list[Batch]]:
    """A corpus, and more than two epochs of it in one process."""
    dataset = corpus()
    batches = run(dataset, [(1, 150)], 150)
    assert batches[-1].cursors[:, 0].min() >= 2
    return dataset, batches


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, LANES])
def test_batches_do_not_depend_on_the_world_size(alone, world_size):
    """Rows, targets, fingerprint and position of each step equal those of one process."""
    dataset, batches = alone
    same(run(dataset, [(world_size, 150)], 150), batches)


def test_concatenated_batches_survive_changes_of_the_world_size():
    """Concatenation is equally independent of world size, threads and restarts."""
    alone = run(corpus(), [(1, 60)], 60, pack="concat")
    same(run(corpus(), [(3, 11), (5, 40), (1, 60)], 60, pack="concat", threads=2), alone)


@pytest.mark.parametrize("sizes", [(4, 3, 4), (2, 5, 7, 1), (1, 4), (8, 7, 8), (3, 4, 3, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_survive_changes_of_the_world_size(alone, sizes, seed):
    """A state saved at any step continues with the same batches at another world size."""
    dataset, batches = alone
    stops = sorted(random.Random(f"{sizes}{seed}").sample(range(1, 150), len(sizes) - 1)) + [150]
    same(run(dataset, list(zip(sizes, stops, strict=True)), 150), batches)


@pytest.mark.parametrize(
    "changes", [dict(threads=3), dict(prefetch=0), dict(prefetch=5, threads=2)]
)
def test_batches_do_not_depend_on_threads_and_prefetch(alone, changes):
    """Threads and prefetch only change the time at which a batch is ready."""
    dataset, batches = alone
    same(run(dataset, [(1, 80), (2, 150)], 150, **changes), batches)


def test_the_order_of_the_rows_never_changes():
    """Fingerprints of a fixed corpus: if you change them, change packing.IDS as well."""
    assert fingerprints() == GOLDEN


def pairs_of_epoch(dataset: Dataset, lanes: int, **changes) -> Counter:
    """(token, next token) of all targets in the first epoch of every lane, ends included."""
    pairs: Counter = Counter()
    with open_loader(dataset, lanes=lanes, batch=lanes, **changes) as loader:
        first = np.ones((lanes, 1), bool)
        while first.any():
            batch = loader.next()
            first = batch.origin[:, 1:2] == 0  # the epoch of each row
            before, after = (
                batch.tokens[:, i : i - 1 or None][batch.valid & first] for i in (0, 1)
            )
            pairs.update(zip(before.tolist(), after.tolist(), strict=True))
    return pairs


@pytest.mark.parametrize("pack", ["best-fit", "concat"])
@pytest.mark.parametrize("lanes", [1, 3, 8, 20, 50])
def test_an_epoch_is_the_corpus(lanes, pack):
    """Every token and every end of a document is a target once in an epoch, for any number of
    lanes."""
    dataset = corpus()
    documents = [text for group in dataset.splits["train"] for text in group if text]
    assert len(documents) > 50
    assert pairs_of_epoch(dataset, lanes, pack=pack) == expected_pairs(documents)


@pytest.mark.parametrize("rows_a_lane", [1, 2, 5])
def test_every_step_takes_equally_many_rows_of_each_lane(rows_a_lane):
    """A rank has batch / lanes rows of each of its lanes, in the order of the lanes."""
    dataset = corpus()
    with open_loader(dataset, batch=rows_a_lane * LANES, rank=1, world_size=3) as loader:
        batch = loader.next()
    assert batch.tokens.shape == (3 * rows_a_lane, SEQ_LEN + 1)
    assert batch.valid.shape == (3 * rows_a_lane, SEQ_LEN)
    assert batch.tokens.dtype == np.uint16
    assert np.flatnonzero(batch.cursors.any(axis=1)).tolist() == [2, 3, 4]
    assert batch.targets == batch.valid.sum() and 0 <= batch.fp < 2**64


def test_one_document_is_enough():
    """With only one document, lanes share its rows; batches are equal at any world size."""
    dataset = Dataset([[None, "the only document, a bit longer than a row of tokens is", ""]])
    batches = run(dataset, [(1, 30)], 30)
    same(run(dataset, [(3, 7), (8, 20), (2, 30)], 30), batches)
    assert batches[-1].cursors[:, 0].min() > 5
    rows = {tuple(row) for row in batches[0].tokens.tolist()}
    assert len(rows) == 4 and all(rows == {*map(tuple, b.tokens.tolist())} for b in batches)


def test_a_rank_reads_only_its_part():
    """Ranks do not pack all batches to keep one of four: two ranks read the same row group only
    between their lanes, and a rank reads none twice in an epoch."""
    train = corpus().splits["train"]
    reads = []
    for rank in range(4):
        dataset = Dataset(train)
        with open_loader(dataset, rank=rank, world_size=4, prefetch=0, batch=LANES) as loader:
            while not loader.next().cursors[:, 0].any():
                pass
        assert max(dataset.reads.values()) <= 2  # the next epoch may have started
        reads.append(len(dataset.reads))
    assert sum(reads) <= len(train) + 3
    assert max(reads) < len(train) / 2


def test_row_groups_without_text_give_no_rows():
    """Null and empty documents, and row groups with only such ones, are skipped without a hang."""
    one, another = "one text " * 9, "another text " * 9
    dataset = Dataset([["", None], [one], [None], [another, ""], []])
    assert pairs_of_epoch(dataset, 2) == expected_pairs([one, another])


def test_a_state_is_small():
    """A state takes under 1 KB of JSON for 48 lanes with large numbers, after 10^14 tokens."""
    settings = dict(lanes=48, batch=9600, seq_len=131072, seed=2**63, pack="concat")
    with open_loader(corpus(), **settings) as loader:
        for cursor in ([999, 9999, 32767], [0, 9999999, 1047], [9999999, 0, 1047]):
            assert len(json.dumps(loader.state(np.full((48, 3), cursor)))) < 1000


def test_a_temporary_read_error_changes_no_batch(alone, monkeypatch):
    """Two failed attempts to read each row group change no batch."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001, 0.001))
    batches = alone[1]
    dataset = corpus()

    def fail(group, attempt):
        if attempt % 3:
            raise DataError(f"{group.path}, row group {group.index}: Input/output error")

    dataset.fail = fail
    same(run(dataset, [(1, 40)], 40), batches[:40])


@pytest.mark.parametrize("bad", [2, 4, 9])
def test_a_bad_row_group_is_named_at_the_step_that_needs_it(alone, monkeypatch, bad):
    """next() raises DataError with file and row group, at the same step with any threads."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))
    dataset = corpus()

    def fail(group, attempt):
        if group.index == bad:
            raise DataError(f"{group.path}, row group {group.index}: bad page checksum")

    dataset.fail = fail
    failed_at = set()
    for changes in [dict(threads=1), dict(threads=3, prefetch=5)]:
        steps = 0
        with open_loader(dataset, **changes) as loader:
            with pytest.raises(DataError) as caught:
                while True:
                    assert loader.next().fp == alone[1][steps].fp
                    steps += 1
            with pytest.raises(DataError):
                loader.next()
        failed_at.add(steps)
        name = f"train/{bad:05}.parquet, row group {bad}: bad page checksum (2 attempts"
        assert name in str(caught.value)
    assert failed_at == {BAD_STEPS[bad]}


def test_validation_rows_are_fixed_and_limited():
    """The rows are the same each time: at most as many as requested, or all of the split."""
    dataset = corpus()
    tokens, valid = eval_rows(dataset, 16, 320)
    assert tokens.shape == (20, 17) and valid.shape == (20, 16)
    again, _ = eval_rows(dataset, 16, 320)
    assert np.array_equal(tokens, again)
    assert len(eval_rows(dataset, 16, 1)[0]) == 1
    tokens, valid = eval_rows(dataset, 16, 10**9)
    documents = [text for group in dataset.splits["val"] for text in group]
    pairs = zip(tokens[:, :-1][valid].tolist(), tokens[:, 1:][valid].tolist(), strict=True)
    assert Counter(pairs) == expected_pairs(documents)
