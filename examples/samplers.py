"""Which samples a rank trains on, and which it tests: over all ranks none of them twice."""

import itertools
from collections.abc import Iterator
from typing import Any

from ddp import World
from torch.utils.data import DistributedSampler


class TrainSampler(DistributedSampler):
    """DistributedSampler that can begin within an epoch. No sample comes twice in an epoch.

    `drop_last` leaves out up to world_size - 1 samples an epoch, others in each, where the default
    would have as many twice. Raises SystemExit, on all ranks, where a rank would have none.
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
        self.skip = 0  # samples of this rank that the epoch has had

    def begin(self, epoch: int, done: int = 0) -> None:
        """Another order for each epoch, and go on behind `done` samples of all ranks together.

        At another world size than before, `done` may not be a multiple: rounded up, or some of them
        would come again.
        """
        self.set_epoch(epoch)
        self.skip = min(-(-done // self.num_replicas), self.num_samples)

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.skip, None)

    def __len__(self) -> int:
        return self.num_samples - self.skip


def test_share(samples: int, world: World) -> range:
    """The samples that this rank tests: over all ranks each of them once, at any world size.

    DistributedSampler would repeat the first ones until all ranks have the same number.
    """
    return range(world.rank, samples, world.world_size)
