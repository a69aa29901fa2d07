"""The beginning of a life: all ranks find the newest state."""

import logging
import math
import time
from pathlib import Path
from typing import Any

from gptddp import live
from gptddp.checkpoint.load import SavedState
from gptddp.config import Config
from gptddp.data.dataset import Dataset
from gptddp.data.lanes import owners
from gptddp.data.loader import Loader
from gptddp.distributed import environment, pulse, storage
from gptddp.distributed.connect import World
from gptddp.distributed.members import Members, View
from gptddp.distributed.waiting import Tell
from gptddp.errors import ConfigError, LifeLost
from gptddp.files import MISPLACED, exists, explain, make_folder, may_pass, patiently
from gptddp.flags import of_run
from gptddp.run.directory import LEDGER
from gptddp.run.lease import Claim, Lease
from gptddp.run.origin import Origin
from gptddp.training.changes import check_given, check_same_data, identity
from gptddp.training.clock import PhaseClock
from gptddp.training.opening import open_run
from gptddp.training.parts import LifeParts

log = logging.getLogger(__name__)

ORIGIN, ROWS = "origin", "rows"  # keys of the posts for workers that join
JOINS = "joins"  # key of their own

GONE_S = 5.0  # until a joiner gives up, while its launcher does not hear of a world
_TELL_S = 1.0  # between two reports to the other ranks, which wait
_LOOK_S = 0.05  # between two looks whether the first rows are packed
_POSTS_S = 3.0  # until the posts of the others are here; a worker that rejoins has lost them
# A joiner has the rows of so many seconds of steps: a post may be a second old, and more steps are
# done until it is in. Of shorter steps than _LEAST_STEP_S it has fewer.
_AHEAD_S, _LEAST_STEP_S = 3.0, 0.03
_ENDED = "the world that this worker was to join has ended"


def first_world(world: World) -> bool:
    """Wait for the first world of the life; False if a world runs that this rank must join.

    Raises Broken if a rank is lost meanwhile.
    """
    if (members := world.members) is None:
        return True
    live.phase("waiting for the other ranks")
    members.status("fresh")
    while not isinstance(view := members.next_view(0, _TELL_S), View):
        pulse.beat()
        if members.is_going:
            return False
    world.form(view)
    return True


def joined(config: Config, dataset: Dataset, world: World) -> Origin:
    """The origin of the life that this worker joins, from its ranks.

    Raises ConfigError and DataError where this worker was given other flags or data.
    """
    members = world.members
    assert members
    live.phase("joining the running ranks")
    members.status("starting")  # not "fresh": no first world may count on this worker now
    while not (told := members.wait_for(lambda: members.posts(ORIGIN), _TELL_S)):
        pulse.beat()
        if not members.is_going:
            raise LifeLost(_ENDED)
    about = next(iter(told.values()))
    world.life = about["life"]
    origin = Origin.from_json(about.get("origin"))
    names = ["the running ranks", f"this worker ({environment.pod()})"]
    check_same_data([about.get("data"), identity(dataset)], names)
    check_given([of_run(config)], origin.config, names[1:])
    return origin


def introduce(life: LifeParts) -> None:
    """Post the facts that a worker that joins checks: see `joined`."""
    if life.world.members:
        about = {
            "origin": life.origin.to_json(),
            "life": life.world.life,
            "data": identity(life.dataset),
        }
        life.world.members.post(ORIGIN, about)
        post_rows(life)


def post_rows(life: LifeParts) -> None:
    """Post where the lanes are, and who has them: see `pack_first_rows`."""
    if life.world.members:
        ids = life.world.ids
        rank = {it: n for n, it in enumerate(ids)}
        owners = [rank[it] for it in life.rows.owners]
        about = {"step": life.step, "data": life.progress.data, "ids": ids, "owners": owners}
        about["step_s"] = life.stalls.usual_s or 1.0  # 1: no step is done yet
        life.world.members.post(ROWS, about)


def pack_first_rows(life: LifeParts) -> None:
    """On a worker that joins: make the rows of its next steps, so that the others need not wait.

    If others join at another moment, it needs other lanes, and packs those once it is in. Raises
    LifeLost if the world that it joins has ended.
    """
    members = life.world.members
    assert members
    live.phase("packing its first rows")
    members.post(JOINS, True)
    members.wait_for(lambda: members.is_going and members.posts(ROWS), _POSTS_S)
    for _ in range(2):  # the others do steps meanwhile, and may need other blocks by then
        if not _plan(life):
            return
        _wait_for_rows(life.rows.loader, members)


def _wait_for_rows(loader: Loader, members: Members) -> None:
    heard = time.monotonic()
    while not loader.is_ready():
        file = loader.reading()
        with storage.waiting(loader.reading):  # a wait for each file
            while loader.reading() == file and not loader.is_ready():
                heard = time.monotonic() if members.is_going else heard
                if time.monotonic() - heard > GONE_S:
                    raise LifeLost(_ENDED)
                time.sleep(_LOOK_S)


def _plan(life: LifeParts) -> bool:
    """Begin to make the rows that this worker needs if all that join now come in together.

    Returns whether it needs any.
    """
    members = life.world.members
    assert members
    if not (told := members.posts(ROWS)):  # of living members
        return False
    newest = max(told.values(), key=lambda it: it["step"])
    ids = [it for it in newest["ids"] if it in told]
    most = min(life.config.lanes, members.most)
    if len(ids) >= most:
        return False
    before = [newest["ids"][rank] for rank in newest["owners"]]
    life.rows.owners = owners(life.config.lanes, ids, before)
    others = [it for it in members.posts(JOINS) if it not in (*ids, members.me)]
    life.rows.move(newest["data"], [*ids, members.me, *others][:most], members.me)
    life.rows.loader.hurry(1 + math.ceil(_AHEAD_S / max(newest["step_s"], _LEAST_STEP_S)))
    return True


def newest_state(
    config: Config, dataset: Dataset, world: World, clock: PhaseClock
) -> tuple[Origin, SavedState, Lease | None]:
    """All ranks: the origin of the life, this rank's part of the state, and rank 0's lease.

    Only rank 0 reads a checkpoint. If each rank read a part, a node with an old view of a network
    volume would cause a good checkpoint to be set aside, and each rank would hold the state twice.
    It would save 0.2 to 0.5 s of 1.1 to 2.4 s (0.5 GB, four ranks on two cores).
    """
    live.phase("looking for the newest state of the run")
    given, data = world.gather(of_run(config)), world.gather(identity(dataset))
    loaded: Any = None
    lease: Lease | None = None

    def on_rank_0(tell: Tell) -> list[Any]:
        nonlocal loaded, lease
        lease = take_run(config, world, tell)
        clock.enter("restore")
        try:
            check_same_data(data, world.names)
            origin, loaded = open_run(config, dataset, world, lease.check, tell)
            check_given(given, origin.config, world.names)
        except BaseException as error:  # release the lease if the start fails
            lease.release()
            if isinstance(error, OSError) and error.errno in MISPLACED:
                what = f"run {config.run_dir} cannot be used: {explain(error)}"
                raise ConfigError(what) from error
            raise
        clock.enter("init")
        return [origin.to_json(), loaded.meta if loaded else {}]

    about, meta = world.from_rank_0(on_rank_0)
    origin = Origin.from_json(about)
    if origin.config.on_bad == "fail":  # files may be missing on this rank only
        patiently(dataset.check_whole)
    tensors = loaded.tensors if loaded else {}  # on rank 0 at most
    return origin, SavedState(origin.source, origin.step, tensors, meta), lease


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
