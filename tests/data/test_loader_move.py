"""A loader that continues as another rank has the same batches, and packs nothing twice."""

import contextlib
import json
import random
import threading

import pytest
from support.loaders import LANES, corpus, file_waited_for, global_batch, open_loader, run, same

from gptddp.data.lanes import owned
from gptddp.errors import DataError

STEPS = 60


@pytest.mark.parametrize("seed", range(6))
def test_batches_do_not_depend_on_moves(seed):
    """Members join and leave at any step; some of the others have already taken one or two batches
    that must be taken again."""
    dataset, rng = corpus(), random.Random(seed)
    alone = run(dataset, [(1, STEPS)], STEPS)
    batches, state = [], None
    with contextlib.ExitStack() as stack:
        loaders = []
        while len(batches) < STEPS:
            stay = rng.sample(loaders, rng.randint(0, len(loaders)))
            size = rng.randint(max(1, len(stay)), LANES)
            for rank, loader in enumerate(stay):
                loader.move(owned(rank, size, LANES), state)
            settings = dict(world_size=size, state=state, threads=rng.randint(1, 2))
            loaders = stay + [
                stack.enter_context(open_loader(dataset, rank=rank, **settings))
                for rank in range(len(stay), size)
            ]
            for _ in range(rng.randint(0, 12)):
                batches.append(global_batch(loaders))
                state = json.loads(json.dumps(loaders[0].state(batches[-1].cursors)))
            for loader in loaders:
                for _ in range(rng.choice([0, 1, 1, 2])):
                    loader.next()
    same(batches[:STEPS], alone)


def test_a_lane_that_stays_keeps_its_packed_rows():
    """A lane keeps its packed rows if a batch is taken again, and across the end of a block."""
    alone = run(corpus(), [(1, STEPS)], STEPS)
    with open_loader(corpus(), rank=1, world_size=2) as loader, open_loader(corpus()) as whole:
        lanes = {lane.number: lane for lane in loader._producer.lanes}
        state = None
        for batch in alone[:40]:
            loader.next()
            loader.move(owned(1, 2, LANES), state)  # the same batch again
            loader.next()
            state = whole.state(batch.cursors)
        assert {lane.number: lane for lane in loader._producer.lanes} == lanes
        loader.move(owned(1, 3, LANES), state)  # lanes 4 to 7 become 2 to 4
        now = {lane.number: lane for lane in loader._producer.lanes}
        assert sorted(now) == [2, 3, 4] and now[4] is lanes[4]
        assert all(lanes[it].stopped.is_set() for it in (5, 6, 7))


def test_a_hanging_read_of_a_lane_that_moves_away_is_named():
    """It blocks the only thread, so the other lanes wait for the same file."""
    dataset, goes_on, hangs = corpus(), threading.Event(), threading.Event()

    def fail(group, attempt):
        hangs.set()
        goes_on.wait(30)

    dataset.fail = fail
    with open_loader(dataset, threads=1) as loader:
        assert hangs.wait(30)
        (busy,) = loader._producer._busy
        loader.move([lane for lane in range(LANES) if lane != busy.number], None)
        assert "row group" in file_waited_for(loader.next, goes_on)
    assert not loader._producer._busy


def test_a_state_of_another_run_is_refused():
    with open_loader(corpus()) as loader, open_loader(corpus(), seed=8) as other:
        state = other.state(other.next().cursors)
        with pytest.raises(DataError, match="seed: 8 -> 7"):
            loader.move(range(LANES), state)
