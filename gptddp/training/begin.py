"""The beginning of a life: all ranks find the newest state, wherever it is."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptddp.checkpoint import late, snapshot
from gptddp.checkpoint.saved_state import SavedState
from gptddp.config import Config
from gptddp.data.dataset import Dataset
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.distributed.waiting import Tell
from gptddp.errors import BadMessage, ConfigError
from gptddp.files import MISPLACED, exists, explain, make_folder, may_pass, patiently
from gptddp.flags import of_run
from gptddp.run.directory import LEDGER
from gptddp.run.lease import Claim, Lease
from gptddp.run.origin import Origin
from gptddp.training.changes import check_given, check_same_data, identity
from gptddp.training.choose import checked
from gptddp.training.clock import PhaseClock
from gptddp.training.opening import open_run

log = logging.getLogger(__name__)

_TELL_S = 1.0  # between two words to the other ranks, who wait too


def newest_state(
    config: Config, dataset: Dataset, world: World, clock: PhaseClock
) -> tuple[Origin, SavedState, Lease | None]:
    """All ranks: what the run goes on from, what this rank has of it, and rank 0's hold on the run.

    Rank 0 reads the storage, every rank its memory; the newest valid state counts.

    Only one rank reads a checkpoint. If each read a part, a node whose view of a network volume is
    old would have a good checkpoint set aside, and each rank would hold the state twice; it would
    save 0.2 to 0.5 s of 1.1 to 2.4 s (0.5 GB, four ranks on two cores).
    """
    memory = environment.shared_memory()
    path = snapshot.path_of(memory, config.run_dir) if memory else None
    kept = snapshot.usable(path) if path else None
    brought = checked(world.gather(kept and (kept.run_id, kept.generation, kept.step, kept.digest)))
    verdict = environment.verdict()  # beside it this rank and its launcher meet
    saving = [it and str(it) for it in world.gather(late.in_progress(verdict and verdict.parent))]
    given, data = world.gather(of_run(config)), world.gather(identity(dataset))
    loaded: Any = None
    lease: Lease | None = None

    def on_rank_0(tell: Tell) -> dict[str, Any]:
        nonlocal loaded, lease
        lease = take_run(config, world, tell)
        clock.enter("restore")
        with _released_by_an_error(lease, config.run_dir):
            check_same_data(data, world)
            origin, loaded = open_run(config, dataset, world, brought, saving, lease.check, tell)
            check_given(given, origin.config, world)
        clock.enter("init")
        return origin.to_json()

    # All ranks have met in `gather`, so every pod has noted this life before its lease is there.
    origin = Origin.from_json(world.from_rank_0(on_rank_0))
    if origin.config.on_bad == "fail":  # files that this rank alone lacks
        patiently(dataset.check_whole)
    if verdict and world.rank == origin.snapshot_rank and origin.late not in (None, *saving):
        try:  # its launcher saves the snapshot that this life goes on from
            late.ask(verdict.parent)
        except OSError as error:
            log.warning("no checkpoint is made of the state left in memory: %s", error)
    # `loaded` is on rank 0, or nowhere
    mine = kept if world.rank == origin.snapshot_rank else loaded
    state = _with_what_goes_with_it(world, origin, mine or SavedState(origin.source))
    return origin, state, lease


@contextlib.contextmanager
def _released_by_an_error(lease: Lease, run_dir: str) -> Iterator[None]:
    """Rank 0 only: whose life does not begin does not keep the run."""
    try:
        yield
    except BaseException as error:
        lease.release()
        if isinstance(error, OSError) and error.errno in MISPLACED:
            raise ConfigError(f"run {run_dir} cannot be used: {explain(error)}") from error
        raise


def _with_what_goes_with_it(world: World, origin: Origin, mine: SavedState) -> SavedState:
    """All ranks: the tensors that this rank has, and what else the rank that has them knows."""
    sent: Any = mine.meta, mine.lines, mine.events, mine.fault
    sent = world.broadcast_value(sent, origin.holder)
    try:
        meta, lines, events, fault = sent
        _ = [int(line["step"]) for line in lines], [str(event["event"]) for event in events]
        about: Any = {"meta": dict(meta), "lines": list(lines), "events": list(events)}
        about["fault"] = None if fault is None else dict(fault)
    except (LookupError, TypeError, ValueError, OverflowError):  # the last: of Infinity
        sender = world.names[origin.holder]
        raise BadMessage(sender, f"{sent!r:.80} for a state to go on from") from None
    return SavedState(origin.source, origin.step, mine.tensors, **about)


def take_run(config: Config, world: World, tell: Tell = lambda _: None) -> Lease:
    """Rank 0 only: make the run directory, and take its lease for this life of the job."""
    run = Path(config.run_dir)
    try:
        if not (begun := patiently(lambda: exists(run / LEDGER))):
            patiently(lambda: make_folder(run))
        claim = Claim(run, world.job, world.life, known=begun)
        began = time.monotonic()
        while (lease := patiently(lambda: claim.poll(_TELL_S))) is None:
            tell(f"waiting until the run is free, for {time.monotonic() - began:.0f} s")
        return lease
    except OSError as error:
        if may_pass(error):
            raise
        raise ConfigError(
            f"run {config.run_dir} cannot be used: {explain(error)}; or give another --run-dir"
        ) from error
