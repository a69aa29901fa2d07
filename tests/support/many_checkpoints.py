"""Small checkpoints of many steps."""

import torch
from support.waiting_writer import Writer

from gptddp.checkpoint import store


def save(run_dir, *steps, generation=1, keep=99):
    """Commit a small checkpoint for each step; the directory of all."""
    for step in steps:
        tensors = {"x": torch.full((100,), float(step))}
        assert Writer(run_dir, generation, keep=keep).save(step, tensors, {}).error is None
    return run_dir / "checkpoints"


def steps(run_dir):
    """(generation, step) of the checkpoints that are there, newest first."""
    return [store.order(name) for name in store.names(run_dir) if store.is_candidate(name)]
