"""Launchers with their workers, and the network between them: simulated."""

import heapq
import itertools
import json
import random

from gptddp.launch.rows import ids, is_member
from gptddp.launch.views import Views

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
        return is_member(self.views.row)

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
