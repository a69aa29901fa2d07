"""Ranks of a new world: their comparison, stops, and the seconds of two worlds."""

import json
import math
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_worlds import worlds_of

from gptddp import train
from gptddp.distributed import replicas
from gptddp.distributed.connect import World
from gptddp.errors import Broken, ConfigError, Diverged, Hung, LifeLost, LostPeer, Stopped
from gptddp.run import crash_loop
from gptddp.run.owners import Owners
from gptddp.run.progress import Progress
from gptddp.training.clock import PhaseClock
from gptddp.training.compare import compare
from gptddp.training.guard import Guard
from gptddp.training.life import Life
from gptddp.training.worlds import ALONE_S

TENSORS = {"w": torch.arange(6.0)}
CHAIN = 3
LAYOUT = 7


class Group:
    """A world with this process as rank 0, and `others` from the other ranks."""

    rank, names, is_static, members, view = 0, ["rank 0", "rank 1", "rank 2"], False, None, None
    device = torch.device("cpu")

    def __init__(self, *others: Any) -> None:
        self.others, self.given = others, list[tuple[int, int]]()
        self.world_size = 1 + len(others)

    def gather(self, mine: Any) -> list[Any]:
        return json.loads(json.dumps([mine, *self.others]))

    def send(self, tensors: Any, source: int, to: int) -> None:
        self.given.append((source, to))

    def broadcast_value(self, value: Any, source: int) -> Any:
        return value


def rank_at(
    step: int,
    bad: int = 1,
    chain: int = CHAIN,
    layout: int = LAYOUT,
    generation: int = 1,
    known: Any = None,
    owners: Sequence[str] = (),
    handed_on: int = -1,
) -> Any:
    """The contribution of another rank."""
    about = generation, False, "m", known or {}, owners, handed_on
    return [step, bad], chain, layout, *about


def life_in(world: Group, step: int = 5, whole: bool = True) -> Any:
    kept: list[Any] = []
    live = SimpleNamespace(is_whole=whole, kept=lambda: ([], []), keep=kept.append, lines=kept)
    progress = Progress(step=step, chain_fp=CHAIN, data={"quarantined": [8]})
    about = {"progress": progress, "tensors": TENSORS, "generation": 1, "line": {"loss": 2.0}}
    about |= {"handed_on": -1, "recorder": None, "rows": SimpleNamespace(owners=["a", "b"])}
    return SimpleNamespace(world=world, live=live, step=step, **about)


def test_the_state_of_the_highest_step_counts_and_goes_to_the_others():
    world = Group(rank_at(4, chain=1), rank_at(-1, generation=3))
    life = life_in(world)
    assert compare(life, LAYOUT, records=True) == (0, False)
    assert world.given == [(0, 2), (0, 1)] and life.generation == 3 and life.handed_on == 5


@pytest.mark.parametrize(("to", "step"), [(1, 5), (2, -1), (3, 6)])
def test_a_rank_has_its_state_until_the_newer_one_comes_and_that_at_once(to, step):
    """The only rank with the newer state may be lost while it sends that to rank `to`. Rank 1
    joins, and this is rank 2. It has no whole state only while it gets the other one."""
    world = Group(rank_at(6), rank_at(-1), rank_at(5))
    others, newer = world.others, Progress(step=6, chain_fp=CHAIN).to_meta()
    world.rank, world.world_size = 2, 4
    world.gather = lambda mine: json.loads(json.dumps([*others[:2], mine, others[2]]))
    world.broadcast_value = lambda value, source: [newer, {}, [], []]

    def send(tensors: Any, source: int, rank: int) -> None:
        if rank == to:
            raise Broken("rank 0 is lost")

    world.send, life = send, life_in(world)
    life.live.take_over = lambda lines, events: None
    with pytest.raises(Broken):
        compare(life, LAYOUT, records=True)
    assert step == (life.progress.step if life.live.is_whole else -1)


