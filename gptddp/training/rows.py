"""The rows that a life trains and evaluates on."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gptddp.config import Config, check_world_size
from gptddp.data.cache import open_cache
from gptddp.data.dataset import Dataset
from gptddp.data.lanes import owners
from gptddp.data.loader import Loader, eval_rows
from gptddp.distributed.connect import World


class Rows:
    """The loader of this rank's training rows, and the rows of validation.

    `owners`: for each lane, the id of the member that has it in this world. `data` is the loader's
    state (see `Loader.state`); {} at the beginning of a run. The loader's threads read and pack
    from now on, while the model is built; with None, on a worker that joins, from `move` on. Raises
    the errors of `Loader`.
    """

    loader: Loader

    def __init__(
        self, dataset: Dataset, config: Config, world: World, data: Mapping[str, Any] | None
    ) -> None:
        self._dataset, self._config, self._world = dataset, config, world
        self._cache = open_cache(config.cache_dir)
        self.owners: list[str] = []
        self._is_open = False
        if data is not None:
            self.enter(data)

    def _open(self, data: Mapping[str, Any], own: Sequence[int]) -> Loader:
        c = self._config
        return Loader(
            self._dataset,
            lanes=c.lanes,
            batch=c.batch,
            seq_len=c.seq_len,
            seed=c.seed,
            own=own,
            state=data or None,
            threads=min(8, torch.get_num_threads()),
            pack=c.pack,
            cache=self._cache,
        )

    def enter(self, data: Mapping[str, Any]) -> None:
        """Continue from a state in the present world."""
        self.move(data, self._world.ids, self._world.ids[self._world.rank])

    def move(self, data: Mapping[str, Any], ids: Sequence[str], me: str) -> None:
        """Continue from a state in the world of these members, by rank; this process is `me`.

        Lanes that stay with this rank keep their packed rows, unless other row groups are in
        quarantine. Raises ConfigError if there are more ranks than lanes.
        """
        check_world_size(self._config, len(ids))
        self.owners = owners(self._config.lanes, ids, self.owners)
        own = [lane for lane, owner in enumerate(self.owners) if owner == me]
        if self._is_open and list(data.get("quarantined", ())) == self.loader.quarantined:
            self.loader.move(own, data or None)
        else:
            self.close()
            self.loader, self._is_open = self._open(data, own), True

    @cached_property
    def validation(self) -> tuple[np.ndarray, np.ndarray]:
        """(tokens (n, T+1), valid (n, T)), the same on every rank; read at the first use."""
        c = self._config
        return eval_rows(self._dataset, c.seq_len, c.eval_tokens, c.pack)

    def close(self) -> None:
        """End the loader's threads."""
        if self._is_open:
            self.loader.close()
