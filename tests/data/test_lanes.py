"""Lanes: dealing row groups, blocks, epochs and ownership, as pure functions."""

import itertools
import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from gptddp.data import lanes


def sizes_of(n: int, how: str) -> list[int]:
    """The sizes of n row groups: equal, random, or most of the text in a few of them."""
    rng = random.Random(f"{n}{how}")
    sizes = {"alike": lambda: 3e6, "any": lambda: rng.uniform(1, 3e6)}
    return [int(sizes.get(how, lambda: 1e6 * rng.lognormvariate(0, 2))()) for _ in range(n)]


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


@pytest.mark.parametrize("how", ["alike", "any", "few"])
@pytest.mark.parametrize("n_groups", [1, 2, 13, 47, 48, 49, 64, 96, 97, 192, 200, 215, 1000])
@pytest.mark.parametrize("n_lanes", [1, 5, 12, 48, 64, 100, 192])
def test_lanes_have_equal_shares_of_the_rows(n_groups, n_lanes, how):
    """For any number and sizes of row groups, an epoch of all lanes has every row once, and at most
    0.1 % of the rows are unseen after the tokens of one epoch.

    A step takes equally many rows of each lane, so a lane's rows above the mean are unseen then.
    """
    sizes = np.array(sizes_of(n_groups, how))
    n_rows = -(-sizes // 10_000)
    begins = np.cumsum(n_rows) - n_rows
    dealt, seen, loads = lanes.deal(sizes.tolist(), n_lanes, seed=7), [], []
    for blocks in dealt:
        found = [begins[it.group] + it.rows(n_rows[it.group], seed=7) for it in blocks]
        seen.append(np.concatenate(found))
        loads.append(sum(block.stop - block.first for block in blocks))
    assert sum(loads) == sum(sizes) and max(loads) - min(loads) <= 1
    assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(n_rows.sum()))
    rows = np.array([len(found) for found in seen])
    if rows.mean() > 500:  # with fewer rows, a single row is more than 0.1 %
        assert np.maximum(0, rows - rows.mean()).sum() <= 0.001 * rows.sum()


def test_row_groups_are_cut_only_where_lanes_meet():
    """A lane has whole row groups except at its ends, so few are packed for two lanes."""
    dealt = lanes.deal(sizes_of(500, "any"), 48, seed=7)
    cut = [[block for block in blocks if not block.is_whole] for blocks in dealt]
    assert all(len(blocks) <= 2 for blocks in cut)
    assert all(a[-1].group == b[0].group for a, b in pairwise(cut))
    assert sorted(b.group for blocks in dealt for b in blocks if b.is_whole) == sorted(
        set(range(500)) - {block.group for blocks in cut for block in blocks}
    )


@pytest.mark.parametrize("n_rows", [1, 3, 7, 8, 9, 48])
def test_fewer_rows_than_lanes_are_shared_evenly(n_rows):
    """Each lane within one row group has a row, and all rows occur equally often."""
    dealt = lanes.deal([n_rows * 100], 8, seed=7)
    rows = [block.rows(n_rows, 7, least=1).tolist() for ((block),) in dealt]
    assert all(rows)
    seen = Counter(row for found in rows for row in found)
    assert len(seen) == n_rows
    assert max(seen.values()) - min(seen.values()) <= (1 if n_rows < 8 else 0)


def test_the_parts_of_a_row_group_are_alike():
    """Packing puts long documents first, so each part has rows from the whole row group."""
    for (block,) in lanes.deal([4000], 4, seed=7):
        rows = block.rows(4000, seed=7)
        assert len(rows) == 1000 and abs(rows.mean() - 2000) < 120


def test_each_epoch_and_lane_has_its_own_order():
    """Orders of epochs differ and have the same blocks; the same arguments give the same order."""
    dealt = lanes.deal(sizes_of(40, "any"), 1, seed=7)[0]
    orders = [lanes.blocks(dealt, 7, lane, epoch) for lane in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert len({frozenset(order) for order in orders}) == 1
    assert orders[3] == lanes.blocks(dealt, 7, 1, 1)
    assert lanes.blocks(dealt, 8, 0, 0) != orders[0]


def test_row_groups_without_text_are_skipped():
    """Empty row groups are dealt to no lane; without any text no lane has a block."""
    dealt = lanes.deal([0, 0, 500, 0], 2, seed=7)
    assert [[block.group for block in blocks] for blocks in dealt] == [[2], [2]]
    assert lanes.deal([0], 3, seed=7) == [[], [], []]
    assert lanes.deal([], 3, seed=7) == [[], [], []]


def test_a_lane_without_a_block_reads_the_blocks_of_the_next():
    """A lane has no block if there are fewer tokens than lanes, or if all are in quarantine."""
    dealt = lanes.deal([2], 5, seed=7)
    assert [len(blocks) for blocks in dealt] == [0, 0, 1, 0, 1]
    assert lanes.hosts(dealt, ()) == [2, 2, 2, 4, 4]
    dealt = lanes.deal([100] * 4, 4, seed=7)
    first, last = dealt[0][0].group, dealt[3][0].group
    assert lanes.hosts(dealt, {first, last}) == [1, 1, 2, 1]
    assert lanes.hosts(dealt, range(4)) == []


@pytest.mark.parametrize("n_lanes", [1, 2, 12, 48])
def test_every_lane_is_owned_by_one_rank(n_lanes):
    """At any world size up to the number of lanes, each rank owns V/W lanes, rounded up or down."""
    for world_size in range(1, n_lanes + 1):
        ranges = [lanes.owned(rank, world_size, n_lanes) for rank in range(world_size)]
        assert [lane for owned in ranges for lane in owned] == list(range(n_lanes))
        sizes = {len(owned) for owned in ranges}
        assert sizes <= {n_lanes // world_size, -(-n_lanes // world_size)}
        first = lanes.owners(n_lanes, [str(rank) for rank in range(world_size)])
        assert first == [str(rank) for rank, owned in enumerate(ranges) for _ in owned]


@pytest.mark.parametrize("n_lanes", [5, 12, 48])
@pytest.mark.parametrize("seed", range(4))
def test_lanes_stay_with_their_owners(n_lanes, seed):
    """In any sequence of worlds every rank has its number of lanes. A rank gets only lanes that it
    lacks, and one that loses some gets none. The same members change nothing, in any order: a
    worker that joins does not know its rank yet."""
    rng, fresh = random.Random(seed), itertools.count()
    members, before = [f"m{next(fresh)}"], []
    for _ in range(60):
        now = lanes.owners(n_lanes, members, before)
        counts = [now.count(it) for it in members]
        sizes = [len(lanes.owned(n, len(members), n_lanes)) for n in range(len(members))]
        assert sorted(counts) == sorted(sizes)
        assert lanes.shares(n_lanes, members) == dict(zip(members, counts, strict=True))
        assert lanes.owners(n_lanes, members, now) == now
        assert lanes.owners(n_lanes, rng.sample(members, len(members)), before) == now
        for rank, it in enumerate(members):
            had = {lane for lane, owner in enumerate(before) if owner == it}
            has = {lane for lane, owner in enumerate(now) if owner == it}
            assert len(had & has) == min(len(had), counts[rank])
        stay = [it for it in members if rng.random() < 0.7]
        new = [f"m{next(fresh)}" for _ in range(rng.randint(0, min(3, n_lanes - len(stay))))]
        members, before = stay + new or [f"m{next(fresh)}"], now
