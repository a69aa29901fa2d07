"""A data set in memory, and runs of loaders over it.

Run as a script it prints the fingerprints of a few steps, for the tests that need a new process.
"""

import contextlib
import hashlib
import json
import random
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gptddp.data.lanes import owned
from gptddp.data.loader import Batch, Loader
from gptddp.distributed import storage

LANES, SEQ_LEN, SEED = 8, 16, 7


class Bytes:
    """A tokenizer of one token a byte, and BOS."""

    vocab_size, bos, dtype, sha256 = 257, 256, np.dtype(np.uint16), "b" * 64
    library: str | None = None

    def encoder(self):
        owner = threading.get_ident()

        def encode(text: str) -> np.ndarray:
            assert threading.get_ident() == owner, "another thread than its owner uses an encoder"
            return np.frombuffer(text.encode(), np.uint8).astype(self.dtype)

        return encode


class Dataset:
    """Row groups in memory; counts what is read and fails where a test says so."""

    pretokenized = False

    def __init__(self, train: list[list[str | None]], val: list[list[str | None]] | None = None):
        self.splits = {"train": train, "val": val or []}
        self.sha256 = hashlib.sha256(repr(self.splits).encode()).hexdigest()
        self.dir = Path("corpus")
        self.reads: Counter = Counter()
        self.fail = lambda group, attempt: None

    def row_groups(self, split):
        return [
            types.SimpleNamespace(
                path=f"{split}/{i:05}.parquet",
                index=i,
                rows=len(group),
                tokens=sum(len(text) + 1 for text in group if text),
            )
            for i, group in enumerate(self.splits[split])
        ]

    def tokenizer(self):
        return Bytes()

    def check_storage(self):
        pass

    def read(self, group):
        self.reads[group.path] += 1
        self.fail(group, self.reads[group.path])
        return list(self.splits[group.path.split("/")[0]][group.index])

    def goes_on(self, group):
        return [False] * len(self.splits[group.path.split("/")[0]][group.index])


def corpus(n_groups: int = 20, seed: int = 1) -> Dataset:
    """Row groups of a few documents, each of which begins with its name; some are null or empty."""
    uniform = random.Random(seed).random  # the one method with the same values in every version

    def document(group: int, i: int) -> str | None:
        if (kind := uniform()) < 0.1:
            return None if kind < 0.05 else ""
        return f"<{group}.{i}>" + "".join("abcdefgh "[int(9 * uniform())] for _ in range(length()))

    def length() -> int:
        return int(4 / (0.02 + uniform()))  # 4 to 200, most of them short

    train = [[document(g, i) for i in range(1 + int(12 * uniform()))] for g in range(n_groups)]
    return Dataset(train, [[f"<val {i}>" + "v" * (i * 7 % 40) for i in range(30)]])


def open_loader(dataset: Dataset, rank=0, world_size=1, **changes) -> contextlib.closing[Loader]:
    settings = {"lanes": LANES, "batch": 2 * LANES, "seq_len": SEQ_LEN, "seed": SEED} | changes
    settings = {"own": owned(rank, world_size, settings["lanes"])} | settings
    return contextlib.closing(Loader(dataset, **settings))


def file_waited_for(work: Callable[[], object], goes_on: threading.Event) -> str:
    """The file for which `work` waits as the main thread would; it ends once `goes_on` is set."""
    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + 10
    while not (file := storage.waited_for()[0]) and time.monotonic() < end:
        time.sleep(0.01)
    goes_on.set()
    thread.join()
    return file


def global_batch(loaders: list[Loader]) -> Batch:
    """One step over all ranks: rows in the order of the ranks, the rest summed."""
    batches = [loader.next() for loader in loaders]
    rows = np.concatenate([batch.tokens for batch in batches])
    return Batch(
        tokens=rows,
        valid=np.concatenate([batch.valid for batch in batches]),
        lanes=[lane for batch in batches for lane in batch.lanes],
        targets=sum(batch.targets for batch in batches),
        fp=sum(batch.fp for batch in batches) % 2**64,
        cursors=np.sum([batch.cursors for batch in batches], axis=0),
        wait_s=0.0,
        bos=Bytes.bos,
    )


def run(dataset, schedule, steps, **changes) -> list[Batch]:
    """Run steps; every change of the world size opens new loaders from a saved state.

    `schedule`: (world size, its last step) ...; producers are far ahead when a state is saved.
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


def fingerprints(pack: str = "best-fit") -> list[str]:
    """The fingerprints of three steps, in the first, second and third epoch of most lanes."""
    batches = run(corpus(), [(1, 101)], 101, pack=pack)
    return [f"{batches[i].fp:016x}" for i in (0, 50, 100)]


def expected_pairs(documents: list[str]) -> Counter:
    pairs: Counter = Counter()
    for document in documents:
        text = [Bytes.bos, *document.encode(), Bytes.bos]
        pairs.update(zip(text, text[1:], strict=False))
    return pairs


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
