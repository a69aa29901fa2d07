"""Checkpoints whose content tells their step."""

from pathlib import Path

import torch

from gptddp.checkpoint.load import load_newest
from gptddp.checkpoint.writer import Writer


def save(run_dir, step, generation=1, size=40_000, meta=None):
    """Commit a checkpoint whose bytes are a function of its step; its path."""
    tensors = {"weights": weights(step, size), "step": torch.tensor(step)}
    saved = Writer(run_dir, generation, keep=9).save(step, tensors, meta or {"step": step})
    assert saved.error is None
    return Path(run_dir) / "checkpoints" / saved.name


def weights(step, size=40_000):
    """Random bytes, the same for the same step."""
    return torch.rand(size // 4, generator=torch.Generator().manual_seed(step))


def loaded_step(run_dir, **options):
    """The step of the newest checkpoint, whose content is compared with what `save` wrote."""
    loaded = load_newest(run_dir, **options)
    step = int(loaded.tensors["step"])
    assert torch.equal(loaded.tensors["weights"], weights(step))
    assert loaded.step == loaded.meta["step"] == step
    return step