def test_no_state_is_sent_if_all_ranks_have_it():
    """A rank whose evaluation was interrupted gets only the numbers of a rank that completed it."""
    world = Group(rank_at(5, handed_on=4), rank_at(5, known={"val_loss": 1.5}))
    life = life_in(world)
    assert compare(life, LAYOUT, records=False) == (0, True)
    assert not world.given and life.handed_on == 4  # the same on all, also if one missed it
    assert life.line == {"loss": 2.0, "val_loss": 1.5}
    assert life.live.lines == [life.line], "the kept line lacks the evaluation"


def test_at_the_same_step_the_rank_with_more_quarantined_rows_has_the_state():
    world = Group(rank_at(5, bad=0))
    assert compare(life_in(world), LAYOUT, records=True) == (0, False)
    assert world.given == [(0, 1)]


@pytest.mark.parametrize(("step", "owners"), [(6, ["b", "a"]), (5, ["a", "b"]), (-1, ["a", "b"])])
def test_all_ranks_go_on_from_the_owners_of_the_newest_state(step, owners):
    """So they find the same owner for each lane, whatever a joiner has expected."""
    life = life_in(Group(rank_at(step, owners=["b", "a"])))
    life.live.take_over = lambda lines, events: None
    life.world.broadcast_value = lambda value, source: (
        value or [life.progress.to_meta(), {}, [], []]
    )
    compare(life, LAYOUT, records=True)
    assert life.rows.owners == owners


@pytest.mark.parametrize("groups", [[8], [9], [8, 9]])
def test_rank_0_records_a_quarantine_that_it_learns_from_another_rank(groups):
    """It was interrupted in the decision. Without the event, a life that resumes from an older
    checkpoint would train other rows once the file is repaired."""
    life = life_in(Group(rank_at(5, bad=2)))
    event = {"event": "quarantine", "step": 5, "row_groups": groups}
    progress = Progress(step=5, chain_fp=CHAIN, data={"quarantined": [8, 9]})
    life.world.broadcast_value = lambda value, source: (
        value or [progress.to_meta(), {}, [], [event, {"event": "start"}]]
    )
    life.live.take_over = lambda lines, events: None
    events: list[Any] = []
    ledger = SimpleNamespace(emit=lambda name, **about: events.append((name, about)))
    life.recorder = SimpleNamespace(generation=1, events=ledger)
    compare(life, LAYOUT, records=True)
    assert events == ([("quarantine", event)] if 9 in groups else [])


@pytest.mark.parametrize(
    ("other", "layout", "step", "error"),
    [
        (rank_at(5, chain=CHAIN + 1), LAYOUT, 5, Diverged),
        (rank_at(-1), LAYOUT, -1, LifeLost),
        (rank_at(6, layout=LAYOUT + 1), LAYOUT, 5, ConfigError),
        (rank_at(-1, layout=LAYOUT + 1), LAYOUT, 5, LostPeer),
    ],
    ids=["other rows", "no state", "other buckets", "a joiner's other buckets"],
)
def test_a_world_that_does_not_fit_does_no_step(other, layout, step, error):
    life = life_in(Group(other), max(step, 0), step >= 0)
    with pytest.raises(error):
        compare(life, layout, records=True)


def test_a_rank_that_is_asked_to_stop_first_waits_for_a_stop_of_all():
    worlds, life, left = worlds_of(4, asked=True, waited_s=0.5)
    asked, late = worlds.stops()
    assert asked and not late
    worlds.agreed(1, 0, asked, news=0)
    assert not life.cause and not worlds.ends and not left


def test_a_rank_that_has_waited_leaves_and_the_others_continue():
    """Rank 0 first gives up its lease: it must not renew it beside the next rank 0."""
    worlds, life, left = worlds_of(4, asked=True, waited_s=5.0)
    lease = SimpleNamespace(close=lambda: left.append("lease"))
    life.recorder = SimpleNamespace(lease=lease)
    with pytest.raises(Stopped, match="the others continue"):
        worlds.agreed(1, 1, worlds.stops()[0], news=0)
    assert left == ["lease", "told to stop"]
    worlds, life, left = worlds_of(4)
    worlds.agreed(1, 1, worlds.stops()[0], news=0)
    assert worlds.ends and not life.cause and not left


