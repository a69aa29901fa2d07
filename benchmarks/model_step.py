"""Our model step and nothing around it, on random tokens: what other loops are compared with."""

from collections.abc import Callable

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.model import optim, sums
from gptddp.model.gpt import build
from gptddp.train import forward_backward


def model_step(c: Config, world: World, vocabulary: int) -> Callable[[], None]:
    """All ranks: a step as in the loop of gptddp/train.py, each time on the same rows."""
    net = build(c, vocabulary, world.device)
    optimizer, ddp = optim.build(net, c, world), DDP(net, gradient_as_bucket_view=True)
    rows = c.batch // world.world_size
    tokens = np.random.randint(0, vocabulary, (rows, c.seq_len + 1)).astype(np.uint16)
    valid = np.ones((rows, c.seq_len), bool)
    batch = Batch(tokens, valid, valid.size, 0, np.zeros((c.lanes, 3), np.int64), 0.0)
    made = sums.build(ddp, c, world)

    def step() -> None:
        forward_backward(ddp, batch, valid.size * world.world_size, 1, c, world, made)
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.prepare()
        optimizer.step()
        made.settle()
        optimizer.zero_grad()

    return step
