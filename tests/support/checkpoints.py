"""Checkpoints whose content depends on their step."""

from pathlib import Path

import torch
from support.waiting_writer import Writer

from gptddp.checkpoint.load import load_newest
from gptddp.run.progress import Progress


def save(run_dir, step, generation=1, size=40_000, meta=None, **how):
    """Commit a checkpoint whose bytes are a function of its step, and return its path."""
    tensors = {"weights": weights(step, size), "step": torch.tensor(step)}
    writer = Writer(run_dir, generation, **{"keep": 9, **how})
    saved = writer.save(step, tensors, meta or {"step": step})
    assert saved.error is None
    return Path(run_dir) / "checkpoints" / saved.name


def meta(step):
    """What a checkpoint of this step has beside its tensors."""
    position = {"version": 2, "pack": "bfd-1", "dataset": "9f", "tokenizer": "af", "seq_len": 16}
    data = {**position, "seed": 1, "batch": 4, "lanes": "0.0.13 0.1.2"}
    return Progress(step, 8 * step, 0x8C31085C5CB15A70, train_s=0.5, data=data).to_meta()


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
