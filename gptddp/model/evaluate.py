"""Loss and bits per byte on the validation split, computed by all ranks together."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gptddp.config import Config
from gptddp.data.tokenizer import Tokenizer
from gptddp.distributed.connect import World
from gptddp.model.gpt import GPT
from gptddp.model.micro_batches import autocast, micro_batches


@dataclass(frozen=True)
class Evaluation:
    """The mean over the validation rows of all ranks."""

    loss: float  # nats per token
    bpb: float | None  # bits per byte of text; None if the tokens do not determine the bytes
    targets: int  # tokens that were predicted
    n_bytes: int  # bytes of their text


@torch.no_grad()
def evaluate(
    net: GPT,
    rows: tuple[np.ndarray, np.ndarray],
    tokenizer: Tokenizer,
    config: Config,
    world: World,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """All ranks: evaluate the model, each rank on every W-th micro-batch.

    `rows`: (tokens (n, T+1), valid (n, T)) from `loader.eval_rows`, the same on every rank. One
    rank computes the sums of each micro-batch, and they are added in a fixed order: the bits are
    the same at any world size. None, on all ranks, if `stop()` is true on any rank before the end.
    Targets of no bytes (special tokens) count for the loss, not for the bits per byte.
    """
    tokens, valid = rows
    token_bytes = torch.from_numpy(tokenizer.token_bytes).to(world.device)
    n = -(-len(tokens) // config.micro_batch)
    sums = torch.zeros(n, 4, dtype=torch.float64)  # nats, targets, nats of text, bytes
    net.eval()
    try:
        for first in range(0, n, world.world_size):
            if world.all_reduce(torch.tensor(int(stop()))).item():  # all ranks
                return None
            if (i := first + world.rank) >= n:  # no more for this rank: only the collective
                continue
            part = slice(i * config.micro_batch, (i + 1) * config.micro_batch)
            inputs = micro_batches(tokens[part], valid[part], tokenizer.bos, config, world.device)
            x, y, positions = next(inputs)
            with autocast(config, world.device):
                nats = net.nats(x, y, positions)  # 0 without a target
            sums[i] = _sums(nats.flatten().double(), y.flatten(), token_bytes)
    finally:  # also if a peer is lost: the next step needs its dropout
        net.train()
    table = world.all_reduce(sums)  # all ranks
    nats_all, targets, nats_text, n_bytes = map(math.fsum, table.t().tolist())
    known = n_bytes > 0 and tokenizer.changes is None
    bpb = nats_text / math.log(2) / n_bytes if known else None
    return Evaluation(nats_all / targets, bpb, int(targets), int(n_bytes))


def _sums(nats: Tensor, y: Tensor, token_bytes: Tensor) -> Tensor:
    """The sums of a micro-batch, float64 (4): nats, targets, nats of text, bytes of text."""
    size = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0)
    text = size > 0
    parts = [nats.sum(), (y >= 0).sum(), nats[text].sum(), size.sum()]
    return torch.stack([part.double() for part in parts]).cpu()
