"""The gradient of a step does not depend on the number of processes and their shares."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from support import forked
from support.loaders import LANES, SEED, SEQ_LEN, corpus, open_loader
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.distributed.connect import World, connect
from gptddp.model import sums
from gptddp.model.buckets import settle_buckets
from gptddp.model.gpt import build
from gptddp.train import forward_backward
from gptddp.training.agree import agree
from gptddp.training.clock import PhaseClock, RankSeconds

RANK = "import sys; from elastic.test_gradients import rank_main; rank_main(sys.argv[1])"
WORLDS = (1, 2, 5, 7)
CONFIG = with_preset(
    Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        seq_len=SEQ_LEN,
        lanes=LANES,
        batch=3 * LANES,
        micro_batch=2,
        precision="fp32",
        device="cpu",
        seed=SEED,
    ),
    accelerator=False,
)
EMPTY_LANE = 3  # a lane whose rows have no target


def gradients(world: World, reduce: str) -> tuple[np.ndarray, int]:
    """All ranks: every gradient of the step, in one array, and the layout of DDP's buckets."""
    torch.set_num_threads(1)
    net = build(CONFIG, 257, world.device)
    ddp = DDP(net, gradient_as_bucket_view=True)
    made = sums.build(ddp, dataclasses.replace(CONFIG, reduce=reduce), world)
    settle_buckets(ddp, made, CONFIG, world)
    layout = made.layout()
    where = {"rank": world.rank, "world_size": world.world_size}
    with open_loader(corpus(), batch=CONFIG.batch, **where) as loader:
        batch = [loader.next() for _ in range(3)][-1]
    mine = np.repeat(np.flatnonzero(batch.cursors.any(axis=1)), CONFIG.batch // LANES)
    batch.valid[mine == EMPTY_LANE] = False
    object.__setattr__(batch, "targets", int(batch.valid.sum()))
    spent = RankSeconds(PhaseClock(), world)
    agreed = agree(batch, (False,) * 4, (1, 0, 0.0), spent, world)
    forward_backward(ddp, batch, agreed.targets, 2, CONFIG, world, made)
    assert made.layout() == layout
    found = torch.cat([p.grad.ravel() for p in net.parameters() if p.grad is not None])
    return found.numpy(), layout


def rank_main(folder: str) -> None:
    """One rank, from joining its world to leaving it, as the trainer does.

    Rank 0 leaves FOLDER/<reduce>.<world size>.npy: the gradients of all parameters in one.
    """
    with connect("cpu") as world:
        for reduce in ("exact", "fast"):
            found, layout = gradients(world, reduce)
            if world.rank == 0:
                np.save(f"{folder}/{reduce}.{world.world_size}.npy", found)
            Path(folder, f"{layout:016x}.layout").touch()
        world.leave_together()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The gradients of a step by how they are summed, in worlds of 1 to 7 processes."""
    folder = tmp_path_factory.mktemp("gradients")
    for world in WORLDS:
        forked.train(world, str(folder), code=RANK)
    assert len(list(folder.glob("*.layout"))) == 1  # in any world
    return {
        reduce: [np.load(folder / f"{reduce}.{world}.npy") for world in WORLDS]
        for reduce in ("exact", "fast")
    }


def test_gradients_equal_those_of_one_process(found):
    """1 to 7 processes over 8 lanes of 3 rows, one without a target, have equal bits in exact sums,
    and with fast sums agree to 1e-6 of the norm in fp32.

    Ranks run 2 to 16 micro-batches of 2 rows or 1.
    """
    one = found["exact"][0]
    norm = np.linalg.norm(one)
    assert norm > 0.1
    for world, exact, fast in zip(WORLDS, found["exact"], found["fast"], strict=True):
        assert exact.tobytes() == one.tobytes(), f"{world} processes"
        assert np.linalg.norm(fast - one) <= 1e-6 * norm, f"{world} processes"
