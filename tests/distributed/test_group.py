"""Worlds that change within real processes, with gloo and a fake mesh."""

import os
import signal
import time

import pytest
from support.fake_mesh import FakeMesh
from support.forked import Forked, fork

# A member that sums ones with the others for ever, and posts its state after the first sum of
# each world.
CODE = """
import os, sys, threading, time, resource
import torch
from gptddp.distributed import connect, group
from gptddp.distributed.lost import is_lost_peer
from gptddp.distributed.members import Out, View
worlds = 0

def work(tell):
    return ["told", tell("something, now")]

exec(os.environ.get("FAULT", ""))

with connect.connect("cpu") as world:
    members = world.members
    assert world.all_reduce(torch.ones(1 << 12)).sum() == 1 << 12
    members.status("warm")
    after = 0
    while True:
        found = members.next_view(after, 1.0)
        if isinstance(found, Out):
            members.rejoin()
            world.alone()
            members.status("warm")
            after = 0
        elif not found and world.view:
            members.broken(world.view)
        if not isinstance(found, View):
            continue
        after = found.number
        try:
            world.form(found)
            told = world.from_rank_0(work)
            assert told == ["told", None], told
            first = True
            while first or not asked[-1]:
                ask = float(members.has_news(found) and not members.is_over(found))
                asked = world.all_reduce(torch.tensor([1.0] * (1 << 16) + [ask]))
                assert asked[0] == world.world_size == int(os.environ["WORLD_SIZE"])
                if first:
                    first = False
                    worlds += 1
                    memory = int(open("/proc/self/statm").read().split()[1]) * 4096
                    tasks = [len(os.listdir(f"/proc/self/{it}")) for it in ("fd", "task")]
                    about = [time.time(), os.getpid(), world.rank, worlds]
                    members.post("first", [found.number, *about, *tasks, memory])
                time.sleep(0.005)
        except Exception as error:
            if not is_lost_peer(error):
                raise
            print(f"{type(error).__name__} {error}", file=sys.stderr, flush=True)
"""
# For FAULT: the work of rank 0 has no end.
WAITING = """
def work(tell):
    while True:
        tell("waiting, still")
        time.sleep(0.1)
"""
ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")  # as under torchrun
NUMBER, AT, PID, RANK, WORLDS, FILES, THREADS, MEMORY = range(8)


class Worlds(FakeMesh):
    """A mesh and its members, by pod."""

    def __init__(self, folder):
        super().__init__(folder)
        self.processes: dict[str, Forked] = {}

    def start(self, *pods, fault=""):
        for pod in pods:
            own = {"GPTDDP_MEMBERS": str(self.path), "POD_NAME": pod, "FAULT": fault}
            self.processes[pod] = fork(CODE, env=os.environ | ALONE | own)
        return self.by_pod(*pods)

    def form(self, ids):
        """Form a view of these pods; return each pod's post in it, once all are in it."""
        return self.formed(self.commit(ids))

    def formed(self, number):
        ids = [it["id"] for it in self.view["members"]]

        def first():
            found = {self.pods[it]: self.posts.get(it, {}).get("first") for it in ids}
            return all(it and it[NUMBER] == number for it in found.values()) and found

        return self.wait(first, why=self.said)

    def ids(self, *without):
        return [it["id"] for it in self.view["members"] if it["pod"] not in without]

    def kill(self, *pods):
        """Kill these pods, and send the view without them; return the posts of the others in it."""
        gone = set(self.ids()) - set(self.ids(*pods))
        for pod in pods:
            os.kill(self.processes[pod].pid, signal.SIGKILL)
        self.wait(lambda: not gone & set(self.members))
        return self.form(self.ids(*pods))

    def said(self):
        return "\n".join(f"{pod}: {it.stderr.read()}" for pod, it in self.processes.items())


@pytest.fixture
def worlds(tmp_path):
    made = Worlds(tmp_path)
    yield made
    for it in made.processes.values():
        it.kill()
    made.close()


def test_survivors_continue_in_the_same_process(worlds):
    """A rank, then rank 0, then two ranks are lost; the rest keep their order, and admit others."""
    before = worlds.form(worlds.start("a", "b", "c", "d"))
    assert [before[pod][RANK] for pod in "abcd"] == [0, 1, 2, 3]
    after = worlds.kill("c")
    assert {pod: it[PID] for pod, it in after.items()} == {pod: before[pod][PID] for pod in "abd"}
    after = worlds.kill("a")
    assert [after[pod][RANK] for pod in "bd"] == [0, 1]
    joined = worlds.form(worlds.ids() + worlds.start("e", "f"))
    assert [joined[pod][RANK] for pod in "bdef"] == [0, 1, 2, 3]
    after = worlds.kill("b", "e")
    assert [(after[pod][RANK], after[pod][PID]) for pod in "df"] == [
        (0, before["d"][PID]),
        (1, joined["f"][PID]),
    ]
    assert worlds.kill("d")["f"][RANK] == 0


def test_rank_0_ends_its_work_when_another_world_continues(worlds):
    """It may wait for a lease that the other world renews: then it joins that world."""
    (alone,) = worlds.start("a", fault=WAITING)
    worlds.commit([alone], by="first")
    worlds.wait(lambda: "rank 0" in worlds.posts.get(alone, {}))
    worlds.tell(alone, {"out": 7})
    worlds.wait(lambda: alone not in worlds.members)
    assert worlds.by_pod("a") != [alone]