def test_a_rank_that_is_asked_to_stop_does_not_wait_for_a_view_for_ever():
    """A rank waits only as long as a tie may take, and then leaves."""
    worlds, life, left = worlds_of(4, asked=True, waited_s=21.0)
    life.world.members.next_view = lambda after, limit_s: None
    with pytest.raises(Stopped, match="while waiting for others"):
        worlds._newest()
    assert left == ["told to stop"]


def test_too_small_a_world_saves_until_it_has_saved():
    """A too small world saves at once, every few seconds while the disk fails, and then no more."""
    worlds, life, _ = worlds_of(2)
    life.world.members.least, within, tries = 3, list[float](), list[int]()

    def is_due(seconds: float) -> bool:
        within.append(seconds)
        return True

    writer = SimpleNamespace(has=lambda step: step == 3 and len(tries) == 2)
    life.recorder = SimpleNamespace(
        saves=SimpleNamespace(writer=writer, is_due=is_due, watch=lambda: None)
    )
    life.clock = SimpleNamespace(enter=lambda phase: None)
    life.check_replicas, life.save = lambda: None, lambda: tries.append(3)
    worlds.meet = lambda: meetings.append(0) or setattr(worlds, "ends", len(meetings) == 4)
    meetings = list[int]()
    worlds._wait()
    assert tries == [3, 3] and within == [0.0, ALONE_S]


@pytest.mark.parametrize(
    ("nodes", "size", "most", "alone"), [(1, 2, 8, True), (2, 2, 8, False), (1, 4, 4, False)]
)
def test_the_only_pod_with_the_state_saves_it_soon(nodes, size, most, alone):
    """The pod saves soon with any number of workers, but not if the job has no other pod."""
    worlds, life, _ = worlds_of(size)
    life.world.nodes, life.world.members.most = nodes, most
    assert worlds.save_within_s == (ALONE_S if alone else math.inf)


def test_a_hang_is_counted_as_an_error_of_the_trainer(monkeypatch, tmp_path):
    """A hang counts as an error of the trainer, and a lost peer does not."""
    counted: list[Any] = []
    monkeypatch.setattr(crash_loop, "final", lambda error, *_, **about: counted.append(error))
    life: Any = SimpleNamespace(generation=1, world=SimpleNamespace(rank=0), step=4)
    life.config = SimpleNamespace(run_dir=str(tmp_path))
    for error in (Hung("it hangs in f (a.py:7)"), LostPeer("rank 1 is gone")):
        Guard(life)._count(error)
    assert [type(it) for it in counted] == [Hung]


@pytest.mark.parametrize(("static", "asked"), [(False, 4), (True, 1)])
def test_if_all_are_asked_or_the_world_is_static_the_life_stops(static, asked):
    worlds, life, _ = worlds_of(4, static=static)
    worlds.agreed(asked, 0, mine=False, news=1)
    assert life.cause == "stopped" and not worlds.ends


def test_the_rank_seconds_of_two_worlds_add_up():
    """Two ranks train for 10 s and notice a loss after 1 s; after 2 s one continues for 5 s."""
    owners = Owners()
    start = {"event": "start", "generation": 1, "time": 100.0, "world_size": 2, "step": 0}
    owners.add({**start, "redo": 7})
    moved = {"event": "world", "generation": 1, "time": 113.0, "at": 111.0, "world_size": 1}
    moved |= {"step": 9, "since_s": 1.0, "phases": {"step": [10.0, 9.0], "wait": [0.0, 1.0]}}
    owners.add(moved)
    owners.add(moved)  # the ledger may have it twice
    owners.add({"event": "checkpoint", "generation": 1, "phases": {"step": [5.0]}, "time": 118.0})
    found = {name: it for name, it in owners.so_far().items() if it}
    assert found == {"training": 24.0, "waiting": 1.0, "detection": 2.0, "recovery": 2.0}
    assert owners.redo_until == 9


