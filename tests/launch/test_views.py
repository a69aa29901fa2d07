"""Launchers agree on views after any death, cut, delay or join: simulated."""

import itertools
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.simulated_mesh import TICK_S, Pod, Sim

from gptddp.checkpoint import run_state
from gptddp.config import Config
from gptddp.launch.launcher import LEAVES_S, Exit, Launcher
from gptddp.launch.mesh import Mesh
from gptddp.launch.rows import ids
from gptddp.launch.views import KEPT, Views

KINDS = ["worker", "worker", "launcher", "leader", "stop", "cut", "one way", "split", "slow"]


def random_chaos(sim):
    """A random fault at random times."""

    def chaos():
        random, pods = sim.random, sim.pods
        if random.random() > 0.06:
            return
        pod = random.choice(pods)
        kind = random.choice(KINDS)
        if kind == "worker":
            sim.kill_worker(pod)
        elif kind == "launcher":
            sim.kill_launcher(pod)
        elif kind == "leader":
            in_view = [p for p in pods if p.is_in]
            if in_view:
                first = min(in_view, key=lambda p: ids(p.views.row["view"]).index(p.member["id"]))
                random.choice([sim.kill_worker, sim.kill_launcher])(first)
        elif kind == "slow":
            sim.slow_s = random.choice([0.005, 0.005, 0.2, 1.0])
        elif kind == "stop" and pod.member and pod.member["status"] == "going":
            pod.member["status"] = "stopped"
        else:
            end = sim.now + random.choice([1, 3, 8, 20])
            group = set(random.sample([p.name for p in pods], random.randint(1, len(pods) - 1)))
            for one, other in itertools.permutations([p.name for p in pods], 2):
                is_cut = {
                    "cut": pod.name in (one, other),
                    "one way": pod.name == other,
                    "split": (one in group) != (other in group),
                }.get(kind, False)
                if is_cut:
                    sim.cut[one, other] = end

    return chaos


@pytest.mark.parametrize("seed", range(16))
def test_no_schedule_splits_the_world_and_a_whole_network_heals_it(seed):
    """Of the views that come from one first view, or one by the lease, no two have one number, and
    only one computes, in any schedule of kills, cuts, delays and joins. Once the network is whole,
    all are in one view within 30 s."""
    size = 2 + seed % 5
    sim = Sim(seed, size, 1 + seed % size, size)
    sim.run(40, random_chaos(sim))
    sim.cut.clear()
    sim.slow_s = 0.005
    for pod in sim.pods:
        if pod.member and pod.member["status"] == "stopped":
            pod.member["status"] = "going"
    end = sim.now + 40
    while sim.now < end and not sim.is_whole():
        sim.run(sim.now + 1)
    assert sim.is_whole(), sim.log[-5:]


def steady(size, least=1):
    sim = Sim(1, size, least, size)
    sim.run(8)
    assert sim.is_whole()
    return sim


def members(sim):
    return sorted(
        {tuple(m["pod"] for m in p.views.row["view"]["members"]) for p in sim.pods if p.is_in}
    )


def test_a_killed_worker_is_out_of_the_view_at_once_and_rejoins_last():
    """Proof needs no waiting, survivors keep their order, and the new worker is the last rank."""
    sim = steady(4)
    sim.kill_worker(sim.pods[0])
    sim.pods[0].worker_at = sim.now + 2
    sim.run(sim.now + 0.15)
    assert members(sim) == [("w-1", "w-2", "w-3")]
    gone = sim.pods[1].views.row["view"]["gone"]
    assert [(g["pod"], g["how"]) for g in gone] == [("w-0", "its process died of SIGKILL")]
    sim.run(sim.now + 4)
    assert members(sim) == [("w-1", "w-2", "w-3", "w-0")]


@pytest.mark.parametrize("end", ["killed", "silent"])
def test_a_pod_waits_for_the_end_of_another_one_of_its_name(end):
    """A new pod with the address of a living one disturbs no view; it comes in after that one's
    end, or after its silence."""
    sim = steady(3)
    old, before = sim.pods[0], len(sim.log)
    sim.pods.append(Pod(sim, old.name, 1, 3))
    sim.run(20)
    assert sim.pods[0] is old and len(sim.log) == before and old.is_in
    if end == "killed":
        for other in sim.pods:
            sim.send(old, other, "")
    sim.pods.remove(old)
    sim.run(24 if end == "killed" else 30)
    assert [pod.is_in for pod in sim.pods] == [True] * 3