def test_a_silent_peer_is_dropped_and_rejoins(worlds):
    """The others re-form within 3 s; the silent process wakes, and rejoins as another member."""
    first = worlds.form(worlds.start("a", "b", "c", "d"))
    stopped = worlds.by_pod("b")
    os.kill(worlds.processes["b"].pid, signal.SIGSTOP)
    worlds.tell_all({"lost": stopped})
    began = time.monotonic()
    worlds.form(worlds.ids("b"))
    assert time.monotonic() - began < 3.0
    os.kill(worlds.processes["b"].pid, signal.SIGCONT)
    worlds.tell(stopped[0], {"out": worlds.view["number"]})
    assert worlds.wait(lambda: worlds.by_pod("b") != stopped)
    again = worlds.form(worlds.ids() + worlds.by_pod("b"))
    assert again["b"][PID] == first["b"][PID] and again["b"][RANK] == 3


IN_SET = """
def set_and_die(self, key, value, real=group._Posted.set):
    real(self, key, value)
    if self._group.view and len(self._group.view.members) == 5:
        time.sleep(0.05)
        os.kill(os.getpid(), 9)
group._Posted.set = set_and_die
"""


def test_a_member_that_dies_while_a_world_forms_is_dropped(worlds):
    """One member dies after it has posted its address, so that gloo waits for its connections;
    another is silent before it posts."""
    worlds.form(worlds.start("a", "b", "c", "d"))
    began = time.monotonic()
    ids = worlds.ids() + worlds.start("dies", fault=IN_SET)
    worlds.commit(ids)
    worlds.wait(lambda: ids[-1] not in worlds.members)
    worlds.form(ids[:-1])
    began = time.monotonic()
    silent = worlds.start("silent")
    os.kill(worlds.processes["silent"].pid, signal.SIGSTOP)
    worlds.commit(worlds.ids() + silent)
    time.sleep(0.5)
    worlds.tell_all({"lost": silent})
    worlds.form(ids[:-1])
    assert time.monotonic() - began < 5.0


CUTS_ITSELF = """
def cuts_itself():
    while not worlds:
        time.sleep(0.1)
    world.group.cut()
threading.Thread(target=cuts_itself, daemon=True).start()
"""


def test_a_world_whose_connections_are_lost_is_formed_again(worlds):
    """Although no member is lost, one reports the failure, and all form the next world."""
    ids = worlds.start("a", "b", "c", "d") + worlds.start("cut", fault=CUTS_ITSELF)
    number = worlds.commit(ids)
    worlds.wait(lambda: {"broken": number} in worlds.heard[ids[-1]], why=worlds.said)
    assert len(worlds.form(ids)) == 5


STRANGERS = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(listener.getsockname())
far = listener.accept()[0]
def talk():
    while True:
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        socket.create_connection(listener.getsockname()).close()
        listener.accept()[0].close()
        members and members.post("talked", time.time())
        time.sleep(0.02)
members = None
threading.Thread(target=talk, daemon=True).start()
"""


def test_no_other_connection_is_cut(worlds):
    """Other listeners and connections of the process survive a loss."""
    ids = worlds.start("a", "b", "c", fault=STRANGERS)
    worlds.form(ids)
    worlds.kill("b")
    at = time.time()
    worlds.wait(lambda: all(worlds.posts[it]["talked"] > at for it in worlds.ids()))


NEVER_ENDS = """
import torch.distributed as td
class Work:
    def __init__(self, real):
        self.real = real
    def is_completed(self):
        return self.real.is_completed() and not world.group.is_broken
    def wait(self, limit=None):
        while not self.is_completed():
            time.sleep(0.1)
            if limit:
                raise RuntimeError("Operation timed out!")
        return self.real.wait()
def all_reduce(*args, async_op=False, real=td.all_reduce):
    work = Work(real(*args, async_op=True))
    return work if async_op else work.wait()
td.all_reduce = all_reduce
"""


def test_a_sum_that_never_ends_blocks_no_process(worlds):
    """Within a part of a second, twice in a row, a process leaves a sum that never ends."""
    before = worlds.form(worlds.start("a", "b") + worlds.start("kept", fault=NEVER_ENDS))
    for _ in range(2):
        after = worlds.kill("a")
        assert after["kept"][PID] == before["kept"][PID]
        worlds.form(worlds.ids() + worlds.start("a"))


FORGOTTEN = """
group.FREE_S = 0.5
group.Group.cut = lambda self: None
"""


def test_a_process_that_gloo_blocks_ends(worlds):
    """A process whose collective gloo does not release exits with 1, and says why."""
    ids = worlds.start("a", "b") + worlds.start("kept", fault=FORGOTTEN)
    worlds.form(ids)
    os.kill(worlds.processes["a"].pid, signal.SIGSTOP)
    worlds.tell(ids[2], {"lost": ids[:1]})
    assert worlds.processes["kept"].wait(30) == 1
    assert "does not let go" in worlds.processes["kept"].stderr.read()


def test_fifty_worlds_leak_nothing(worlds):
    """Descriptors, threads and memory are as after the first world, for a member that stays and for
    a member that is dropped and rejoins in its process."""
    stay, leave, seen = worlds.start("a", "b"), worlds.start("c"), []
    for _ in range(25):
        worlds.form(stay + leave)
        seen.append(worlds.form(stay)["a"])
        worlds.tell(leave[0], {"out": worlds.view["number"]})
        worlds.wait(lambda old=leave: worlds.by_pod("c") != old, why=worlds.said)
        leave = worlds.by_pod("c")
        stay = stay[::-1]
    seen.append(worlds.form(stay + leave)["c"])
    assert seen[-1][WORLDS] == 26
    # one thread may live for a second, to look again at the arrivals
    for what, most in ((FILES, 0), (THREADS, 1), (MEMORY, 4 << 20)):
        early, late = (min(it[what] for it in part) for part in (seen[5:10], seen[-6:-1]))
        assert late - early <= most, (what, early, late)
