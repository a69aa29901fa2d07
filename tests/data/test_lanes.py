"""Lanes: dealing row groups, blocks, epochs and ownership, as pure functions."""

import random
from collections import Counter

import numpy as np
import pytest

from gptddp.data import lanes


def groups_of(seed: int, n: int, most: int = 3000) -> list[tuple[int, int]]:
    """n row groups of some documents, each of a few hundred bytes."""
    rng = random.Random(seed)
    return [(rows := rng.randint(1, most), rows * rng.randint(50, 900)) for _ in range(n)]


def documents_of(groups, shares, seed=7, lane=0, epoch=0) -> Counter:
    """How often each (row group, document) comes in an epoch of a lane."""
    seen: Counter = Counter()
    for block in lanes.blocks(shares, seed, lane, epoch):
        seen.update((block.group, i) for i in block.of(range(groups[block.group][0])))
    return seen


def test_a_key_is_splitmix64():
    """The first outputs of splitmix64 with state 0 are the published ones."""
    assert lanes.key(0) == 0xE220A8397B1DCDAF
    order = lanes.keyed_order(5, 3, 1)
    state, expected = lanes.key(3, 1), []
    for i in range(1, 6):
        expected.append(
            (lanes.key((state + i * 0x9E3779B97F4A7C15 - 0x9E3779B97F4A7C15) % 2**64), i)
        )
    assert order.tolist() == [i - 1 for _, i in sorted(expected)]


def test_keys_depend_on_every_word_and_on_their_order():
    """No two purposes, lanes, epochs or blocks share a key."""
    words = [(s, p, v, e) for s in range(3) for p in range(4) for v in range(8) for e in range(8)]
    assert len({lanes.key(*w) for w in words}) == len(words)


@pytest.mark.parametrize("n_groups", [1, 2, 3, 5, 12, 13, 48, 200])
@pytest.mark.parametrize("n_lanes", [1, 5, 12, 48])
def test_an_epoch_of_all_lanes_has_every_document_once(n_groups, n_lanes):
    """The lanes' epochs together are the row groups' documents, each exactly once."""
    groups = groups_of(n_groups, n_groups)
    dealt = lanes.deal(groups, n_lanes, seed=7)
    seen: Counter = Counter()
    for lane, shares in enumerate(dealt):
        assert shares, f"lane {lane} has nothing"
        seen += documents_of(groups, shares, lane=lane)
    assert seen == Counter((g, i) for g, (rows, _) in enumerate(groups) for i in range(rows))


@pytest.mark.parametrize("rows", [5, 7, 100])
def test_a_share_of_huge_documents_has_each_once(rows):
    """Blocks cut by bytes, of row groups cut for lanes, still have every document once."""
    groups, seen = [(rows, rows << 30)], Counter()
    for lane, shares in enumerate(lanes.deal(groups, 2, seed=7)):
        seen += documents_of(groups, shares, lane=lane)
    assert seen == Counter((0, i) for i in range(rows))


@pytest.mark.parametrize(("rows", "n_lanes"), [(1, 1), (1, 4), (3, 8), (8, 8), (9, 8), (1, 48)])
def test_fewer_documents_than_lanes_are_shared_evenly(rows, n_lanes):
    """Each lane gets a document, and no document comes more than once more than another."""
    groups = [(rows, rows * 100)]
    dealt = lanes.deal(groups, n_lanes, seed=7)
    seen: Counter = Counter()
    for lane, shares in enumerate(dealt):
        mine = documents_of(groups, shares, lane=lane)
        assert mine
        seen += mine
    assert len(seen) == rows
    assert max(seen.values()) - min(seen.values()) <= (1 if rows < n_lanes else 0)


def test_lanes_are_of_similar_size():
    """With many row groups of different sizes, lanes differ by a few percent."""
    groups = groups_of(1, 400)
    dealt = lanes.deal(groups, 12, seed=7)
    loads = [sum(groups[s.group][1] for s in shares) for shares in dealt]
    assert max(loads) < 1.02 * min(loads)


