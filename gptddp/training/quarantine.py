"""Unreadable row groups: left out for good, by a common decision of all ranks.

A row group belongs to one lane, so only the rank that owns the lane sees the fault. It sees the
fault in the step that needs the rows: the same step for any world size, threads and prefetch. That
rank brings no rows to the step. All ranks learn of it, return to the end of the previous step, and
repeat the step without the row group. Its blocks then count as empty, so the remaining order is a
pure function of the saved state: cursors, and the row groups in quarantine.

A lane that needs more rows because of one decision never needs fewer because of another, so the
decisions of a step do not depend on the order in which they are found.

A decision is written to the ledger before any rank acts on it. A life that begins at an earlier
checkpoint repeats it at the same step, even if the file has been repaired since.
"""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptddp.config import shown
from gptddp.data.dataset import Dataset
from gptddp.data.lanes import hosts
from gptddp.data.loader import Batch, Loader, as_text, from_text
from gptddp.distributed.connect import World
from gptddp.errors import BadRowGroup, ConfigError
from gptddp.run.progress import Progress

log = logging.getLogger(__name__)


def check(decisions: Iterable[Mapping[str, Any]], dataset: Dataset, ledger: Path) -> None:
    """Raise ConfigError if the ledger leaves out a row group that the train split lacks.

    `decisions`: see `Summary.quarantine`.
    """
    if not (decisions := list(decisions)):  # almost always: the data is not read
        return
    groups = len(dataset.row_groups("train"))
    for decision in decisions:
        for number in decision["row_groups"]:
            if not 0 <= number < groups:
                raise ConfigError(
                    f"{ledger}, the event `quarantine` of step {decision['step']}: row_groups has "
                    f"{shown(number)}: it must be a number from 0 to {groups - 1}: put the ledger "
                    "back from a backup"
                )


def next_batch(loader: Loader, on_bad: str, again: Collection[int] = ()) -> Batch:
    """The next batch; without rows, and with `bad`, if a row group must be left out.

    `again`: row groups that an earlier life left out here. Raises BadRowGroup under on_bad "fail".
    """
    for group in sorted(again):
        if group not in loader.quarantined:
            return _no_rows(loader, group)
    try:
        return loader.next()
    except BadRowGroup as error:
        if on_bad != "quarantine":
            raise
        log.warning("%s", str(error).rsplit(";", 1)[0])
        return _no_rows(loader, error.group)


def _no_rows(loader: Loader, bad: int) -> Batch:
    cursors = np.zeros((loader.lanes, 3), np.int64)
    nothing = np.zeros((0, 0))
    return Batch(nothing, nothing, lanes=(), targets=0, fp=0, cursors=cursors, wait_s=0.0, bad=bad)


def decide(batch: Batch, loader: Loader, progress: Progress, world: World) -> dict[str, Any]:
    """All ranks: put the row groups that any rank could not read into the data state.

    The rows must be entered again. Returns the new row groups, by number and as `file#row group`.
    """
    found = torch.zeros(world.world_size, dtype=torch.int64)
    found[world.rank] = batch.bad + 1
    new = sorted({group - 1 for group in world.all_reduce(found).tolist() if group})
    progress.data = without(loader, progress.data, new)
    groups = [loader.groups[number] for number in new]
    return {"row_groups": new, "names": [f"{it.path}#{it.index}" for it in groups]}


def without(loader: Loader, state: Mapping[str, Any], groups: Iterable[int]) -> dict[str, Any]:
    """A loader's state, {} at the beginning of a run, with more row groups in quarantine."""
    state = state or loader.state(np.zeros((loader.lanes, 3), np.int64))
    quarantined = sorted({*loader.quarantined, *groups})
    # A lane that has lost its last row group begins the same epoch of another lane. Repeating that
    # changes nothing, so the number of rounds for the decisions of a step does not matter.
    moves = zip(loader.hosts, hosts(loader.dealt, quarantined) or loader.hosts, strict=True)
    cursors = [
        cursor if before == after else [cursor[0], 0, 0]
        for cursor, (before, after) in zip(from_text(state["lanes"]), moves, strict=True)
    ]
    return {**state, "lanes": as_text(cursors), "quarantined": quarantined}