def test_a_launcher_that_hears_a_waiting_pod_first_joins_the_world_all_the_same():
    """Another pod is replaced while two of one name live: the one in the world counts."""
    sim = steady(3)
    old, other = sim.pods[:2]
    sim.pods.append(Pod(sim, old.name, 1, 3))
    sim.run(12)
    sim.kill_launcher(other)
    new, waiting = next(p for p in sim.pods if p.name == other.name), sim.pods[-1]
    new.views.hear(json.loads(json.dumps(waiting.views.row)))
    sim.run(20)
    assert new.is_in and old.is_in and old in sim.pods


def test_a_minority_needs_the_lease():
    """Two of five that hear no other wait until they have the lease; the three continue."""
    sim = steady(5)
    cut = {"w-0", "w-1"}
    names = [p.name for p in sim.pods]
    for one, other in itertools.permutations(names, 2):
        if (one in cut) != (other in cut):
            sim.cut[one, other] = sim.now + 10
    start = sim.now
    sim.run(start + 5)
    assert [p.views.row["view"]["number"] for p in sim.pods] == [1, 1, 2, 2, 2]
    assert sim.pods[0].views.question is None, "others may be about to say that they are out"
    sim.run(start + 7)
    assert sim.pods[0].views.question["how"] == "minority"
    sim.run(start + 16)
    assert sim.is_whole() and members(sim) == [("w-2", "w-3", "w-4", "w-0", "w-1")]


def test_the_half_with_the_lease_continues_if_links_fail_one_after_another():
    """The half with rank 0 waits only for the silence, not until the lease expires.

    Between two losses the second pod hears more than rank 0, and proposes a view without it.
    """
    sim, sides = steady(4), (("w-0", "w-1"), ("w-2", "w-3"))
    start, pairs = sim.now, [*itertools.product(*sides)]
    links = [link for one, other in pairs for link in ((one, other), (other, one))]

    def cut():
        for n, link in enumerate(links):
            if sim.now >= start + n / 10:
                sim.cut[link] = start + 30

    sim.run(start + 6, cut)
    assert [len(p.views.row["view"]["members"]) for p in sim.pods] == [2, 2, 4, 4]


def test_a_view_that_others_have_formed_counts_in_a_majority():
    """Of three that formed a view without the other two, the last one continues alone.

    The other two reach the launchers of the dead again. They are two of the three living members
    of their own view; but the view of three counts too, and they have no member of it.
    """
    sim, (three, two) = steady(5), (("w-0", "w-1", "w-2"), ("w-3", "w-4"))
    start = sim.now
    for one, other in itertools.product(three, two):
        sim.cut[one, other] = sim.cut[other, one] = start + 5.5
    sim.run(start + 5)
    for pod in sim.pods[:2]:
        sim.kill_worker(pod)
    sim.run(start + 5.3)
    for name in {*three, *two} - {"w-2"}:
        sim.cut["w-2", name] = sim.cut[name, "w-2"] = start + 30
    assert [len(p.views.row["view"]["members"]) for p in sim.pods] == [3, 3, 1, 5, 5]
    sim.run(start + 29)  # it fails if two worlds compute
    assert members(sim) == [tuple(f"w-{n}" for n in range(5)), ("w-2",)]
    sim.run(start + 45)
    assert sim.is_whole(), sim.log


RIVAL = {"number": 2, "leader": "b", "base": 1}  # an earlier proposal, which b has replaced


@pytest.mark.parametrize(
    ("rival", "row", "counts"),
    [
        (RIVAL, {}, False),
        (RIVAL | {"leader": "c"}, {}, True),
        (RIVAL | {"number": 9}, {}, True),
        (RIVAL | {"base": 2, "number": 3}, {}, True),
        (RIVAL, {"proposal": RIVAL}, True),
        (RIVAL, {"view": {"number": 2}}, True),
        (RIVAL | {"number": 1}, {"proposal": RIVAL | {"number": 1}}, False),
    ],
    ids=["replaced", "no member", "later", "of a newer view", "stands", "a view", "older"],
)
def test_a_proposal_counts_until_its_leader_has_replaced_it(rival, row, counts):
    """It counts unless its leader has accepted a higher one, has dropped this one, and neither is
    based on a newer view nor has one."""
    one, members = Views("a", "x:1", 1, 3), [{"agent": agent} for agent in "ab"]
    one.row["view"] = {"number": 1}
    one.rows["b"] = {"view": {"number": 1}, "proposal": None} | row
    assert one._may_be_committed(rival, {"number": 4, "leader": "a", "members": members}) == counts