def test_the_largest_row_groups_are_shared():
    """Where lanes are more than row groups, those with most documents are cut, evenly."""
    dealt = lanes.deal([(100, 5000), (10, 90_000), (200, 10_000), (50, 2500)], 10, seed=7)
    assert Counter(share.group for shares in dealt for share in shares) == {0: 3, 1: 1, 2: 5, 3: 1}


def test_one_huge_document_does_not_unbalance_the_other_lanes():
    """A row group with a huge document is a lane of its own, the others are of similar size."""
    groups = [(20, 10_000_000)] + [(20, 100_000)] * 199
    dealt = lanes.deal(groups, 48, seed=7)
    loads = sorted(sum(groups[s.group][1] for s in shares) for shares in dealt)
    assert loads[-1] == 10_000_000 and loads[-2] <= loads[0] + 100_000


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (1, 100, 1),
        (1024, 2**23, 1),
        (1025, 2**20, 3),
        (5000, 2**20, 10),
        (1000, 2**33, 1000),
        (1000, 2**27, 16),
        (3, 2**33, 3),
        (1, 2**33, 1),
    ],
)
def test_blocks_are_bounded(rows, size, expected):
    """A share of up to 1024 documents and 8 MiB is one block, a larger one is sliced."""
    made = lanes.blocks(lanes.deal([(rows, size)], 1, seed=7)[0], 7, 0, 0)
    assert len(made) == expected
    sizes = [len(block.of(range(rows))) for block in made]
    assert sum(sizes) == rows and max(sizes) - min(sizes) <= 1


def test_each_epoch_and_lane_has_its_own_order():
    """Orders of epochs differ, hold the same blocks, and come back with the same arguments."""
    shares = lanes.deal(groups_of(2, 40, most=900), 1, seed=7)[0]
    orders = [lanes.blocks(shares, 7, lane, epoch) for lane in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({frozenset(order) for order in orders}) == 1
    assert orders[3] == lanes.blocks(shares, 7, 1, 1)
    assert lanes.blocks(shares, 8, 0, 0) != orders[0]


def test_row_groups_without_text_are_left_out():
    """Empty row groups are dealt to nobody; with no text at all nobody has a share."""
    dealt = lanes.deal([(0, 0), (10, 0), (10, 500), (0, 8)], 2, seed=7)
    assert {share.group for shares in dealt for share in shares} == {2}
    assert lanes.deal([(10, 0)], 3, seed=7) == [[], [], []]
    assert lanes.deal([], 3, seed=7) == [[], [], []]


def test_documents_without_text_do_not_starve_a_lane():
    """Parts are of the documents that have text; fewer of them than parts are repeated."""
    parts = [lanes.Block(0, part, 4) for part in range(4)]
    assert [list(block.of(["a", "b"])) for block in parts] == [["a"], ["b"], ["a"], ["b"]]
    assert [list(block.of([])) for block in parts] == [[]] * 4


@pytest.mark.parametrize("n_lanes", [1, 2, 12, 48])
def test_every_lane_is_owned_by_one_rank(n_lanes):
    """At any world size up to the number of lanes, ranks own all lanes, floor or ceil of V/W."""
    for world_size in range(1, n_lanes + 1):
        ranges = [lanes.owned(rank, world_size, n_lanes) for rank in range(world_size)]
        assert [lane for owned in ranges for lane in owned] == list(range(n_lanes))
        sizes = {len(owned) for owned in ranges}
        assert sizes <= {n_lanes // world_size, -(-n_lanes // world_size)}


def test_rows_are_permuted():
    """The order of rows is a permutation with a key of its own for each block."""
    order = lanes.rows_order(1000, 7, 3, 0, 5)
    assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(order, lanes.rows_order(1000, 7, 3, 1, 5))
    assert not np.array_equal(order, lanes.rows_order(1000, 7, 3, 0, 6))
