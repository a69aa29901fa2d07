"""The digits: images, network, and evaluation over all ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from ddp import World, broadcast_buffers, sum_over_ranks
from samplers import test_share
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split


def datasets(seed: int) -> tuple[Any, Any]:
    """(train, test): images (1, 8, 8) in 0..1, float32, and labels 0..9, int64.

    The split has a separate generator with the same seed on every rank: with different splits, one
    rank would train on the test images of another.
    """
    with np.load(Path(__file__).parent / "digits.npz") as file:
        images = torch.from_numpy(file["images"]).float().unsqueeze(1) / 16
        labels = torch.from_numpy(file["labels"]).long()
    both = TensorDataset(images, labels)
    train, test = random_split(both, [0.8, 0.2], torch.Generator().manual_seed(seed))
    return train, test


def build() -> nn.Module:
    """Two convolutions with BatchNorm; (N, 1, 8, 8) -> logits (N, 10)."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10)),
    )


@torch.no_grad()
def evaluate(model: nn.Module, test: Any, world: World) -> tuple[float, float, int]:
    """All ranks: (loss, accuracy, images), over all test images, each counted once."""
    broadcast_buffers(model)  # all ranks
    model.eval()
    loss, right, tested = 0.0, 0, 0
    mine = Subset(test, test_share(len(test), world))
    for images, labels in DataLoader(mine, batch_size=256):
        images, labels = images.to(world.device), labels.to(world.device)
        logits = model(images)
        loss += functional.cross_entropy(logits, labels, reduction="sum").item()
        right += int((logits.argmax(1) == labels).sum())
        tested += len(labels)
    model.train()
    loss, right, tested = sum_over_ranks([loss, right, tested], world)  # all ranks
    return loss / tested, right / tested, int(tested)
