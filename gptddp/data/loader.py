"""Batches of rows for one rank, made ahead of the trainer.

    loader = Loader(dataset, lanes=48, batch=48, seq_len=256, seed=1, own=range(12))
    batch = loader.next()

The content of a batch is a pure function of dataset, settings and step (lanes.py, packing.py). The
number of threads, and how far they are ahead (producer.py), decide only when it is ready.
"""

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptddp.config import Config
from gptddp.data.blocks import Lane, Source
from gptddp.data.cache import Cache
from gptddp.data.dataset import Dataset, Split
from gptddp.data.lanes import Block, deal, hosts
from gptddp.data.packing import IDS
from gptddp.data.producer import Producer
from gptddp.distributed import storage
from gptddp.errors import DataError

STATE_VERSION = 2
_HASH_DIGITS = 16  # hex digits of each hash in a state


@dataclass(frozen=True)
class Batch:
    """The rows of one step on one rank: equally many from each of its `lanes`, in their order.

    tokens (rows, T+1), dtype of the tokenizer; valid (rows, T) bool: does tokens[i, t+1] count as
    a target (see packing.Packed)? targets: number of valid targets.
    fp: sum of the rows' 64-bit hashes modulo 2**64; its sum over the ranks is the step's. origin:
    int64 (rows, 4), see packing.origins.
    cursors (lanes, 3) int64: (epoch, block, row) where each lane of this rank continues after this
    batch, zeros for other ranks' lanes: the sum over the ranks is the whole position.
    wait_s: seconds that the caller waited for the rows. bos: the token that starts a document.
    bad: index of the row group that this rank cannot read, or -1. Such a batch has no rows, and no
    rank may train this step (see training/quarantine.py).
    """

    tokens: np.ndarray
    valid: np.ndarray
    lanes: Sequence[int]
    targets: int
    fp: int
    cursors: np.ndarray
    wait_s: float
    bos: int = -1
    bad: int = -1
    origin: np.ndarray | None = None