def test_a_rank_that_is_lost_after_the_stop_does_not_undo_it():
    """The hour after the stop counts as stopped, and not as time without a world."""
    owners = Owners()
    start = {"event": "start", "generation": 1, "time": 100.0, "world_size": 2, "step": 0}
    stop = {"event": "stop", "generation": 1, "time": 110.0, "phases": {"step": [10.0, 10.0]}}
    lost = {"event": "world", "generation": 1, "time": 112.0, "at": 111.0, "world_size": 1}
    for event in (start, stop, {**lost, "step": 9, "since_s": 1.0, "phases": {}}):
        owners.add(event)
    owners.add({**start, "generation": 2, "time": 3700.0})
    found = {name: it for name, it in owners.seconds.items() if it}
    assert found == {"training": 20.0, "stopped": 2 * 3590.0}


def test_a_step_ends_early_if_a_peer_is_lost(run, monkeypatch):
    """No micro-batch is computed after the loss, because the step will be done again."""
    checks, passes, autocast = [], [], train.autocast

    def check(world: World) -> None:
        checks.append(len(passes))
        if len(checks) == 11:  # exact sums do the first step twice: the third of its second pass
            raise Broken("lost demo-worker-1")

    monkeypatch.setattr(World, "check", check)
    monkeypatch.setattr(train, "autocast", lambda *args: passes.append(1) or autocast(*args))
    assert run("--steps", "3") == 1
    assert checks == list(range(11)) and len(passes) == 10


def test_a_joiner_prepares_its_first_check_and_its_first_rows(monkeypatch):
    """The hash's numbers take a process 50 ms, for which all ranks of the world would wait. Rows
    may take seconds."""
    replicas.keys_of.cache_clear()
    world = SimpleNamespace(view=None, pods=("demo-worker-1",), device=torch.device("cpu"))
    life: Any = SimpleNamespace(world=world, clock=PhaseClock(), _state=None)
    packed: list[Any] = []
    monkeypatch.setattr("gptddp.training.life.pack_first_rows", packed.append)
    Life.restore(life, net=None, tensors=TENSORS, sums=None)
    assert replicas.keys_of.cache_info().currsize == 1 and packed == [life]


@pytest.mark.parametrize(("ago_s", "rank", "posts"), [(1.5, 0, 1), (1.5, 1, 0), (0.0, 0, 0)])
def test_rank_0_posts_where_the_lanes_are_every_second(monkeypatch, ago_s, rank, posts):
    """A worker that joins a world hours later packs the rows of that moment."""
    posted: list[Any] = []
    monkeypatch.setattr("gptddp.training.life.post_rows", posted.append)
    about = {"world": SimpleNamespace(rank=rank), "clock": PhaseClock(), "recorder": None}
    about |= {"progress": Progress(), "config": SimpleNamespace(max_skipped=0), "line": {}}
    Life.record(SimpleNamespace(**about, _posted=time.monotonic() - ago_s))  # type: ignore
    assert len(posted) == posts


@pytest.mark.parametrize("restored", [False, True])
def test_no_end_is_recorded_for_a_life_without_a_recorded_start(restored):
    """A ledger that began with an end would end the job for good."""
    events: list[str] = []
    ledger = SimpleNamespace(emit=lambda name, **about: events.append(name))
    recorder = SimpleNamespace(events=ledger, close=lambda: None)
    spent = SimpleNamespace(by_phase=dict, since_s=0.0)
    world = SimpleNamespace(is_static=False)
    life: Any = SimpleNamespace(recorder=recorder, world=world, spent=spent, step=0)
    life.stalls = SimpleNamespace(over=False)
    guard = Guard(life)
    guard.restored = restored
    with pytest.raises(LostPeer), guard.around():
        raise Broken("another is lost")
    assert events == ["end"] * restored
