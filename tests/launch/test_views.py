"""Launchers agree on views after any death, cut, delay or join: simulated."""

import heapq
import itertools
import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gptddp.checkpoint import run_state
from gptddp.config import Config
from gptddp.launch.launcher import LEAVES_S, Exit, Launcher
from gptddp.launch.mesh import Mesh
from gptddp.launch.views import KEPT, Views, ids

TICK_S, ROW_S, EXPIRY_S = 0.1, 0.5, 12.0


class Pod:
    """A launcher with a worker that acts like the trainer."""

    def __init__(self, sim, name, least, most):
        self.sim, self.name = sim, name
        self.agent = sim.fresh("a")
        self.views = Views(self.agent, f"{name}:1", least, most)
        self.sent, self.sent_s, self.number = "", -1.0, 0
        self.worker_at, self.told, self.root = sim.now + sim.random.uniform(0.2, 2), 0, None
        self.asked = (0, 0.0)  # the number of the request for the lease, and its time

    @property
    def member(self):
        return self.views.row["member"]

    def tick(self):
        views, now = self.views, self.sim.now
        views.tick(TICK_S)
        if self.member is None and now >= self.worker_at:
            status = "warm" if views.is_going else "fresh"
            views.attach({"id": self.sim.fresh("m"), "pod": self.name, "status": status}, "")
        elif self.member and self.member["status"] in ("fresh", "warm") and not self.is_in:
            self.member["status"] = "warm" if views.is_going else "fresh"
        elif self.is_in and now > self.told + 0.3 and self.sim.works(views.row["view"]):
            self.member["status"] = "going"
        if question := views.question:
            self.answer(question)
        self.step()

    @property
    def is_in(self):
        return self.member is not None and self.member["id"] in ids(self.views.row["view"])

    def answer(self, question):
        if self.asked[0] != question["number"]:
            self.asked = (question["number"], self.sim.now)
        held_by = self.sim.lease
        waited = self.sim.now - max(self.asked[1], self.sim.renewed_s) > EXPIRY_S
        if (question["how"] == "tie" and held_by == self.agent) or waited:
            self.sim.lease, self.sim.renewed_s = self.agent, self.sim.now
            self.views.answer(question["number"])

    def step(self):
        if self.views.is_expelled:
            self.sim.replace(self)
            return
        self.views.step()
        if self.views.out and self.member is None:
            self.worker_at = min(self.worker_at, self.sim.now + 0.3)
        self.sim.check(self)
        text = json.dumps(self.views.row, sort_keys=True)
        if text != self.sent or self.sim.now >= self.sent_s + ROW_S:
            self.sent, self.sent_s = text, self.sim.now
            for other in self.sim.pods:
                if other is not self:
                    self.sim.send(self, other, text)


class Sim:
    """Pods, and a network of one-directional connections that keep the order or break."""

    def __init__(self, seed, size, least, most):
        self.random, self.now = random.Random(seed), 0.0
        self.counter, self.order = itertools.count(), itertools.count()
        self.least, self.most = least, most
        self.queue, self.cut, self.arrives = [], {}, {}
        self.lease, self.renewed_s = "", 0.0
        self.pods, self.committed, self.slow_s, self.log = [], {}, 0.005, []
        for n in range(size):
            self.pods.append(Pod(self, f"w-{n}", least, most))

    def fresh(self, kind):
        return f"{kind}{next(self.counter)}"

    def send(self, one, other, text):
        """Send in order; a cut connection loses frames: its last row is sent again later."""
        link = (one.name, other.name)
        if self.now < self.cut.get(link, 0) or self.random.random() < 0.02:
            return
        at = self.now + self.random.uniform(0.2, 1.5) * self.slow_s
        at = self.arrives[link] = max(at, self.arrives.get(link, 0))
        heapq.heappush(self.queue, (at, next(self.order), other, one, text))

    def kill_worker(self, pod):
        if pod.member:
            pod.views.attach(None, "its process died of SIGKILL")
            pod.worker_at = self.now + self.random.uniform(0.1, 3)
            pod.step()

    def kill_launcher(self, pod):
        """All its sent frames arrive before the end of the connection, if that arrives."""
        for other in self.pods:
            if other is not pod:
                self.send(pod, other, "")
        self.replace(pod)

    def replace(self, pod):
        self.pods[self.pods.index(pod)] = new = Pod(self, pod.name, self.least, self.most)
        new.worker_at += 1

    def works(self, view):
        """Are all members of the view alive and in it? Only then can they compute."""
        own = [p for p in self.pods if p.is_in and p.views.row["view"] == view]
        return len(own) == len(view["members"])

    def check(self, pod):
        view = pod.views.row["view"]
        if view is None or view["number"] == pod.number or not pod.is_in:
            return
        pod.number, pod.told = view["number"], self.now
        key = (view["number"], tuple(ids(view)))
        if key not in self.committed:  # its newest ancestor without a quorum
            self.committed[key] = key if view["by"] != "quorum" else pod.root
            self.log.append((round(self.now, 2), view["by"], key))
        pod.root = self.committed[key]
        same = [k for k, root in self.committed.items() if root == pod.root and k[0] == key[0]]
        assert same == [key], ("two views of one number", same)

    def run(self, until, chaos=lambda: None):
        while self.now < until:
            end = self.now + TICK_S
            while self.queue and self.queue[0][0] <= end:
                self.now, _, other, one, text = heapq.heappop(self.queue)
                if other not in self.pods:
                    continue
                before = other.views.rows.get(one.agent)
                if text:
                    other.views.hear(json.loads(text))
                else:
                    other.views.died(one.agent, "its launcher ended")
                if other.views.rows.get(one.agent) != before:
                    other.step()
            self.now = end
            chaos()
            for pod in [*self.pods]:
                if pod in self.pods:
                    pod.tick()
            working = {}
            for pod in self.pods:
                view = pod.views.row["view"]
                if not pod.is_in or pod.member["status"] != "going" or not self.works(view):
                    continue
                working.setdefault(pod.root, set()).add(view["number"])
                may_have_it = view["by"] != "lease" or self.lease == pod.agent
                if pod.member["id"] == ids(view)[0] and may_have_it:
                    self.lease, self.renewed_s = pod.agent, self.now
            assert all(len(numbers) == 1 for numbers in working.values()), working

    def is_whole(self):
        views = [p.views.row["view"] for p in self.pods]
        in_it = [p for p in self.pods if p.is_in and p.member["status"] == "going"]
        return len(in_it) == min(self.most, len(self.pods)) and all(
            p.views.row["view"]["number"] == max(v["number"] for v in views if v) for p in in_it
        )


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
    """A number has one view, and a start has one computing world, in any schedule of kills, cuts,
    delays and joins; once the network is whole, all are in one view within 30 s."""
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
