"""Where a life goes on: the newest state that can be trusted, on disk or in memory."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptddp.distributed.connect import World
from gptddp.errors import BadMessage, Diverged
from gptddp.run.history import Ledger
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin

log = logging.getLogger(__name__)

# The snapshot that a rank brings: run id, generation, step, digest; None where it has none.
Brought = tuple[str, int, int, int] | None
Snapshots = dict[int, tuple[int, int, int]]  # of this run: generation, step, digest by rank


@dataclass(frozen=True)
class NewestState:
    """What all ranks go on from, and what this rank has of it."""

    origin: Origin  # the same on every rank, `meta` of the state included
    source: int  # the rank that has the tensors
    tensors: Mapping[str, Tensor] | None  # there; None on the others, and where the run is new
    lines: list[dict[str, Any]]  # steps that the log may lack, because rank 0 was lost with them
    events: list[dict[str, Any]]  # that the ledger may lack, for the same reason
    fault: dict[str, Any] | None  # why the snapshot was left, as its rank saw it
    snapshot_path: Path | None  # where this rank leaves its state if a peer is lost
    lease: Lease | None  # on rank 0: its hold on the run
    read_s: float = 0.0  # on rank 0: of the storage, to find it


def checked(brought: Sequence[Any]) -> list[Brought]:
    """What each rank has sent about its snapshot, by rank; BadMessage for what is none."""
    found: list[Brought] = []
    for rank, it in enumerate(brought):
        kinds = [type(value) for value in it] if isinstance(it, list) else None
        if it is not None and kinds != [str, int, int, int]:
            raise BadMessage(f"rank {rank}", f"{it!r:.80} for the snapshot that it has")
        found.append(it and (it[0], it[1], it[2], it[3]))
    return found


def of_this_run(brought: Sequence[Brought], run_id: str) -> Snapshots:
    """The snapshots of this run: another's is foreign."""
    return {rank: it[1:] for rank, it in enumerate(brought) if it is not None and it[0] == run_id}


def trusted(snapshots: Snapshots, void: int, run: Path, world: World) -> Snapshots:
    """The snapshots but those of a generation in which ranks have diverged (`void`), or older.

    A rank that differs has spoilt the gradients of all: what the majority holds is no better. So
    ranks that bring different states of one step are a divergence too, with the same outcome.
    """
    states: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    for rank, (generation, step, digest) in snapshots.items():
        if generation > void:
            states[generation, step][rank] = digest
    for (generation, step), digests in sorted(states.items()):
        if len(set(digests.values())) > 1:
            error = Diverged(digests, step, world.names)
            log.error("%s", error)
            names = {"step": step, "ranks": error.ranks, "names": error.names}
            Ledger(run).event("diverged", generation, **names)
            void = generation
    return {rank: it for rank, it in snapshots.items() if it[0] > void}


def newest_rank(snapshots: Snapshots, newest: tuple[int, int] | None) -> int | None:
    """The first rank with the newest state of this run, if no checkpoint is as new.

    By generation, then step, as with checkpoints (`newest`): a life that begins decides what the
    run is.
    """
    best = max(snapshots, key=lambda rank: (snapshots[rank][:2], -rank), default=None)
    return best if best is not None and snapshots[best][:2] > (newest or (0, 0)) else None
