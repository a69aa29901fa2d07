"""The loader: the same batches at any world size, from any state, with any threads.

Run as a script it prints the fingerprints of a few steps, for the tests that need a new process.
"""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__

from gptddp import blocks
from gptddp.errors import ConfigError, DataError
from gptddp.loader import Batch, Loader, eval_rows

LANES, SEQ_LEN, SEED = 8, 16, 7


class Bytes:
    """A tokenizer of one token a byte, and BOS."""

    vocab_size, bos, dtype, sha256 = 257, 256, np.dtype(np.uint16), "b" * 64

    def encoder(self):
        owner = threading.get_ident()

        def encode(text: str) -> np.ndarray:
            assert threading.get_ident() == owner, "an encoder belongs to the thread that asked"
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

        return encode


class Dataset:
    """Row groups in memory; counts what is read and fails where a test says so."""

    def __init__(self, train: list[list[str | None]], val: list[list[str | None]] | None = None):
        self.splits = {"train": train, "val": val or []}
        self.sha256 = hashlib.sha256(repr(self.splits).encode()).hexdigest()
        self.dir = Path("corpus")
        self.reads: Counter = Counter()
        self.fail = lambda group, attempt: None

    def row_groups(self, split):
        return [
            types.SimpleNamespace(
                path=f"{split}/{i:05}.parquet", index=i, rows=len(group),
                text_bytes=sum(len(text or "") for text in group),
            )
            for i, group in enumerate(self.splits[split])
        ]  # fmt: skip

    def tokenizer(self):
        return Bytes()

    def read(self, group):
        self.reads[group.path] += 1
        self.fail(group, self.reads[group.path])
        return list(self.splits[group.path.split("/")[0]][group.index])


def corpus(n_groups: int = 20, seed: int = 1) -> Dataset:
    """Row groups of a few documents, each of which says who it is; some are null or empty."""
    uniform = random.Random(seed).random  # the one method whose values no version changes

    def document(group: int, i: int) -> str | None:
        if (kind := uniform()) < 0.1:
            return None if kind < 0.05 else ""
        return f"<{group}.{i}>" + "".join("abcdefgh "[int(9 * uniform())] for _ in range(length()))

    def length() -> int:
        return int(4 / (0.02 + uniform()))  # 4 to 200, most of them short

    train = [[document(g, i) for i in range(1 + int(12 * uniform()))] for g in range(n_groups)]
    return Dataset(train, [[f"<val {i}>" + "v" * (i * 7 % 40) for i in range(30)]])


def open_loader(dataset: Dataset, **changes) -> contextlib.closing[Loader]:
    settings = {"lanes": LANES, "batch": 2 * LANES, "seq_len": SEQ_LEN, "seed": SEED} | changes
    return contextlib.closing(Loader(dataset, **settings))


def global_batch(loaders: list[Loader]) -> Batch:
    """One step over all ranks: rows in the order of the ranks, the rest summed."""
    batches = [loader.next() for loader in loaders]
    rows = np.concatenate([batch.tokens for batch in batches])
    return Batch(
        tokens=rows,
        valid=np.concatenate([batch.valid for batch in batches]),
        targets=sum(batch.targets for batch in batches),
        fp=sum(batch.fp for batch in batches) % 2**64,
        cursors=np.sum([batch.cursors for batch in batches], axis=0),
        wait_s=0.0,
    )


def run(dataset, schedule, steps, **changes) -> list[Batch]:
    """Steps with a world size each: every change of world size begins anew from a saved state.

    `schedule`: (world size, up to which step) ...; the producers are far ahead when it is saved.
    """
    batches: list[Batch] = []
    state = None
    for world_size, until in schedule:
        with contextlib.ExitStack() as stack:
            loaders = [
                stack.enter_context(
                    open_loader(dataset, rank=r, world_size=world_size, state=state, **changes)
                )
                for r in range(world_size)
            ]
            while len(batches) < min(until, steps):
                batches.append(global_batch(loaders))
            state = json.loads(json.dumps(loaders[0].state(batches[-1].cursors)))
    return batches


