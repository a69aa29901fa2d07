"""Makes the blocks of a lane, one after the other: read, tokenise, pack, shuffle, hash."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gptddp.data.cache import Cache
from gptddp.data.dataset import Dataset, RowGroup
from gptddp.data.lanes import Block, blocks, rows_order
from gptddp.data.packing import IDS, Packed, hashes, origins, pack
from gptddp.data.tokenizer import Tokenizer
from gptddp.distributed.pulse import beat
from gptddp.errors import BadRowGroup, DataError

RETRY_S = (0.2, 1.0, 5.0)  # waits before reading a row group again
_NEVER = threading.Event()  # never set

Encode = Callable[[Any], np.ndarray]  # takes a document: text or token ids
Document = tuple[Any, bool]  # text or ids; does another row of the dataset continue it?


@dataclass(frozen=True)
class Made:
    """A packed block with its rows in their final order, and its origin."""

    epoch: int
    block: int
    after: tuple[int, int]  # (epoch, block) of the next block
    first: int  # index of rows[0] in the block: not 0 if a restored position was inside it
    rows: Packed
    hashes: np.ndarray  # uint64, one per row
    origin: np.ndarray  # int64, four per row: see packing.origins


@dataclass
class Source:
    """One split of a dataset, and everything needed to make its blocks."""

    dataset: Dataset
    split: str
    groups: Sequence[RowGroup]
    tokenizer: Tokenizer
    seq_len: int
    pack: str = "best-fit"
    cache: Cache | None = None
    quarantined: frozenset[int] = frozenset()  # row groups that count as empty; never read
    # Packed rows of row groups that several lanes share, until another lane takes its part.
    _shared: dict[int, Packed] = field(default_factory=dict)

    @property
    def library(self) -> str | None:
        """The library that makes the tokens, with its version; None if there is none."""
        return None if self.dataset.pretokenized else self.tokenizer.library

    def encoder(self) -> Encode:
        """A new function from a document to its tokens (1-D), for use in one thread."""
        return (lambda ids: ids) if self.dataset.pretokenized else self.tokenizer.encoder()

    def name(self, group: int) -> str:
        """The name of a row group in a message."""
        it = self.groups[group]
        return f"{self.dataset.dir / it.path}, row group {it.index}"

    def cached(self, block: Block) -> tuple[Packed | None, tuple[object, ...]]:
        """(all rows of the block's row group or None, the row group's cache key: see `keep`)."""
        if (rows := self._shared.pop(block.group, None)) is not None:
            return rows, ()
        if self.cache is None or block.group in self.quarantined:
            return None, ()
        group = self.groups[block.group]
        try:
            file = (self.dataset.dir / group.path).stat()
        except OSError:  # reading it will report the error
            return None, ()
        identity = (
            self.dataset.sha256,
            self.tokenizer.sha256,
            self.library,
            IDS[self.pack],
            self.seq_len,
            group.path,
            group.index,
            file.st_size,
            file.st_mtime_ns,
        )
        return self.cache.get(identity, self.seq_len, self.tokenizer.dtype), identity

    def keep(self, block: Block, identity: tuple[object, ...], rows: Packed) -> None:
        """Keep all rows of the block's row group, under the identity that `cached` returned.

        Without a cache they stay in memory if another lane has a part: at most one row group per
        lane.
        """
        if self.cache is None and not block.is_whole:
            self._shared[block.group] = rows
        elif self.cache is not None and identity:
            self.cache.put(identity, rows)

    def documents(self, group: int, stopped: threading.Event = _NEVER) -> list[Document]:
        """The documents of a row group that are not empty, in order: [] in quarantine.

        Errors of a network volume may pass, so reading is retried, after waits that `stopped` ends.
        Raises BadRowGroup after the last attempt; DataError, or an OSError that may pass, if the
        whole dataset is out of reach.
        """
        if group in self.quarantined:
            return []
        for wait_s in (0.0, *RETRY_S):
            stopped.wait(wait_s)
            try:
                return self._read(group)
            except DataError as error:
                last = error
        self.dataset.check_storage()  # an absent volume must not count as bad files
        # Validation has no quarantine: losses can be compared only over the same rows.
        way_out = ", or train without it: --on-bad quarantine" if self.split == "train" else ""
        raise BadRowGroup(
            f"{last} ({1 + len(RETRY_S)} attempts within {sum(RETRY_S):.0f} s); put the file "
            f"back from a copy, or prepare the data again{way_out}",
            group,
        ) from last

    def pack_rows(
        self, documents: Sequence[Document], encode: Encode, stopped: threading.Event = _NEVER
    ) -> Packed | None:
        """Tokenise and pack the documents of a row group; None if stopped."""
        tokens = []
        for document, _ in documents:
            if stopped.is_set():
                return None
            tokens.append(encode(document))
            beat()  # the trainer may be waiting for these rows
        goes_on = [mark for _, mark in documents]
        bos, dtype = self.tokenizer.bos, self.tokenizer.dtype
        return pack(tokens, bos, self.seq_len, dtype, self.pack, goes_on)

    def _read(self, group: int) -> list[Document]:
        found = self.dataset.read(self.groups[group])
        goes_on = self.dataset.goes_on(self.groups[group])
        both: Iterable[tuple[Any, Any]] = zip(found, goes_on, strict=True)
        return [(text, bool(mark)) for text, mark in both if text is not None and len(text)]


class Lane:
    """One lane: the next block to make, the ready rows, the next row to take."""

    def __init__(
        self, number: int, dealt: Sequence[Block], seed: int, cursor: Sequence[int] = (0, 0, 0)
    ) -> None:
        """`cursor`: (epoch, block, row) to start at; DataError if the lane has no such block."""
        self.number, self.dealt, self.seed = number, dealt, seed
        # making blocks: used only by the one thread that makes its next block
        self.stopped = threading.Event()  # its rows are not needed any more
        self.error: BaseException | None = None
        self.reading = ""  # the name of the row group that is being read; for any thread
        self.epoch, self.block, self._skip = cursor
        self._plan = blocks(dealt, seed, number, self.epoch)
        if not 0 <= self.block < len(self._plan):
            raise self._misplaced(f"only {len(self._plan)} blocks")
        self._without_rows = 0  # consecutive blocks without rows
        # taking rows: under the producer's lock
        self.ready: deque[Made] = deque()
        self.used: list[Made] = []  # blocks that the last call of `take` finished
        self.taken = 0  # rows taken of ready[0]
        self.rows = 0  # rows that are ready and not taken
        self.cursor = tuple(cursor)

    def make(self, source: Source, encode: Encode) -> Made | None:
        """Make the next block and advance; None if it has no rows, or if stopped.

        Raises BadRowGroup if its row group cannot be read; DataError if the whole dataset is out of
        reach, if an epoch has no rows, or if the cursor is past the block's last row.
        """
        block, quarantined = self._plan[self.block], source.quarantined
        if block.group in quarantined:
            self._skip = 0  # some of its rows may have been trained before it was damaged
        documents: Sequence[Document] = ()
        self.reading = source.name(block.group)
        try:
            packed, identity = source.cached(block)
            if packed is None:
                documents = source.documents(block.group, self.stopped)
        finally:
            self.reading = ""
        if packed is None:
            if (packed := source.pack_rows(documents, encode, self.stopped)) is None:
                return None
            source.keep(block, identity, packed)
        # the only readable block of a lane has a row, if need be one that another lane has too
        alone = all(other.group in quarantined for other in self._plan if other != block)
        rows = block.rows(len(packed), self.seed, least=alone)
        at, first = (self.epoch, self.block), self._skip
        self._advance(len(rows))
        if not len(rows):
            return None
        packed = packed.take(rows[rows_order(len(rows), self.seed, self.number, *at)])
        origin = origins(len(packed), self.number, *at)
        prints = hashes(packed, origin)
        after, rest = (self.epoch, self.block), slice(first, None)
        return Made(*at, after, first, packed.take(rest), prints[rest], origin[rest])

    def take(self, n: int) -> list[tuple[np.ndarray, ...]]:
        """The next n rows, which must be ready: parts (tokens, valid, hashes, origin), as views."""
        parts: list[tuple[np.ndarray, ...]] = []
        self.used.clear()
        self.rows -= n
        while n:
            made = self.ready[0]
            start, self.taken = self.taken, min(self.taken + n, len(made.rows))
            part = slice(start, self.taken)
            rows = made.rows.take(part)
            parts.append((rows.tokens, rows.valid, made.hashes[part], made.origin[part]))
            n -= self.taken - start
            self.cursor = (made.epoch, made.block, made.first + self.taken)
            if self.taken == len(made.rows):
                self.used.append(self.ready.popleft())
                self.taken, self.cursor = 0, (*made.after, 0)
        return parts

    def go_to(self, cursor: Sequence[int]) -> bool:
        """Set the next row to take: back to a row of the last `take`, or forward.

        False if the row is not in memory.
        """
        if tuple(cursor) == self.cursor:
            return True
        there = [*self.used, *self.ready]
        for i, made in enumerate(there):
            row = cursor[2] - made.first
            if (made.epoch, made.block) == tuple(cursor[:2]) and 0 <= row < len(made.rows):
                self.used, self.ready, self.taken = [], deque(there[i:]), row
                self.rows = sum(len(it.rows) for it in self.ready) - row
                self.cursor = tuple(cursor)
                return True
        return False

    def _advance(self, n_rows: int) -> None:
        if self._skip and self._skip >= n_rows:
            raise self._misplaced(f"only {n_rows} rows in this block")
        self._skip = 0
        self._without_rows = 0 if n_rows else self._without_rows + 1
        if self._without_rows >= 2 * len(self._plan):  # a whole epoch, from any block
            raise DataError(
                f"lane {self.number} has no text: the documents of its {len(self.dealt)} row "
                "groups have no tokens; prepare the dataset again (which drops empty documents), "
                "or start a run with fewer lanes"
            )
        self.block += 1
        if self.block == len(self._plan):
            self.epoch, self.block = self.epoch + 1, 0
            self._plan = blocks(self.dealt, self.seed, self.number, self.epoch)

    def _misplaced(self, found: str) -> DataError:
        return DataError(
            f"the saved position of lane {self.number} is row {self._skip} of block {self.block}, "
            f"but the lane has {found}: the state is damaged, or belongs to other data"
        )
