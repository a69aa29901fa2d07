"""Where a life goes on: the newest state that can be trusted, on disk or in memory."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptddp.distributed.connect import World
from gptddp.errors import BadMessage, Diverged
from gptddp.run.history import Ledger

log = logging.getLogger(__name__)

# The snapshot that a rank brings: run id, generation, step, digest; None where it has none.
Brought = tuple[str, int, int, int] | None
Snapshots = dict[int, tuple[int, int, int]]  # of this run: generation, step, digest by rank


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


def rank_of_newest(snapshots: Snapshots, newest: tuple[int, int] | None) -> int | None:
    """The first rank with the newest state of this run, if no checkpoint is as new.

    By generation, then step, as with checkpoints (`newest`): a life that begins decides what the
    run is.
    """
    best = max(snapshots, key=lambda rank: (snapshots[rank][:2], -rank), default=None)
    return best if best is not None and snapshots[best][:2] > (newest or (0, 0)) else None
