"""Rows of tokens to the model's inputs and targets, a micro-batch at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from gptddp.config import Config
from gptddp.data.packing import documents_of
from gptddp.model.loss import IGNORE


def micro_batches(
    tokens: np.ndarray, valid: np.ndarray, bos: int, config: Config, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Inputs, targets and positions, each (rows, T) int64, of up to `micro_batch` rows at a time.

    tokens is (n, T+1), valid (n, T): which targets count; the others are IGNORE. Positions are
    those in the document where mask is "document", else None.
    """
    for i in range(0, len(tokens), config.micro_batch):
        rows = slice(i, i + config.micro_batch)
        part = torch.from_numpy(tokens[rows].astype(np.int64))
        y = part[:, 1:].masked_fill(~torch.from_numpy(valid[rows]), IGNORE)
        positions = None
        if config.mask == "document":
            places = documents_of(tokens[rows], valid[rows], bos)[1]
            positions = _to(torch.from_numpy(places.astype(np.int64)), device)
        yield _to(part[:, :-1].contiguous(), device), _to(y, device), positions


def _to(host: Tensor, device: torch.device) -> Tensor:
    """To the device, without waiting for the copy where that is a GPU.

    Pinned memory comes from torch's own pool, which records an event at such a copy and gives the
    memory out again only when that has passed: there are no slots to be kept by hand.
    """
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """bf16 matrix products with fp32 weights, where the precision asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