def same(a: list[Batch], b: list[Batch]) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.fp == y.fp and x.targets == y.targets
        assert np.array_equal(x.tokens, y.tokens) and np.array_equal(x.valid, y.valid)
        assert np.array_equal(x.cursors, y.cursors)


@pytest.fixture(scope="module")
def alone() -> tuple[Dataset, list[Batch]]:
    """A corpus, and more than two epochs of it in one process."""
    dataset = corpus()
    batches = run(dataset, [(1, 150)], 150)
    assert batches[-1].cursors[:, 0].min() >= 2
    return dataset, batches


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, LANES])
def test_batches_do_not_depend_on_the_world_size(alone, world_size):
    """Rows, targets, fingerprint and position of each step are those of one process."""
    dataset, batches = alone
    same(run(dataset, [(world_size, 150)], 150), batches)


@pytest.mark.parametrize("sizes", [(4, 3, 4), (2, 5, 7, 1), (1, 4), (8, 7, 8), (3, 4, 3, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_survive_changes_of_the_world_size(alone, sizes, seed):
    """States saved at arbitrary steps continue at another world size as if nothing had been."""
    dataset, batches = alone
    stops = sorted(random.Random(f"{sizes}{seed}").sample(range(1, 150), len(sizes) - 1)) + [150]
    same(run(dataset, list(zip(sizes, stops, strict=True)), 150), batches)


def test_a_state_after_every_single_step(alone):
    """A run that begins anew after each step sees the same batches."""
    dataset, batches = alone
    schedule = [(1 + step % 3, step + 1) for step in range(60)]
    same(run(dataset, schedule, 60), batches[:60])


@pytest.mark.parametrize(
    "changes", [dict(threads=3), dict(prefetch=0), dict(prefetch=5, threads=2)]
)
def test_batches_do_not_depend_on_threads_and_prefetch(alone, changes):
    """Only when a batch is ready may depend on them."""
    dataset, batches = alone
    same(run(dataset, [(1, 80), (2, 150)], 150, **changes), batches)


def fingerprints() -> list[str]:
    """Of three steps in the first, second and third epoch of most lanes."""
    batches = run(corpus(), [(1, 101)], 101)
    return [f"{batches[i].fp:016x}" for i in (0, 50, 100)]


def test_the_order_is_the_one_it_has_always_been():
    """Fingerprints of a fixed corpus; whoever changes them changes loader.PACK as well."""
    assert fingerprints() == GOLDEN


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "LC_ALL": "C", "PYTHONUTF8": "0"},
        {"NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__)},
        {"NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__[1:])},
    ],
    ids=["hash seed", "locale", "no vector units", "some vector units"],
)
def test_batches_do_not_depend_on_the_environment(environment):
    """Hash seed, locale and the processor's vector units change nothing."""
    child = subprocess.run(
        [sys.executable, "-W", "ignore", __file__], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )  # fmt: skip
    assert child.stdout.split() == GOLDEN


def pairs_of_epoch(dataset: Dataset, lanes: int, **changes) -> Counter:
    """(token, next token) of all targets but BOS in the first epoch of every lane."""
    pairs: Counter = Counter()
    with open_loader(dataset, lanes=lanes, batch=lanes, **changes) as loader:
        ended = np.zeros(lanes, bool)
        while not ended.all():
            batch = loader.next()
            valid = batch.valid & (batch.tokens[:, 1:] != Bytes.bos) & ~ended[:, None]
            before, after = batch.tokens[:, :-1][valid], batch.tokens[:, 1:][valid]
            pairs.update(zip(before.tolist(), after.tolist(), strict=True))
            ended = batch.cursors[:, 0] > 0
    return pairs


def expected_pairs(documents: list[str]) -> Counter:
    pairs: Counter = Counter()
    for document in documents:
        text = [Bytes.bos, *document.encode()]
        pairs.update(zip(text, text[1:], strict=False))
    return pairs


@pytest.mark.parametrize("lanes", [1, 3, 8, 20, 50])
def test_an_epoch_is_the_corpus(lanes):
    """Every token of every document is a target once in an epoch, whatever the number of lanes."""
    dataset = corpus()
    documents = [text for group in dataset.splits["train"] for text in group if text]
    assert len(documents) > 50
    assert pairs_of_epoch(dataset, lanes) == expected_pairs(documents)


@pytest.mark.parametrize("rows_a_lane", [1, 2, 5])
def test_every_step_takes_as_many_rows_of_each_lane(rows_a_lane):
    """m = batch / lanes rows of each lane, in the order of the lanes; nothing of other ranks."""
    dataset = corpus()
    with open_loader(dataset, batch=rows_a_lane * LANES, rank=1, world_size=3) as loader:
        batch = loader.next()
    assert batch.tokens.shape == (3 * rows_a_lane, SEQ_LEN + 1)
    assert batch.valid.shape == (3 * rows_a_lane, SEQ_LEN)
    assert batch.tokens.dtype == np.uint16
    assert np.flatnonzero(batch.cursors.any(axis=1)).tolist() == [2, 3, 4]
    assert batch.targets == batch.valid.sum() and 0 <= batch.fp < 2**64


def test_one_document_is_enough():
    """With one document in all, every lane repeats it; world sizes still agree."""
    dataset = Dataset([[None, "the only document, a bit longer than a row of tokens is", ""]])
    batches = run(dataset, [(1, 30)], 30)
    same(run(dataset, [(3, 7), (8, 20), (2, 30)], 30), batches)
    assert batches[-1].cursors[:, 0].min() > 5
    for lane in range(LANES):
        rows = np.concatenate([b.tokens[2 * lane : 2 * lane + 2] for b in batches])
        assert {tuple(row) for row in rows.tolist()} == {
            tuple(r) for r in batches[0].tokens.tolist()
        }
    orders = {b.tokens[lane].tobytes() for b in batches for lane in range(2 * LANES)}
    assert len(orders) == 4  # the rows of the document


def test_huge_row_groups_are_read_once():
    """A row group of many blocks is read once for them all, not once for each."""
    dataset = Dataset([[f"<{i}>" + "x" * (i % 40) for i in range(5000)]])
    with open_loader(dataset, lanes=2, batch=2, prefetch=1) as loader:
        while not loader.next().cursors[:, 0].all():
            pass
        assert dataset.reads["train/00000.parquet"] <= 4
    documents = [text for group in dataset.splits["train"] for text in group]
    assert pairs_of_epoch(dataset, 2) == expected_pairs(documents)


def test_row_groups_without_text_give_no_rows():
    """Null and empty documents, and row groups of nothing else, are passed over without a hang."""
    groups = [["", None], ["one text"], [None], ["another text", ""], []]
    dataset = Dataset(groups)
    assert pairs_of_epoch(dataset, 2) == expected_pairs(["one text", "another text"])


def test_no_text_at_all_is_refused():
    """A data set without a token raises DataError, whether its manifest says so or not."""
    with pytest.raises(DataError, match="no text in its train split"):
        Loader(Dataset([["", None]]), lanes=2, batch=2, seq_len=8, seed=1)
    lying = Dataset([["", None]])
    lying.row_groups = lambda split: [
        types.SimpleNamespace(path="train/00000.parquet", index=0, rows=2, text_bytes=99)
    ]
    with open_loader(lying) as loader, pytest.raises(DataError, match="lane 0 has no text"):
        loader.next()


def test_a_long_word_is_split_over_rows():
    """A document of one word of a megabyte loses nothing."""
    dataset = Dataset([["w" * 2**20], ["short"]])
    assert sum(pairs_of_epoch(dataset, 2, seq_len=1000).values()) == 2**20 + 5


def test_batches_do_not_depend_on_the_listing(alone):
    """The order in which the data set lists its row groups changes nothing."""
    dataset, batches = alone
    backwards = corpus()
    backwards.row_groups = lambda split: dataset.row_groups(split)[::-1]
    same(run(backwards, [(1, 20)], 20), batches[:20])


def test_a_state_is_small():
    """Under 1.5 KB of JSON for 48 lanes far into a run."""
    with open_loader(corpus(), lanes=48, batch=480) as loader:
        state = loader.state(np.full((48, 3), [12, 34567, 1047]))
    assert len(json.dumps(state)) < 1500


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(seed=8), "seed: 7 -> 8"),
        (dict(seq_len=32), "seq_len: 16 -> 32"),
        (dict(lanes=4), "lanes: 8 -> 4"),
        (dict(batch=8), "batch: 16 -> 8"),
        (dict(dataset=corpus(seed=2)), "dataset: "),
        (dict(pack="older"), "pack: older -> bfd-1"),
        (dict(version=99), "version: 99 -> 1"),
        (dict(tokenizer="other"), "tokenizer: other -> bbbb"),
    ],
)
def test_a_state_of_other_data_or_settings_is_refused(changes, expected):
    """Whatever decides the rows is compared, and each difference is named: saved -> now."""
    dataset = corpus()
    with open_loader(dataset) as loader:
        state = loader.state(loader.next().cursors)
    saved = {k: changes.pop(k) for k in ("pack", "version", "tokenizer") if k in changes}
    with pytest.raises(DataError, match=expected):
        open_loader(changes.pop("dataset", dataset), state=state | saved, **changes)