class Loader:
    """Endless batches of the train split: a step has the same rows at any world size.

    `batch`: rows per step over all ranks. `own`: the lanes of this rank, in ascending order; None:
    all. `state`: from a loader with the same settings at any world size; this one continues with
    the next step. `prefetch`: mean number of packed blocks per lane to make ahead. `threads`:
    tokenising threads; all work while rows are missing, else only one. `pack`: see packing.py.
    `cache`: keeps packed blocks for the next life. Raises ConfigError for unsuitable numbers;
    DataError for a state of other data or settings, or data without text.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        lanes: int,
        batch: int,
        seq_len: int,
        seed: int,
        own: Sequence[int] | None = None,
        state: Mapping[str, Any] | None = None,
        prefetch: float = 1.5,
        threads: int = 1,
        pack: str = "best-fit",
        cache: Cache | None = None,
    ) -> None:
        Config(lanes=lanes, batch=batch, seq_len=seq_len, seed=seed, pack=pack)  # checks them
        source = _source(dataset, "train", seq_len, pack, cache)
        self._identity = _identity(source, lanes, batch, seed)
        self._bos = source.tokenizer.bos
        self.quarantined = sorted((state or {}).get("quarantined", ()))
        source.quarantined = frozenset(self.quarantined)
        self.groups, self.lanes = source.groups, lanes
        self.dealt = _deal(source, lanes, seed)
        self.hosts = hosts(self.dealt, source.quarantined)
        if not self.hosts:
            raise DataError(
                f"{dataset.dir}: all row groups of the train split are in quarantine: mend the "
                "data, then start a new run"
            )
        start = self._start(range(lanes) if own is None else own, state)
        made = [self._lane(*it) for it in start.items()]
        self._producer = Producer(source, made, batch // lanes, prefetch, threads)
        # It also runs when the loader is garbage collected, and when the interpreter exits, while
        # threads can still be joined.
        self._stop = weakref.finalize(self, self._producer.stop)
        self._producer.start()

    def _start(
        self, own: Sequence[int], state: Mapping[str, Any] | None
    ) -> dict[int, Sequence[int]]:
        """The cursor of each of these lanes."""
        cursors = _cursors(state, self._identity) if state is not None else [(0, 0, 0)] * self.lanes
        return {lane: cursors[lane] for lane in own}

    def _lane(self, number: int, cursor: Sequence[int]) -> Lane:
        return Lane(number, self.dealt[self.hosts[number]], self._identity["seed"], cursor)

    def move(self, own: Sequence[int], state: Mapping[str, Any] | None) -> None:
        """Continue with other lanes, or from another state of the run.

        `state`: with the same row groups in quarantine; None: from the beginning. Lanes that stay
        with this rank keep their packed rows and the rows of the last batch. Raises DataError for a
        state of other data or settings.
        """
        self._producer.move(self._start(own, state), self._lane)

    def hurry(self, steps: int) -> None:
        """Make the rows of at least so many steps first, until `next` is called."""
        self._producer.hurry(steps)

    def is_ready(self) -> bool:
        """Will `next` return, or raise, at once, for a few steps or those of `hurry`?"""
        return self._producer.is_ready()

    def reading(self) -> str:
        """The file that is read at this moment; "" if none. Any thread may ask."""
        return self._producer.reading()

    def next(self) -> Batch:
        """Wait for the next batch and return it.

        Raises BadRowGroup if a row group cannot be read; DataError, or an OSError that may pass, if
        the whole dataset cannot be read. RuntimeError after `close`.
        """
        started = time.monotonic()
        parts = self._producer.take()
        wait_s = time.monotonic() - started
        tokens, valid, hashes, origin = (np.concatenate(it) for it in zip(*parts, strict=True))
        cursors = np.zeros((self._identity["lanes"], 3), np.int64)
        for lane in self._producer.lanes:
            cursors[lane.number] = lane.cursor
        return Batch(
            tokens=tokens,
            valid=valid,
            lanes=[lane.number for lane in self._producer.lanes],
            targets=int(np.count_nonzero(valid)),
            fp=int(hashes.sum(dtype=np.uint64)),
            cursors=cursors,
            wait_s=wait_s,
            bos=self._bos,
            origin=origin,
        )

    def state(self, cursors: np.ndarray) -> dict[str, Any]:
        """The state for a checkpoint, as JSON; `cursors`: a batch's, summed over all ranks.

        Less than 1 KB for 48 lanes, plus the list of quarantined row groups.
        """
        state = self._identity | {"lanes": as_text(np.asarray(cursors).tolist())}
        return state | ({"quarantined": self.quarantined} if self.quarantined else {})

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        self._stop()


def eval_rows(
    dataset: Dataset, seq_len: int, max_tokens: int, pack: str = "best-fit", split: Split = "val"
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a split, by default validation: (tokens (n, T+1), valid (n, T)), as in Batch.

    They hold about max_tokens tokens: at least one row, at most the whole split, and always the
    same rows. Raises DataError if the split has no text or cannot be read.
    """
    source = _source(dataset, split, seq_len, pack)
    lane = Lane(0, _deal(source, 1, seed=0)[0], seed=0)
    encode = source.encoder()
    wanted = max(1, max_tokens // seq_len)
    parts = []
    with storage.waiting(lambda: lane.reading):
        while wanted > 0 and lane.epoch == 0:
            if made := lane.make(source, encode):
                parts.append(made.rows.take(slice(wanted)))
                wanted -= len(parts[-1])
    return np.concatenate([p.tokens for p in parts]), np.concatenate([p.valid for p in parts])


def _source(
    dataset: Dataset, split: Split, seq_len: int, pack: str, cache: Cache | None = None
) -> Source:
    groups = dataset.row_groups(split)
    return Source(dataset, split, groups, dataset.tokenizer(), seq_len, pack, cache)


def _identity(source: Source, lanes: int, batch: int, seed: int) -> dict[str, Any]:
    """The fields of a state that must be the same when it is continued."""
    identity = {
        "version": STATE_VERSION,
        "pack": IDS[source.pack],
        "dataset": source.dataset.sha256[:_HASH_DIGITS],
        "tokenizer": source.tokenizer.sha256[:_HASH_DIGITS],
        "seq_len": source.seq_len,
        "seed": seed,
        "batch": batch,
        "lanes": lanes,
    }
    return identity | ({"library": source.library} if source.library else {})


def _deal(source: Source, lanes: int, seed: int) -> list[list[Block]]:
    dealt = deal([group.tokens for group in source.groups], lanes, seed)
    if not any(dealt):
        raise DataError(
            f"{source.dataset.dir} has no text in its {source.split} split: prepare it from "
            "sources with text"
        )
    return dealt


def _cursors(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[list[int]]:
    """The lanes' cursors in a state; DataError, with every difference, if it does not match."""
    cursors = from_text(str(state.get("lanes", "")))
    saved = {**state, "lanes": len(cursors)}
    changed = [
        f"{name}: {str(saved.get(name)):.20} -> {str(now):.20}"
        for name, now in identity.items()
        if saved.get(name) != now
    ]
    if changed:
        raise DataError(
            "the saved position in the data does not fit (saved -> now): "
            + ", ".join(changed)
            + "; use the dataset, the settings and (library) the package version that the run "
            "started with, or start a new run"
        )
    return cursors


def as_text(cursors: Iterable[Sequence[int]]) -> str:
    """Format cursors as in a state: `epoch.block.row` for each lane."""
    return " ".join(".".join(map(str, cursor)) for cursor in cursors)


def from_text(text: str) -> list[list[int]]:
    """The inverse of as_text."""
    return [[int(number) for number in cursor.split(".")] for cursor in text.split()]
