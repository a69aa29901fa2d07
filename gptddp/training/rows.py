"""The rows that a life trains and evaluates on."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gptddp.config import Config
from gptddp.data.cache import open_cache
from gptddp.data.dataset import Dataset
from gptddp.data.loader import Loader, eval_rows
from gptddp.distributed.connect import World


class Rows:
    """The loader of this rank's training rows, and the rows of validation.

    `data` is the loader's state (see `Loader.state`); {} at the beginning of a run. The loader's
    threads read and pack from now on, while the model is built; with None, from `move` on. Raises
    the errors of `Loader`.
    """

    loader: Loader

    def __init__(
        self, dataset: Dataset, config: Config, world: World, data: Mapping[str, Any] | None
    ) -> None:
        self._dataset, self._config, self._world = dataset, config, world
        self._cache = open_cache(config.cache_dir)
        self._is_open = data is not None
        if data is not None:
            self.loader = self._open(data)

    def _open(self, data: Mapping[str, Any]) -> Loader:
        c = self._config
        return Loader(
            self._dataset,
            lanes=c.lanes,
            batch=c.batch,
            seq_len=c.seq_len,
            seed=c.seed,
            rank=self._world.rank,
            world_size=self._world.world_size,
            state=data or None,
            threads=min(8, torch.get_num_threads()),
            pack=c.pack,
            cache=self._cache,
        )

    def reopen(self, data: Mapping[str, Any]) -> None:
        """Continue from another state, as after a quarantine of row groups."""
        self.close()
        self.loader, self._is_open = self._open(data), True

    def move(self, data: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Continue from a state in another world; keep packed rows of lanes in both worlds."""
        if not self._is_open or list(data.get("quarantined", ())) != self.loader.quarantined:
            self.reopen(data)
        else:
            self.loader.move(rank, world_size, data or None)

    @cached_property
    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens (n, T+1), valid (n, T)), the same on every rank; read at the first use."""
        c = self._config
        return eval_rows(self._dataset, c.seq_len, c.eval_tokens, c.pack)

    def close(self) -> None:
        """End the loader's threads."""
        if self._is_open:
            self.loader.close()
