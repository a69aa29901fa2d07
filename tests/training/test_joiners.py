"""Ranks that join, rejoin or cannot join, and the end of a wait for a new rank 0."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_worlds import worlds_of

from gptddp.distributed.members import Member, View
from gptddp.errors import Broken, LifeLost
from gptddp.run.progress import Progress
from gptddp.training.clock import PhaseClock


def view_of(number: int, *ids: str) -> View:
    return View(number, "quorum", tuple(Member(it, f"pod-{it}") for it in ids), ())


@pytest.mark.parametrize("case", ["cannot connect", "survivor", "members are lost", "formed"])
def test_only_a_joiner_that_cannot_be_connected_ends(monkeypatch, case):
    """Otherwise the others would form a world with it again and again, and do no step. Those that
    were in a world do not end, also if one lacks the newest state; nor does a joiner if members are
    lost, or if the world is formed and breaks later."""
    worlds, life, _ = worlds_of(3)
    views = [
        view_of(n, *("ae" if case == "members are lost" and n > 2 else "abe")) for n in range(5)
    ]
    monkeypatch.setattr(worlds, "_newest", lambda: views.pop(0))
    life.live, life.clock = SimpleNamespace(is_whole=False), PhaseClock()
    worlds._pods = {"e": "pod-e"} if case == "survivor" else {}
    life.rows, life.progress = SimpleNamespace(move=lambda *about: None), Progress()
    life.world.members.me, life.world.members.status = "e", lambda status: None

    def form(view: View) -> None:
        life.world.view = view
        if case != "formed" or view.number == 0:
            raise Broken("not all members can be connected")

    life.world.form = form
    errors = []
    for _ in range(5):
        try:
            worlds._form()
        except (Broken, LifeLost) as error:
            errors.append(type(error))
    assert [it is LifeLost for it in errors[:4]].count(True) == (case == "cannot connect")
    assert errors[:3] == [Broken] * (1 if case == "formed" else 3)


def test_a_joiner_may_be_the_next_to_hand_the_state_over(monkeypatch):
    """The last pod of the old world has given it the state, and dies before the change is told. The
    ledger has the loss."""
    worlds, life, _ = worlds_of(1)
    worlds._pods = {"a": "demo-worker-0"}  # of the view that it was to join
    about = {"view": view_of(3, "e"), "pods": ("demo-worker-4",), "rank": 0, "nodes": 1}
    vars(life.world).update(about, broadcast_value=lambda value, source: value)
    life.clock, life.generation, life.machines = PhaseClock(), 1, []
    life.spent = SimpleNamespace(by_phase=dict, met=0.0, enter=lambda world, before: None)
    kept: list[Any] = []
    life.live = SimpleNamespace(keep_event=lambda event, step: kept.append(event))
    worlds._noticed = time.monotonic()
    worlds._tell(0, False)
    assert kept[0]["joined"] == [{"rank": 0, "pod": "demo-worker-4"}]
    assert [it["pod"] for it in kept[0]["lost"]] == ["demo-worker-0"]


def test_a_worker_that_rejoins_packs_its_rows_first(monkeypatch):
    """The others have done steps without it: they would wait while it reads."""
    worlds, life, _ = worlds_of(2)
    did: list[str] = []
    members = life.world.members
    members.rejoin, members.status = lambda: did.append("rejoin"), did.append
    life.world.alone = lambda: None
    life.takeover, life.live = None, SimpleNamespace(is_whole=True)
    monkeypatch.setattr("gptddp.training.worlds.pack_first_rows", lambda life: did.append("pack"))
    worlds._come_back()
    assert did == ["rejoin", "pack", "warm"]


def test_a_worker_that_renews_the_lease_does_not_rejoin():
    """It took the lease as the proof for a view, but the others continued without it."""
    worlds, _, _ = worlds_of(2)
    worlds._lease = SimpleNamespace()
    with pytest.raises(LifeLost, match="continued without this process"):
        worlds._come_back()


@pytest.mark.parametrize("limit_s", [600.0, 0.0])
def test_the_end_waits_for_the_records_ten_minutes_at_most(monkeypatch, limit_s):
    """The volume may be away for good."""
    worlds, life, _ = worlds_of(2)
    monkeypatch.setattr("gptddp.training.worlds.WAIT_S", limit_s)
    monkeypatch.setattr("gptddp.training.worlds._POLL_S", 0.001)
    looks = iter([None, None, SimpleNamespace()])
    worlds.takeover = SimpleNamespace(recorder=lambda: next(looks), catch_up=lambda recorder: None)
    life.world.all_reduce = lambda flags: flags
    if limit_s:
        worlds.wait_for_records()
        assert life.recorder
        return
    with pytest.raises(OSError, match="rank 0 cannot take over the records"):
        worlds.wait_for_records()
