"""The training and test samples of a rank: over all ranks no sample occurs twice."""

import itertools
from collections.abc import Iterator
from typing import Any

from ddp import World
from torch.utils.data import DistributedSampler


class TrainSampler(DistributedSampler):
    """DistributedSampler that can start within an epoch. No sample occurs twice in an epoch.

    `drop_last` skips up to world_size - 1 samples, other ones in each epoch; the default would
    repeat as many. Raises SystemExit, on all ranks, if a rank would have no sample.
    """

    def __init__(self, dataset: Any, world: World, seed: int) -> None:
        if len(dataset) < world.world_size:
            raise SystemExit(
                f"{world.world_size} processes, but only {len(dataset)} samples to train on: start "
                "fewer processes"
            )
        super().__init__(
            dataset, world.world_size, world.rank, shuffle=True, seed=seed, drop_last=True
        )
        self.skip = 0  # samples of this rank that are done in this epoch

    def begin(self, epoch: int, done: int = 0) -> None:
        """Start an epoch, which has its own order, after `done` samples of all ranks together.

        After a change of the world size `done` may not be a multiple of it: it is rounded up, so
        that no sample is repeated.
        """
        self.set_epoch(epoch)
        self.skip = min(-(-done // self.num_replicas), self.num_samples)

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.skip, None)

    def __len__(self) -> int:
        return self.num_samples - self.skip


def test_share(samples: int, world: World) -> range:
    """The test samples of this rank: over all ranks each sample once, at any world size.

    DistributedSampler would repeat the first samples until all ranks have equally many.
    """
    return range(world.rank, samples, world.world_size)