def test_an_empty_state_is_not_a_fresh_start():
    """A state without anything in it is refused, with every field named."""
    with pytest.raises(DataError, match="version: None -> 1.*lanes: 0 -> 8"):
        open_loader(corpus(), state={})


def test_an_impossible_position_is_refused():
    """Cursors outside the lane's blocks or rows are an error, not a wrong batch."""
    dataset = corpus()
    with open_loader(dataset) as loader:
        state = loader.state(loader.next().cursors)
    with pytest.raises(DataError, match="lane 3 is row 0 of block 99"):
        open_loader(dataset, state=state | {"lanes": [[0, 0, 0]] * 3 + [[0, 99, 0]] * 5})
    state |= {"lanes": [[0, 0, 9999]] * 8}
    with open_loader(dataset, state=state) as loader, pytest.raises(DataError, match="row 9999"):
        loader.next()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch=12), "batch 12 is not divisible by lanes 8"),
        (dict(world_size=9), "9 workers but only 8 lanes"),
        (dict(lanes=0), "lanes is 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
    """Settings that cannot work raise ConfigError with the fix."""
    with pytest.raises(ConfigError, match=message):
        open_loader(corpus(), **changes)


def test_a_read_error_that_passes_is_not_noticed(alone, monkeypatch):
    """Two failing attempts on every row group change no batch."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001, 0.001))
    batches = alone[1]
    dataset = corpus()

    def fail(group, attempt):
        if attempt % 3:
            raise DataError(f"{group.path}, row group {group.index}: Input/output error")

    dataset.fail = fail
    same(run(dataset, [(2, 40)], 40), batches[:40])


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


def test_an_error_of_the_tokenizer_reaches_the_caller():
    """Whatever a thread raises, next() raises."""
    dataset = corpus()
    dataset.tokenizer = lambda: types.SimpleNamespace(
        sha256="", bos=0, dtype=np.dtype(np.uint16), encoder=lambda: 1 / 0
    )
    with open_loader(dataset) as loader, pytest.raises(ZeroDivisionError):
        loader.next()


def threads_of_loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gptddp-data")]


def test_close_ends_the_threads():
    """close() joins, twice is harmless, and next() afterwards says so instead of waiting."""
    loader = Loader(corpus(), lanes=8, batch=8, seq_len=16, seed=1, threads=3)
    loader.next()
    assert len(threads_of_loaders()) == 3
    loader.close()
    loader.close()
    assert threads_of_loaders() == []
    with pytest.raises(RuntimeError, match="closed"):
        while True:
            loader.next()


def test_a_loader_that_is_dropped_ends_its_threads():
    """Threads do not keep a forgotten loader alive."""
    loader = Loader(corpus(), lanes=8, batch=8, seq_len=16, seed=1)
    loader.next()
    del loader
    assert threads_of_loaders() == []


def test_close_does_not_wait_for_a_retry(monkeypatch):
    """The waits between attempts end at once when the loader is closed."""
    monkeypatch.setattr(blocks, "RETRY_S", (60.0,))
    dataset = corpus()
    failing = threading.Event()

    def fail(group, attempt):
        failing.set()
        raise DataError("gone")

    dataset.fail = fail
    loader = Loader(dataset, lanes=8, batch=8, seq_len=16, seed=1)
    assert failing.wait(30)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 20
    assert threads_of_loaders() == []


@pytest.mark.parametrize("how", ["end", "raise", "slow read"])
def test_a_process_ends_with_a_loader_open(how):
    """No hang and no noise at the interpreter's exit while threads work."""
    child = subprocess.run(
        [sys.executable, __file__, how], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert child.returncode == (1 if how == "raise" else 0)
    expected = ["Traceback", "ZeroDivisionError"] if how == "raise" else []
    lines = [line for line in child.stderr.splitlines() if not line.startswith(" ")]
    assert [line.split()[0].rstrip(":") for line in lines] == expected


def test_only_a_bounded_number_of_blocks_is_made_ahead():
    """A loader that nobody reads from stops near `prefetch` blocks a lane, and does not spin."""
    text = "words of a document " * 20
    dataset = Dataset([[text] * 10 for _ in range(400)])
    with open_loader(dataset, prefetch=1.5, batch=LANES) as loader:
        loader.next()
        for _ in range(100):
            before = sum(dataset.reads.values())
            time.sleep(0.1)
            if sum(dataset.reads.values()) == before:
                break
        assert LANES <= before <= 1.5 * LANES + 2
        cpu = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - cpu < 0.25
        assert sum(dataset.reads.values()) == before


def test_validation_rows_are_fixed_and_limited():
    """The same whole rows each time, no more than asked for, all of them where there are fewer."""
    dataset = corpus()
    tokens, valid = eval_rows(dataset, 16, 320)
    assert tokens.shape == (20, 17) and valid.shape == (20, 16)
    again, _ = eval_rows(dataset, 16, 320)
    assert np.array_equal(tokens, again)
    assert len(eval_rows(dataset, 16, 1)[0]) == 1
    tokens, valid = eval_rows(dataset, 16, 10**9)
    documents = [text for group in dataset.splits["val"] for text in group]
    real = valid & (tokens[:, 1:] != Bytes.bos)
    pairs = zip(tokens[:, :-1][real].tolist(), tokens[:, 1:][real].tolist(), strict=True)
    assert Counter(pairs) == expected_pairs(documents)


def test_no_validation_text_is_refused():
    """An empty validation split raises DataError."""
    for val in ([], [["", None]]):
        with pytest.raises(DataError, match="no text in its val split"):
            eval_rows(Dataset([["text"]], val), 16, 100)


GOLDEN = ["86704448f9cdd03e", "7c7f7c4d09f23e48", "fd10fc92eeae0331"]
# the first step for which lanes need these row groups of the corpus
BAD_STEPS = {2: 9, 4: 7, 9: 0}


def main(how: str) -> None:
    if how == "fingerprints":
        print(*fingerprints())
        return
    dataset = Dataset([["words of a document " * 2000] * 50 for _ in range(40)])
    if how == "slow read":
        dataset.fail = lambda group, attempt: time.sleep(1000)
    loader = Loader(dataset, lanes=8, batch=8, seq_len=16, seed=1, threads=2)
    if how != "slow read":
        loader.next()
    if how == "raise":
        raise ZeroDivisionError


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fingerprints")
