"""What a life goes on from: a checkpoint, or a snapshot that a rank has brought."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptddp.checkpoint import known, retention, store
from gptddp.checkpoint.saved_state import SavedState
from gptddp.config import Config
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.distributed.waiting import Tell
from gptddp.files import patiently
from gptddp.run.recovery import unsaved_s
from gptddp.run.summary import Summary
from gptddp.training.choose import Snapshots, newest_rank, trusted


def take_up(
    config: Config,
    run_id: str,
    ledger: Summary,
    lost: int,
    snapshots: Snapshots,
    saving: Sequence[str | None],
    world: World,
    tell: Tell,
) -> tuple[SavedState | None, dict[str, Any]]:
    """Rank 0 only: the newest checkpoint, None where a snapshot of this run is newer, or the run
    begins; and what that is for `Origin`.

    `lost`: the newest life that the ledger lacks, as its end is lost; 0: none.
    Raises CheckpointError and OSError as `known.load` does.
    """
    run = Path(config.run_dir)
    tell("looking for the newest checkpoint")
    newest = patiently(lambda: store.newest(run, run_id, ledger.commits))
    snapshots = trusted(snapshots, ledger.void, run, world)
    rank = newest_rank(snapshots, store.order(newest) if newest else None)
    if rank is None:
        patiently(lambda: retention.discard_unfinished(run))
        anew = _given_before(ledger, world) if config.from_scratch else None
        loaded = known.load(run, run_id, ledger, lost, anew, tell)
        name = loaded.name if loaded else None
        about = {"step": loaded.step if loaded else 0, "source": name or "scratch"}
        return loaded, {**about, "parent": name, "snapshot_rank": None, "late": None}
    generation, step, _ = snapshots[rank]
    save = _late_save(config, ledger, saving, store.name_of(step, generation))
    patiently(lambda: retention.discard_unfinished(run, [save] if save else []))
    known.warn(run, run_id, ledger, f"memory, step {step}")
    about = {"step": step, "source": "memory", "parent": newest}
    return None, {**about, "snapshot_rank": rank, "late": save}


def _late_save(
    config: Config, ledger: Summary, saving: Sequence[str | None], name: str
) -> str | None:
    """The late save that is spared: that in progress, or `name`, where a checkpoint is overdue."""
    save = max(filter(None, saving), key=lambda name: store.order(name) or (0, 0), default=None)
    overdue = unsaved_s(ledger) >= config.checkpoint_every
    if save is None and overdue and environment.verdict():  # else there is no launcher to do it
        return name
    return save


def _given_before(ledger: Summary, world: World) -> int:
    """The life in which this very start had --from-scratch already, as pods keep their flags; or 0.

    A start is a job, or a command that is given by hand: torchrun's own restarts belong to it.
    """
    if (it := ledger.from_scratch) is None:
        return 0
    same_job = it.get("job") == world.job if world.job else world.restarts > 0
    return int(it["generation"]) if same_job or it.get("life") in world.follows else 0
