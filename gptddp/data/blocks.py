"""The blocks of a lane, made one after the other: read, tokenise, pack, shuffle, hash."""

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
_NEVER = threading.Event()  # which stops nobody

Encode = Callable[[Any], np.ndarray]  # of a document, text or token ids
Document = tuple[Any, bool]  # and whether it goes on in another row of the dataset


@dataclass(frozen=True)
class Made:
    """A packed block, its rows in their final order, and where it is from."""

    epoch: int
    block: int
    after: tuple[int, int]  # (epoch, block) of the next
    first: int  # where rows[0] is in the block: not 0 if a restored position was inside it
    rows: Packed
    hashes: np.ndarray  # uint64, one a row
    origin: np.ndarray  # int64, four a row: see packing.origins


@dataclass
class Source:
    """One split of a dataset, and all that is needed to make blocks of it."""

    dataset: Dataset
    split: str
    groups: Sequence[RowGroup]
    tokenizer: Tokenizer
    seq_len: int
    pack: str = "best-fit"
    cache: Cache | None = None
    quarantined: frozenset[int] = frozenset()  # row groups that count as empty; never read
    # Of row groups that were cut for lanes: the packed rows, until another lane takes its part.
    _shared: dict[int, Packed] = field(default_factory=dict)

    @property
    def library(self) -> str | None:
        """What makes the tokens, with its version; None where no library does."""
        return None if self.dataset.pretokenized else self.tokenizer.library

    def encoder(self) -> Encode:
        """A new function from a document to its tokens (1-D), to be used in one thread."""
        return (lambda ids: ids) if self.dataset.pretokenized else self.tokenizer.encoder()

    def name(self, group: int) -> str:
        """A row group as a message says it."""
        it = self.groups[group]
        return f"{self.dataset.dir / it.path}, row group {it.index}"

    def cached(self, block: Block) -> tuple[Packed | None, tuple[object, ...]]:
        """(all rows of the block's row group or None, its identity in the cache: see `keep`)."""
        if (rows := self._shared.pop(block.group, None)) is not None:
            return rows, ()
        if self.cache is None or block.group in self.quarantined:
            return None, ()
        group = self.groups[block.group]
        try:
            file = (self.dataset.dir / group.path).stat()
        except OSError:  # reading will say what is wrong
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
        """Keep all rows of the block's row group, under the identity that `cached` has given.

        Without a cache in memory, if another lane has a part: one row group a lane at most.
        """
        if self.cache is None and not block.is_whole:
            self._shared[block.group] = rows
        elif self.cache is not None and identity:
            self.cache.put(identity, rows)

    def documents(self, group: int, stopped: threading.Event = _NEVER) -> list[Document]:
        """The documents of a row group that have text, or tokens, in order: [] in quarantine.

        The errors of a network volume may pass, so reading is tried again, after waits that
        `stopped` ends. Raises BadRowGroup after the last attempt; DataError, or an OSError that may
        pass, where the whole dataset is out of reach.
        """
        if group in self.quarantined:
            return []
        for wait_s in (0.0, *RETRY_S):
            stopped.wait(wait_s)
            try:
                return self._read(group)
            except DataError as error:
                last = error
        self.dataset.check_storage()  # a volume that is away must not count as bad files
        # Validation has no quarantine: losses can be compared only over the same rows.
        way_out = ", or go on without it: --on-bad quarantine" if self.split == "train" else ""
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
            beat()  # for the trainer, which may wait for these rows
        goes_on = [mark for _, mark in documents]
        bos, dtype = self.tokenizer.bos, self.tokenizer.dtype
        return pack(tokens, bos, self.seq_len, dtype, self.pack, goes_on)

    def _read(self, group: int) -> list[Document]:
        found = self.dataset.read(self.groups[group])
        goes_on = self.dataset.goes_on(self.groups[group])
        both: Iterable[tuple[Any, Any]] = zip(found, goes_on, strict=True)
        return [(text, bool(mark)) for text, mark in both if text is not None and len(text)]


class Lane:
    """One lane: the block to make next, the rows that are ready, the row to take next."""

    def __init__(
        self, number: int, dealt: Sequence[Block], seed: int, cursor: Sequence[int] = (0, 0, 0)
    ) -> None:
        """`cursor`: (epoch, block, row) to begin at; DataError where the lane has no such block."""
        self.number, self.dealt, self.seed = number, dealt, seed
        # making blocks: used only by the thread that has set `busy`
        self.busy = False
        self.stopped = threading.Event()  # nobody wants its rows any more
        self.error: BaseException | None = None
        self.reading = ""  # the file, as a message says it, while it is read; for any thread
        self.epoch, self.block, self._skip = cursor
        self._plan = blocks(dealt, seed, number, self.epoch)
        if not 0 <= self.block < len(self._plan):
            raise self._misplaced(f"only {len(self._plan)} blocks")
        self._without_rows = 0  # blocks without rows, one after the other
        # taking rows: under the producer's lock
        self.ready: deque[Made] = deque()
        self.used: list[Made] = []  # that the last rows taken were the end of
        self.taken = 0  # rows of ready[0]
        self.rows = 0  # ready and not taken
        self.cursor = tuple(cursor)

    def make(self, source: Source, encode: Encode) -> Made | None:
        """Make the next block and move on; None if it has no rows, or if stopped.

        Raises BadRowGroup when its row group cannot be read; DataError when the whole dataset is
        out of reach, when an epoch has no rows, or when the cursor is behind the block's last row.
        """
        block, quarantined = self._plan[self.block], source.quarantined
        if block.group in quarantined:
            self._skip = 0  # some of its rows may have been trained before it went bad
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
        # With fewer rows than lanes, several lanes have the same row.
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
        """The next n rows, which must be ready: parts of (tokens, valid, hashes, origin), views."""
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
        """Take the rows from this cursor on next: those last taken again, or only later ones.

        False where they are not among the rows that are there.
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
        if self._without_rows >= 2 * len(self._plan):  # from any block on, a whole epoch
            raise DataError(
                f"lane {self.number} has no text: none of the documents of its {len(self.dealt)} "
                "row groups gives a token; prepare the data set again (that leaves out empty "
                "documents), or begin a run with fewer lanes"
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
