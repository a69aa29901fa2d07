"""Loss and bits per byte on the validation split, shared out over all ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from gptddp.config import Config
from gptddp.distributed.connect import World
from gptddp.model.micro_batches import autocast, micro_batches

if TYPE_CHECKING:
    from gptddp.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats a token
    bpb: float  # bits a byte of the text that the tokens stand for
    tokens: int


@torch.no_grad()
def evaluate(
    net: nn.Module,
    rows: tuple[np.ndarray, np.ndarray],
    tokenizer: "Tokenizer",
    config: Config,
    dist: World,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """All ranks: each takes every W-th row; nats, bytes and tokens are summed before dividing.

    None, on all ranks alike, where `stop` says on one of them that there is no time for it.

    `rows` are (tokens (n, T+1), valid (n, T)) as `loader.eval_rows` gives them, the same on every
    rank. Targets of no bytes (special tokens) count for the loss, not for the bits per byte.
    """
    tokens, valid = (part[dist.rank :: dist.world_size] for part in rows)
    length_of = torch.from_numpy(tokenizer.token_bytes).to(dist.device)
    sums = torch.zeros(4, dtype=torch.float64)  # nats, targets, nats of text, bytes
    net.eval()
    share = micro_batches(tokens, valid, tokenizer.bos, config, dist.device)
    rounds = -(-len(rows[0]) // (dist.world_size * config.micro_batch))  # of the longest share
    for _ in range(rounds):
        if dist.all_reduce(torch.tensor(int(stop()))).item():  # all ranks
            net.train()
            return None
        if (part := next(share, None)) is None:
            continue
        x, y, positions = part
        with autocast(config, dist.device):
            logits = net(x, positions=positions)
        y = y.flatten()
        nats = nn.functional.cross_entropy(logits.flatten(0, 1).float(), y, reduction="none")
        size = torch.where(y >= 0, length_of[y.clamp(min=0)], 0)
        nats, text = nats.double(), size > 0  # 0 nats where there is no target
        parts = [nats.sum(), (y >= 0).sum(), nats[text].sum(), size.sum()]
        sums += torch.stack([part.double() for part in parts]).cpu()
    net.train()
    nats_all, targets, nats_text, n_bytes = dist.all_reduce(sums).tolist()
    bpb = nats_text / math.log(2) / n_bytes if n_bytes else math.nan
    return Evaluation(loss=nats_all / targets, bpb=bpb, tokens=int(targets))