@pytest.mark.parametrize(("known", "refused"), [(3, False), (4, True)])
def test_a_view_of_others_takes_its_number(known, refused):
    """A proposal gets another number if others have formed a view with this one, or a higher."""
    one = Views("a", "x:1", 1, 3)
    mine = {"number": 4, "leader": "a", "members": [{"agent": "a"}]}
    one.row["accepted"] = [mine]
    one.rows["b"] = {"view": {"number": known}}
    assert one._is_refused(mine) == refused


def test_of_a_deaf_pair_the_higher_rank_is_dropped():
    """Two that do not hear each other cannot be in one view, though all others hear both."""
    sim = steady(4)
    sim.cut["w-1", "w-3"] = sim.now + 30
    sim.run(sim.now + 5)
    assert members(sim) == [("w-0", "w-1", "w-2")]
    sim.run(sim.now + 20)
    assert members(sim) == [("w-0", "w-1", "w-2")]
    sim.run(sim.now + 10)
    assert sim.is_whole()


def test_a_group_that_is_broken_gets_a_new_view_of_the_same_members():
    """A worker's report, without any loss, makes all members form a group again."""
    sim = steady(3)
    sim.pods[2].views.row["broken"] = 1
    sim.run(sim.now + 0.3)
    assert [p.views.row["view"]["number"] for p in sim.pods] == [2, 2, 2]
    assert members(sim) == [("w-0", "w-1", "w-2")]


def test_launchers_that_saw_many_ends_in_different_orders_become_quiet():
    """Each keeps only the newest ends, and does not take dropped ends from the other again."""
    pair = [Views(agent, f"{agent}:1", 1, 2) for agent in "ab"]
    for one, order in zip(pair, (1, -1), strict=True):
        for dead in [str(n) for n in range(2 * KEPT)][::order]:
            one.hear({**Views(dead, f"{dead}:1", 1, 2).row})
            one.died(dead, "its pod has ended")
    before = None
    for _ in range(3):
        before, rows = str([one.row for one in pair]), json.dumps([one.row for one in pair])
        for one, row in zip(pair, json.loads(rows)[::-1], strict=True):
            one.hear(row)
            one.step()
            one.tick(TICK_S)
    assert str([one.row for one in pair]) == before
    assert all(set(one._silent_s) == {"a", "b"} for one in pair)


def test_a_launcher_knows_that_its_worker_ended_with_a_lost_peer():
    """A worker that ends with a lost peer made no error, and the next one is started at once."""
    members = [{"id": "m", "pod": "x", "agent": "a"}, {"id": "n", "pod": "y", "agent": "b"}]
    one = Views("a", "x:1", 1, 2)
    one.attach({"id": "m", "pod": "x", "status": "fresh"}, "")
    one.row["view"] = {"number": 1, "members": members}
    it, mesh = object.__new__(Launcher), object.__new__(Mesh)
    it.mesh, mesh.views = mesh, one
    it.in_view_s, it.going_s = time.monotonic() - 1, math.inf  # it has done no step yet
    one.attach(None, "its process ended with exit code 1")
    assert not it._was_killed(1)
    one.died("b", "its pod has ended")
    assert it._was_killed(1)
    it.in_view_s = math.inf  # the next worker fails before it is in a view
    assert not it._was_killed(1)


def test_a_worker_that_has_left_sends_its_last_messages(monkeypatch):
    """A worker that leaves a finished run has LEAVES_S before its launcher ends it."""
    it, mesh = object.__new__(Launcher), SimpleNamespace(going=False, left_at=time.monotonic())
    it.mesh, it.verdict, it.config = mesh, Path("/none"), Config()
    it.signals, it.next_marker_s, it.next_alive_s = SimpleNamespace(number=0), 0.0, 0.0
    monkeypatch.setattr(run_state, "why_finished", lambda config: "all steps are done")
    it.raise_if_over()
    mesh.left_at -= LEAVES_S
    with pytest.raises(Exit):
        it.raise_if_over()
