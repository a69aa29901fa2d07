"""Rows are passed to the model in slots, and hashed again in one of ten steps."""

import numpy as np
import pytest
import torch
from support.loaders import LANES, SEQ_LEN, corpus, open_loader

from gptddp.config import Config, with_preset
from gptddp.model.micro_batches import LOOK_EVERY, of_step

C = with_preset(
    Config(seq_len=SEQ_LEN, lanes=LANES, batch=3 * LANES, micro_batch=2, seed=1), accelerator=False
)


@pytest.fixture
def batch():
    with open_loader(corpus(), batch=C.batch) as loader:
        return loader.next()


def parts(batch, step=LOOK_EVERY):
    return list(of_step(batch, step, C, torch.device("cpu")))


def test_a_slot_has_the_rows_of_a_lane_in_parts_of_a_fixed_shape(batch):
    """Three rows become two and one; the end of each slot and of the step is marked."""
    found = parts(batch)
    assert [(it.slot, it.number, len(it.x)) for it in found] == [
        (slot, number, size) for slot in range(LANES) for number, size in ((0, 2), (1, 1))
    ]
    assert [it.ends_slot for it in found] == [False, True] * LANES
    assert [it.ends_step for it in found] == [False] * (2 * LANES - 1) + [True]


def test_no_two_parts_of_a_run_have_the_same_dropout(batch):
    """The seed depends on the step, the slot and the part, not on the rank."""
    seeds = [it.seed(C, step) for step in range(20) for it in parts(batch, step)]
    assert len(set(seeds)) == len(seeds)
    mine = [it for it in parts(batch, 3) if it.slot in (2, 5)]
    with open_loader(corpus(), batch=C.batch, own=(2, 5)) as loader:
        alone = parts(loader.next(), 3)
    assert [it.seed(C, 3) for it in alone] == [it.seed(C, 3) for it in mine]


@pytest.mark.parametrize("what", ["input", "target", "order"])
def test_rows_that_differ_from_the_packed_rows_end_the_life(batch, what):
    """A changed token, an invalidated target or two swapped rows are noticed in a step that hashes
    its rows, and not in other steps."""
    parts(batch)
    if what == "input":
        batch.tokens[7, 3] += 1
    elif what == "target":
        column = int(np.flatnonzero(batch.valid[7])[0])
        batch.valid[7, column] = False
    else:
        batch.tokens[[6, 7]] = batch.tokens[[7, 6]]
    parts(batch, LOOK_EVERY + 1)
    with pytest.raises(RuntimeError, match="the rows that the model was given"):
        parts(batch)
