"""Where a life of the run begins: all ranks find the newest state, wherever it is."""

import dataclasses
import errno
from pathlib import Path
from typing import Any

from torch import Tensor

from gptddp.checkpoint import snapshot
from gptddp.config import Config
from gptddp.data.dataset import Dataset
from gptddp.distributed.connect import World
from gptddp.errors import ConfigError
from gptddp.files import explain
from gptddp.run.lease import Lease
from gptddp.run.life import Life
from gptddp.training import choose
from gptddp.training.choose import claim

_MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EACCES)  # trouble that another try does not mend


@dataclasses.dataclass(frozen=True)
class Begin:
    """What a life begins with."""

    life: Life  # the same on every rank, `meta` of the state included
    source: int  # the rank that has the tensors
    tensors: dict[str, Tensor] | None  # there; None on the others, and where the run is new
    lines: list[dict[str, Any]]  # steps that the log may lack, because rank 0 was lost with them
    fault: dict[str, Any] | None  # why the state was left in memory, as its rank saw it
    place: Path | None  # where this rank leaves its state if a peer is lost
    lease: Lease | None  # on rank 0: its hold on the run


def begin(config: Config, dataset: Dataset, world: World) -> Begin:
    """All ranks: rank 0 reads the storage, every rank its memory; the newest valid state goes on.

    One reader, one opinion: with a part of the chunks on each rank, a node whose view of a network
    volume is old would have a good checkpoint set aside. It would save a part of the reading of a
    cold start, of which the broadcast is the larger half (0.5 GB, four ranks on two cores: 1.1 to
    2.4 s, in parts 0.9 to 1.9 s), and each rank would hold the state twice.

    Raises ConfigError, DataError and CheckpointError, on every rank, as `rundir.open_run` does.
    """
    place = snapshot.path_of(world.memory, config.run_dir) if world.memory else None
    left = snapshot.read(place) if place else None
    all_left = world.gather(left and (left.run_id, left.generation, left.step, left.digest))
    loaded: Any = None
    lease: Lease | None = None

    def open_run() -> Life:
        nonlocal loaded, lease
        lease = claim(config, world)
        try:
            life, loaded = choose.open_run(config, dataset, world, all_left)
        except BaseException as error:
            lease.release()
            if isinstance(error, OSError) and error.errno in _MISPLACED:
                raise ConfigError(
                    f"run {config.run_dir} cannot be used: {explain(error)}"
                ) from error
            raise
        return life

    life = world.from_rank_0(open_run)
    source = life.holder or 0
    state = left if world.rank == life.holder else loaded  # `loaded`: on rank 0, or nowhere
    mine: Any = ({}, [], None)
    if state:  # a checkpoint has no lines and no fault
        mine = state.meta, getattr(state, "lines", []), getattr(state, "fault", None)
    meta, lines, fault = world.share(mine, source)
    life = dataclasses.replace(life, meta=meta)
    return Begin(life, source, state.tensors if state else None, lines, fault, place, lease)
