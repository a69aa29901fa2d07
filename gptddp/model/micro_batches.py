"""Turns rows of tokens into the model's inputs and targets, a micro-batch at a time."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptddp.config import Config
from gptddp.data import lanes
from gptddp.data.loader import Batch
from gptddp.data.packing import documents_of, row_hashes
from gptddp.distributed.pulse import beat
from gptddp.model.loss import IGNORE

LOOK_EVERY = 10  # one in this many steps hashes its rows again


class MicroBatch(NamedTuple):
    """The rows of one forward pass; x, y and positions as in `micro_batches`."""

    slot: int  # of the step, over all ranks
    number: int  # in its slot
    x: Tensor
    y: Tensor
    positions: Tensor | None
    ends_slot: bool
    ends_step: bool  # the last one of this rank

    def seed(self, c: Config, step: int) -> int:
        """The seed of its dropout: unique in the run, and independent of the rank."""
        return lanes.key(c.seed, step, self.slot, self.number)


def of_step(batch: Batch, step: int, c: Config, device: torch.device) -> Iterator[MicroBatch]:
    """Yield this rank's slots of a step, one after the other, in micro-batches.

    A slot is the rows of one lane: the shapes and their order are the same on every rank. One step
    in ten hashes its rows again: RuntimeError if the model's inputs do not match `batch.fp`.
    """
    rows = c.batch // c.lanes  # of a slot
    per_slot, n_slots = -(-rows // c.micro_batch), len(batch.lanes)
    looks, fp = step % LOOK_EVERY == 0, 0
    for i, slot in enumerate(batch.lanes):
        part = slice(i * rows, (i + 1) * rows)
        inputs = micro_batches(batch.tokens[part], batch.valid[part], batch.bos, c, device)
        for number, it in enumerate(inputs):
            if looks:
                begin = i * rows + number * c.micro_batch
                assert batch.origin is not None
                origin = batch.origin[begin : begin + len(it[0])]
                fp += int(row_hashes(origin, it[0].cpu().numpy(), it[1].cpu().numpy()).sum())
            last = number == per_slot - 1
            yield MicroBatch(slot, number, *it, last, last and i == n_slots - 1)
    if looks and fp % 2**64 != batch.fp:
        raise RuntimeError(
            f"the rows that the model was given have the fingerprint {fp % 2**64:016x}, but the "
            f"packed rows have {batch.fp:016x}: the memory of this machine, or the code between "
            "packing and model, is faulty"
        )


def micro_batches(
    tokens: np.ndarray, valid: np.ndarray, bos: int, config: Config, device: torch.device
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield inputs, targets and positions, each (rows, T) int64, of up to `micro_batch` rows.

    tokens (n, T+1); valid (n, T): does the target count? Otherwise it becomes IGNORE. Positions
    count the tokens of a document from 0; None unless the configuration's mask is "document".
    """
    for i in range(0, len(tokens), config.micro_batch):
        beat()  # a step on a slow processor may take many minutes
        rows = slice(i, i + config.micro_batch)
        part = torch.from_numpy(tokens[rows].astype(np.int64))
        y = part[:, 1:].masked_fill(~torch.from_numpy(valid[rows]), IGNORE)
        positions = None
        if config.mask == "document":
            numbers = documents_of(tokens[rows], valid[rows], bos)[1]
            positions = _to(torch.from_numpy(numbers.astype(np.int64)), device)
        yield _to(part[:, :-1].contiguous(), device), _to(y, device), positions


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor in CPU memory to the device, without waiting for a GPU.

    torch's pool does not reuse the pinned memory before the copy is done, so this code
    need not keep a reference.
    """
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def autocast(config: Config, device: torch.device) -> AbstractContextManager[None]:
    """A context with bf16 matrix products and fp32 weights, if the precision is bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16")
