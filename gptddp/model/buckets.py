"""Settles DDP's buckets, the groups of gradients that are summed over the ranks together."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config
from gptddp.distributed.connect import World
from gptddp.model.micro_batches import autocast
from gptddp.model.sums import Sums


def settle_buckets(ddp: DDP, sums: Sums, c: Config, world: World) -> None:
    """All ranks: run two passes and discard their gradients, before the state is loaded.

    DDP rebuilds its buckets once, in the forward pass after the first backward pass, in the order
    of that pass's gradients. Otherwise fast sums would have other bits in the first step of a life
    than in the same step of an undisturbed run, and a process that joins a world would add its
    gradients to those of other tensors, without an error. After the second pass `sums.layout` stays
    the same for all steps, in a world of any size.
    """
    tokens = torch.zeros(1, c.seq_len, dtype=torch.long, device=world.device)
    for _ in range(2):
        factor = sums.begin(1)
        with autocast(c, world.device):
            loss = ddp(tokens, tokens, tokens if c.mask == "document" else None)
        (loss * factor).backward()  # all ranks
        sums.finish()  # all ranks
    ddp.zero_grad(set_to_none=False)
