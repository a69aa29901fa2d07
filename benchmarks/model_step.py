"""Our model step alone, on random tokens, as a reference for other loops."""

from collections.abc import Callable

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config
from gptddp.data.lanes import owned
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.model import optim, sums
from gptddp.model.gpt import build
from gptddp.train import forward_backward


def random_rows(c: Config, world: World, vocabulary: int) -> np.ndarray:
    """This rank's rows of a step, uint16 (rows, T+1)."""
    shape = c.batch // world.world_size, c.seq_len + 1
    return np.random.randint(0, vocabulary, shape).astype(np.uint16)


def model_step(
    c: Config, world: World, vocabulary: int, rows: Callable[[], np.ndarray] | None = None
) -> Callable[[], float]:
    """All ranks: a step as in the loop of gptddp/train.py; it returns the mean loss in nats.

    `rows` gives the rows of each step; without it they are always the same.
    """
    net = build(c, vocabulary, world.device)
    optimizer, ddp = optim.build(net, c, world), DDP(net, gradient_as_bucket_view=True)
    same = random_rows(c, world, vocabulary)
    valid = np.ones((len(same), c.seq_len), bool)
    origin, targets = np.zeros((c.lanes, 3), np.int64), valid.size * world.world_size
    own = owned(world.rank, world.world_size, c.lanes)
    made = sums.build(ddp, c, world)

    def step() -> float:
        tokens = rows() if rows else same
        batch = Batch(tokens, valid, own, valid.size, 0, origin, 0.0)
        nats = forward_backward(ddp, batch, targets, 1, c, world, made)
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.prepare()
        optimizer.step()
        made.stepped()
        optimizer.zero_grad()
        return nats / targets

    return step
