"""The order of the rows in each lane: pure functions of (row groups, seed), no I/O.

A lane is a virtual rank; their number is fixed for the run. Every step takes the same number of
rows from every lane, and a rank owns some of the lanes, so the rows of a step do not depend on the
world size. The position in the whole dataset is one cursor (epoch, block, row) per lane.

- The row groups, in keyed order, form one line of tokens. It is cut into lanes of equal length, to
  a token (McNaughton 1959): a lane has some whole row groups, and a part of one at each end.
- A *block* is a row group of a lane, or the part of one that belongs to the lane. The whole row
  group is always tokenised and packed; a lane takes its part of the rows. So lanes have equal
  lengths however few or long the documents are, and every row is in one lane.
- A lane goes through its blocks in another order in each epoch, and starts its next epoch without
  waiting for the other lanes. So nothing is padded and nothing is dropped.

All orders are stable sorts of splitmix64 keys. NumPy's generators may change their streams between
versions, its default sort orders ties differently on each processor, and `hash` differs in each
process.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

# The purpose of a key. It is part of every key, so that no two orders are related.
DEAL, EPOCH, ROWS = 1, 2, 3

_WORD = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key(*words: int) -> int:
    """A 64-bit key from whole numbers, by splitmix64 (Steele, Lea and Flood 2014)."""
    x = 0
    for word in words:
        x = (x + word + _GOLDEN) & _WORD
        x = ((x ^ x >> 30) * _MIX_1) & _WORD
        x = ((x ^ x >> 27) * _MIX_2) & _WORD
        x ^= x >> 31
    return x


def keyed_order(n: int, *words: int) -> np.ndarray:
    """A permutation of range(n), int64, that depends only on n and the words."""
    # The splitmix64 stream that starts at key(words); uint64 arrays wrap around.
    x = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key(*words))
    x = (x ^ x >> np.uint64(30)) * np.uint64(_MIX_1)
    x = (x ^ x >> np.uint64(27)) * np.uint64(_MIX_2)
    return np.argsort(x ^ x >> np.uint64(31), kind="stable")


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a row group from token `first` to token `stop` of its `size` tokens.

    `group` is an index in the list of row groups.
    """

    group: int
    first: int
    stop: int
    size: int

    @property
    def is_whole(self) -> bool:
        """Is the block a whole row group? Otherwise other lanes have parts of it."""
        return self.stop - self.first == self.size

    def rows(self, n: int, seed: int, least: int = 0) -> np.ndarray:
        """Indices of this block's rows among the n packed rows of its row group, int64.

        At least `least` rows. The parts of a row group have each of its rows once, apart from that.
        The rows are in keyed order, because packing puts long documents first.
        """
        first, stop = self.first * n // self.size, self.stop * n // self.size
        return keyed_order(n, seed, DEAL, self.group)[first : max(stop, first + least)]


def deal(sizes: Sequence[int], lanes: int, seed: int) -> list[list[Block]]:
    """Deal row groups of these sizes, in tokens, to lanes: a list of blocks for each lane.

    Row groups without tokens are skipped; with fewer tokens than lanes, some lanes have no block.
    """
    dealt: list[list[Block]] = [[] for _ in range(lanes)]
    total, at, lane = sum(sizes), 0, 0
    for group in keyed_order(len(sizes), seed, DEAL).tolist():
        first, size = 0, sizes[group]
        while first < size:
            end = total * (lane + 1) // lanes  # where the lane ends
            if part := min(size - first, end - at):
                dealt[lane].append(Block(group, first, first + part, size))
            first, at = first + part, at + part
            lane += at == end
    return dealt


def hosts(dealt: Sequence[Sequence[Block]], quarantined: Collection[int]) -> list[int]:
    """For each lane, the lane whose blocks it reads: itself, unless all its blocks are quarantined.

    Then it is the next lane with a readable block (lane 0 follows the last lane): both read the
    same rows, in different orders. [] if no lane has a readable block.
    """
    has_block = [any(block.group not in quarantined for block in blocks) for blocks in dealt]
    if not any(has_block):
        return []
    host, found = has_block.index(True), []
    for lane in reversed(range(len(dealt))):
        host = lane if has_block[lane] else host
        found.append(host)
    return found[::-1]


def blocks(dealt: Sequence[Block], seed: int, lane: int, epoch: int) -> list[Block]:
    """The blocks of a lane in the order of one epoch."""
    return [dealt[i] for i in keyed_order(len(dealt), seed, EPOCH, lane, epoch).tolist()]


def rows_order(n: int, seed: int, lane: int, epoch: int, block: int) -> np.ndarray:
    """The order of a block's n rows in an epoch, int64."""
    return keyed_order(n, seed, ROWS, lane, epoch, block)


def owned(place: int, members: int, lanes: int) -> range:
    """The lanes at this place of a list of members: lanes / members, rounded down or up."""
    return range(place * lanes // members, (place + 1) * lanes // members)


def shares(lanes: int, members: Sequence[str]) -> dict[str, int]:
    """The number of lanes of each member, by its id.

    The order of the ids decides, and not that of the ranks: a worker that joins packs the rows of
    its lanes before it has a rank.
    """
    order = sorted(members, key=lambda it: (len(it), it))  # `10` comes after `9`
    return {it: len(owned(n, len(order), lanes)) for n, it in enumerate(order)}


def owners(lanes: int, members: Sequence[str], before: Sequence[str] = ()) -> list[str]:
    """The owner of each lane in a world, by its members' ids, whose order does not matter.

    `before`: the owners in the world before. As many lanes as possible stay with their owner,
    because another rank would have to pack their rows first, while all wait for it.
    """
    wants = shares(lanes, members)
    found = []
    for owner in before or [""] * lanes:
        stays = wants.get(owner, 0) > 0
        found.append(owner if stays else "")
        if stays:
            wants[owner] -= 1
    rest = iter([it for it, n in wants.items() for _ in range(n)])
    return [owner or next(rest) for owner in found]
