"""Which documents come next in which lane: pure functions of (row groups, seed), no I/O.

A lane is a virtual rank; their number is fixed for the run. Every step takes the same number of
rows from every lane, and a rank owns some of the lanes, so the rows of a step do not depend on the
world size. The position in the whole dataset is one cursor (epoch, block, row) a lane.

- A *share* is a row group, or an equal part of one where there are fewer of them than lanes.
  Shares are dealt once, largest first, each to the lane with the least bytes so far. With fewer
  documents than lanes, several lanes are given the same share: they read the same documents and
  shuffle differently.
- A *block*, what is tokenised and packed at once, is a share of at most 1024 documents and 8 MiB,
  or one of equal slices, of about 512 documents or less, of a larger one.
- A lane goes through its shares in another order in each epoch, and begins its next epoch without
  waiting for the other lanes. So there is nothing to pad and nothing to drop.

All orders are stable sorts of splitmix64 keys. NumPy's generators may change their streams
between versions, its default sort orders ties by processor, and `hash` changes with the process.
"""

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

WHOLE_DOCUMENTS = 1024  # a share of up to so many documents is one block
SLICE_DOCUMENTS = 512  # a larger one is cut into blocks of about so many
BLOCK_BYTES = 2**23  # of text in a block, at most, about: 1024 books would take a lot of memory
# What a key is for; part of every key, so that no two orders are related.
DEAL, EPOCH, ROWS, EVAL = 1, 2, 3, 4

_WORD = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(*words: int) -> int:
    """One 64-bit key from whole numbers, by splitmix64 (Steele, Lea and Flood 2014)."""
    x = 0
    for word in words:
        x = (x + word + _GOLDEN) & _WORD
        x = ((x ^ x >> 30) * _MIX_1) & _WORD
        x = ((x ^ x >> 27) * _MIX_2) & _WORD
        x ^= x >> 31
    return x


def keyed_order(n: int, *words: int) -> np.ndarray:
    """A permutation of range(n), int64, that depends on the words alone."""
    # The splitmix64 stream that begins at key(words); uint64 arrays wrap around.
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key(*words))
    x = (x ^ x >> np.uint64(30)) * np.uint64(_MIX_1)
    x = (x ^ x >> np.uint64(27)) * np.uint64(_MIX_2)
    return np.argsort(x ^ x >> np.uint64(31), kind="stable")


@dataclass(frozen=True, slots=True)
class Block:
    """Documents `part * n // parts` to `(part + 1) * n // parts` of a row group.

    `group` is an index in the list of row groups; n is how many documents of it have text.
    """

    group: int
    part: int
    parts: int

    def of(self, documents: Sequence[Any]) -> Sequence[Any]:
        """The block's part of its row group's documents.

        Where there are fewer documents than parts, each part is one document and some are in
        several parts: otherwise a lane could be without text.
        """
        n = len(documents)
        if n < self.parts:
            return documents[self.part % n : self.part % n + 1] if n else documents
        return documents[self.part * n // self.parts : (self.part + 1) * n // self.parts]


@dataclass(frozen=True, slots=True)
class Share:
    """Blocks `first` to `stop - 1` of the `parts` of a row group: the unit that lanes are dealt."""

    group: int
    first: int
    stop: int
    parts: int


def deal(groups: Sequence[tuple[int, int]], lanes: int, seed: int) -> list[list[Share]]:
    """Deal row groups of (documents, bytes of text) to lanes: a list of shares for each lane.

    Row groups without text are left out; without any text, no lane is given a share.
    """
    shares, sizes = _shares(groups, lanes)
    # Largest first (Graham 1969), so that lanes end up alike; in keyed order among equals.
    order = sorted(keyed_order(len(shares), seed, DEAL).tolist(), key=lambda i: -sizes[i])
    loads = [(0, lane) for lane in range(lanes)]  # a heap: least bytes, then lowest lane
    dealt: list[list[Share]] = [[] for _ in range(lanes)]
    for i in order:
        load, lane = heapq.heappop(loads)
        dealt[lane].append(shares[i])
        heapq.heappush(loads, (load + max(sizes[i], 1), lane))
    for lane in range(len(shares), lanes if shares else 0):
        dealt[lane] = dealt[lane % len(shares)]
    return dealt


def hosts(dealt: Sequence[Sequence[Share]], quarantined: Collection[int]) -> list[int]:
    """For each lane the lane whose shares it reads: its own, unless all are in quarantine.

    Then it is the next lane that has a share left (after the last lane comes lane 0): both read the
    same documents, in different orders. [] where no lane has a share left.
    """
    left = [any(share.group not in quarantined for share in shares) for shares in dealt]
    if not any(left):
        return []
    host, found = left.index(True), []
    for lane in reversed(range(len(dealt))):
        host = lane if left[lane] else host
        found.append(host)
    return found[::-1]


def _shares(groups: Sequence[tuple[int, int]], lanes: int) -> tuple[list[Share], list[int]]:
    """The shares of all row groups, in their order, and the bytes of each."""
    text = {g: size for g, (n, size) in enumerate(groups) if n and size}
    cuts = dict.fromkeys(text, 1)
    # Cut the row group with most documents a share. Not the one with most bytes: that is often one
    # huge document, and its other shares would be small and read again and again.
    heap = [(-groups[g][0], g) for g in text]
    heapq.heapify(heap)
    for _ in range(len(text), lanes):
        if not heap or heap[0][0] == -1:
            break  # fewer documents than lanes
        g = heap[0][1]
        cuts[g] += 1
        heapq.heapreplace(heap, (-groups[g][0] // cuts[g], g))
    shares, sizes = [], []
    for g, k in cuts.items():
        n = _slices(groups[g][0] // k, text[g] // k)
        shares += [Share(g, i * n, (i + 1) * n, k * n) for i in range(k)]
        sizes += [text[g] // k] * k
    return shares, sizes


def _slices(documents: int, size: int) -> int:
    """The number of blocks of a share of so many bytes and documents, or one document more."""
    by_documents = 1 if documents <= WHOLE_DOCUMENTS else -(-documents // SLICE_DOCUMENTS)
    return min(documents, max(by_documents, -(-size // BLOCK_BYTES)))


def blocks(shares: Sequence[Share], seed: int, lane: int, epoch: int) -> list[Block]:
    """The blocks of one epoch of a lane, in order; as many in every epoch.

    The blocks of a share follow each other, so that its row group is read once.
    """
    order = keyed_order(len(shares), seed, EPOCH, lane, epoch).tolist()
    return [
        Block(share.group, part, share.parts)
        for share in (shares[i] for i in order)
        for part in range(share.first, share.stop)
    ]


def rows_order(n: int, seed: int, lane: int, epoch: int, block: int) -> np.ndarray:
    """The order of a block's n rows, int64: packing puts long documents first, this mixes them."""
    return keyed_order(n, seed, ROWS, lane, epoch, block)


def owned(rank: int, world_size: int, lanes: int) -> range:
    """The lanes of a rank: one range of floor or ceil of lanes / world_size of them."""
    return range(rank * lanes // world_size, (rank + 1) * lanes // world_size)
