"""DDP's buckets: what is added up at once over the ranks, and when that stays as it is."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config
from gptddp.distributed.connect import World
from gptddp.model.micro_batches import autocast
from gptddp.model.sums import Sums


def settle(ddp: DDP, sums: Sums, c: Config, world: World) -> None:
    """All ranks: two passes whose gradients are thrown away, before the state is loaded.

    DDP makes its buckets anew, once, in the forward pass that follows the first backward pass, in
    the order in which that one had its gradients. Fast sums would otherwise have other bits in the
    first step of a life than in the same step of an undisturbed run, and a process that comes into
    a world would add its gradients to those of other tensors, without an error. After the second
    pass `sums.layout` is that of all steps to come, the same in a world of any size.
    """
    tokens = torch.zeros(1, c.seq_len, dtype=torch.long, device=world.device)
    for _ in range(2):
        factor = sums.begin(1)
        with autocast(c, world.device):
            loss = ddp(tokens, tokens, tokens if c.mask == "document" else None)
        (loss * factor).backward()  # all ranks
        sums.finish()  # all ranks
    ddp.zero_grad(set_to_none=False)
