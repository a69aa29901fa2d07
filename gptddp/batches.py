"""Rows of tokens to the model's inputs and targets, a micro-batch at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from gptddp.config import Config
from gptddp.loss import IGNORE


def micro_batches(
    tokens: np.ndarray, valid: np.ndarray, config: Config, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, each (rows, T) int64, of at most `micro_batch` rows at a time.

    tokens is (n, T+1), valid (n, T): which targets count; the others are IGNORE.
    """
    for i in range(0, len(tokens), config.micro_batch):
        rows = slice(i, i + config.micro_batch)
        part = torch.from_numpy(tokens[rows].astype(np.int64))
        y = part[:, 1:].masked_fill(~torch.from_numpy(valid[rows]), IGNORE)
        yield part[:, :-1].contiguous().to(device), y.to(device)


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """bf16 matrix products with fp32 weights, where the precision asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
