"""Loss and bits per byte on the validation split, shared out over all ranks."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from gptddp.config import Config
from gptddp.data.tokenizer import Tokenizer
from gptddp.distributed.connect import World
from gptddp.model.gpt import GPT
from gptddp.model.micro_batches import autocast, micro_batches


@dataclass(frozen=True)
class Evaluation:
    """The mean over the validation rows of all ranks."""

    loss: float  # nats a token
    bpb: float | None  # bits a byte of the text; None where its bytes are not known by its tokens


@torch.no_grad()
def evaluate(
    net: GPT,
    rows: tuple[np.ndarray, np.ndarray],
    tokenizer: Tokenizer,
    config: Config,
    world: World,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """All ranks: evaluate the model, each rank on every W-th row; sums are divided at the end.

    `rows` are (tokens (n, T+1), valid (n, T)) as `loader.eval_rows` gives them, the same on every
    rank. None, on all ranks, if `stop()` is true on any of them before the end. Targets of no bytes
    (special tokens) count for the loss, not for the bits per byte.
    """
    tokens, valid = (part[world.rank :: world.world_size] for part in rows)
    token_bytes = torch.from_numpy(tokenizer.token_bytes).to(world.device)
    sums = torch.zeros(4, dtype=torch.float64)  # nats, targets, nats of text, bytes
    net.eval()
    inputs = micro_batches(tokens, valid, tokenizer.bos, config, world.device)
    most = -(-len(rows[0]) // (world.world_size * config.micro_batch))  # micro-batches of a rank
    for _ in range(most):
        if world.all_reduce(torch.tensor(int(stop()))).item():  # all ranks
            net.train()
            return None
        if (micro_batch := next(inputs, None)) is None:  # this rank has fewer: only the collective
            continue
        x, y, positions = micro_batch
        with autocast(config, world.device):
            nats = net.nats(x, y, positions).flatten().double()  # 0 where there is no target
        y = y.flatten()
        size = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0)
        text = size > 0
        parts = [nats.sum(), (y >= 0).sum(), nats[text].sum(), size.sum()]
        sums += torch.stack([part.double() for part in parts]).cpu()
    net.train()
    nats_all, targets, nats_text, n_bytes = world.all_reduce(sums).tolist()  # all ranks
    known = n_bytes > 0 and tokenizer.changes is None
    bpb = nats_text / math.log(2) / n_bytes if known else None
    return Evaluation(loss=nats_all / targets, bpb=bpb)
