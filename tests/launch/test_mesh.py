"""The mesh of launchers over real sockets, each launcher and worker a process."""

import os
import signal
import socket
import struct
import threading
import time
from ipaddress import IPv4Address
from types import SimpleNamespace

import pytest
from support.mesh_pods import Pod

from gptddp.distributed.members import SILENT_S
from gptddp.launch.mesh import Mesh
from gptddp.launch.rows import Json
from gptddp.launch.views import Views


def until(what, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not (value := what()):
        assert time.monotonic() < end, "not within the limit"
        time.sleep(0.005)
    return value


class Job:
    """Pods at addresses that only this test process uses."""

    def __init__(self, folder, size, least, most):
        pid = os.getpid()
        first = f"127.{100 + pid % 100}.{pid // 100 % 250}.10"
        self.port, self.least, self.most = 29400, least, most
        hosts = [str(IPv4Address(first) + n) for n in range(most)]
        self.seeds = [f"{host}:{self.port}" for host in hosts]
        self.folder, self.pods = folder, []
        for _ in range(size):
            self.add(len(self.pods))

    def add(self, n, **more):
        address = self.seeds[n].rpartition(":")[0]
        where = self.folder / f"{n}-{time.monotonic_ns()}"
        pod = Pod(where, address, self.port, self.seeds, self.least, self.most, **more)
        self.pods[n:] = [pod, *self.pods[n + 1 :]]
        return pod

    def agree(self, pods, limit_s=20.0):
        """Wait until these pods have one view of them, in any order; return it."""

        def same():
            views = [pod.view for pod in pods]
            wanted = sorted(pod.address for pod in pods)
            return all(v == views[0] and sorted(v[1]) == wanted for v in views) and views[0]

        return until(same, limit_s)


@pytest.fixture
def job(tmp_path):
    jobs = []

    def begin(size, least=1, most=None):
        jobs.append(Job(tmp_path, size, least, most or size))
        return jobs[-1]

    yield begin
    for one in jobs:
        for pod in one.pods:
            pod.kill()


def after(pods, start, number):
    """Seconds from `start` until each of these workers had a view of a higher number."""
    return [
        min(line["at"] - start for line in pod.views() if line["view"]["number"] > number)
        for pod in pods
    ]


def test_a_killed_worker_is_out_of_the_view_at_once_and_rejoins(job):
    """The killed worker's launcher knows the cause, long before a silence would count; the new
    worker is admitted as the last."""
    one = job(4)
    number, _ = one.agree(one.pods)
    start = time.monotonic()
    os.kill(one.pods[1].worker, signal.SIGKILL)
    others = [one.pods[n] for n in (0, 2, 3)]
    one.agree(others)
    gone = others[0].views()[-1]["view"]["gone"]
    assert [g["pod"] for g in gone] == [one.pods[1].address]
    assert gone[0]["how"] in ("its process died of SIGKILL", "its process ended"), "unknown cause"
    assert max(after(others, start, number)) < SILENT_S / 2
    _, pods = one.agree(one.pods)
    assert pods[-1] == one.pods[1].address


def test_a_killed_pod_is_out_of_the_view_at_once_and_its_successor_joins(job):
    """The others agree on a view without the pod, long before its silence would count, even if it
    was the leader of the views."""
    one = job(3)
    number, pods = one.agree(one.pods)
    assert pods == [pod.address for pod in one.pods]
    start = time.monotonic()
    one.pods[0].kill()
    one.agree(one.pods[1:])
    assert max(after(one.pods[1:], start, number)) < SILENT_S / 2
    assert any("ended" in line for line in one.pods[1].log()), "its posts are never forgotten"
    one.add(0)
    _, pods = one.agree(one.pods)
    assert pods[-1] == one.pods[0].address
    assert any(one.pods[1].address in str(line.get("posts")) for line in one.pods[0].log())


def test_a_stopped_worker_is_out_by_its_launchers_report_and_rejoins(job):
    """A stopped worker is out after three seconds, without a quorum: here one of two."""
    one = job(2)
    one.agree(one.pods)
    stopped = one.pods[1].worker
    os.kill(stopped, signal.SIGSTOP)
    one.agree(one.pods[:1], 6)
    assert one.pods[0].views()[-1]["view"]["gone"][0]["how"] == "its process is stopped"
    os.kill(stopped, signal.SIGCONT)
    one.agree(one.pods)
    assert one.pods[1].worker == stopped


def test_an_admitted_worker_that_does_not_join_is_dropped(job):
    """Its launcher reports it after four seconds, because the others would wait for ever."""
    one = job(2)
    one.agree(one.pods)
    (one.pods[1].folder / "log.late").touch()
    os.kill(one.pods[1].worker, signal.SIGKILL)
    # views of two, one, two, one: it may rejoin at once
    view = until(lambda: one.pods[0].views()[3:], 20)[0]["view"]
    assert len(view["members"]) == 1 and "did not join" in view["gone"][-1]["how"]
    (one.pods[1].folder / "log.late").unlink()
    one.agree(one.pods)


def test_a_silent_pod_is_out_by_a_majority(job):
    """It is out soon after a silence of SILENT_S, before a lease could expire. A stopped launcher
    rejoins when it wakes."""
    one = job(3)
    number, _ = one.agree(one.pods)
    start = time.monotonic()
    os.kill(one.pods[2].process.pid, signal.SIGSTOP)
    one.agree(one.pods[:2])
    assert SILENT_S / 2 < max(after(one.pods[:2], start, number)) < 2.5 * SILENT_S
    os.kill(one.pods[2].process.pid, signal.SIGCONT)
    one.agree(one.pods)


def test_of_two_pods_the_holder_of_the_lease_continues(job):
    """A silent pod of two is out once the other pod's worker has the lease, and not before."""
    one = job(2)
    one.agree(one.pods)
    os.kill(one.pods[0].process.pid, signal.SIGSTOP)
    asked = until(lambda: [line for line in one.pods[1].log() if "lease" in line], 8)
    assert asked[0]["lease"]["how"] == "tie" and one.pods[1].view[0] == 1
    (one.pods[1].folder / "log.lease").touch()
    one.agree(one.pods[1:], 4)
    assert one.pods[1].views()[-1]["view"]["by"] == "lease"
    os.kill(one.pods[0].process.pid, signal.SIGCONT)
    one.agree(one.pods)


def test_a_pod_that_wakes_does_not_count_the_others_as_dead(job):
    """The woken pod reads the frames that have come before it sees the ends of connections."""
    one = job(4)
    one.agree(one.pods)
    asleep, others = one.pods[:2], one.pods[2:]
    for pod in asleep:
        os.kill(pod.process.pid, signal.SIGSTOP)
    for pod in others:
        os.kill(pod.process.pid, signal.SIGUSR2)  # more than the kernel keeps for a stopped reader
        (pod.folder / "log.lease").touch()
    one.agree(others, 12)
    time.sleep(1)
    for pod in asleep:
        os.kill(pod.process.pid, signal.SIGCONT)
    one.agree(one.pods)
    assert not [line for pod in others for line in pod.log() if "out" in line]


def test_a_stranger_can_neither_join_nor_disturb(job):
    """A launcher with another key stays alone; a flood of connections and bytes delays no
    view for as long as a silence."""
    one = job(2, 1, 3)
    other = one.add(2, key="x" * 32)
    one.agree(one.pods[:2])
    over = threading.Event()
    links = []

    def flood():
        address = one.seeds[0].rpartition(":")[0]
        while not over.is_set():
            for _ in range(10):
                link = socket.create_connection((address, one.port))
                link.sendall(struct.pack(">I", 1 << 31) + os.urandom(500))
                links.append(link)
            for old in links[:-300]:
                old.close()
            del links[:-300]
            time.sleep(0.02)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(1)
        number, _ = one.agree(one.pods[:2])
        start = time.monotonic()
        os.kill(one.pods[1].worker, signal.SIGKILL)
        one.agree(one.pods[:1])
        assert max(after(one.pods[:1], start, number)) < SILENT_S / 2
        one.agree(one.pods[:2])
        one.pods[1].kill()
        one.agree(one.pods[:1])
        one.add(1)
        one.pods.append(other)
        one.agree(one.pods[:2])
        assert other.address not in str(one.pods[0].log())
    finally:
        over.set()
        thread.join()
        for link in links:
            link.close()
    assert other.view[1] in ([], [other.address])


def test_a_living_pod_that_counts_as_dead_rejoins_as_another(job):
    """A forged end counts as a proof: the pod must not stay out for ever."""
    one = job(2)
    number, _ = one.agree(one.pods)
    workers = [pod.worker for pod in one.pods]
    os.kill(one.pods[0].process.pid, signal.SIGUSR1)
    until(lambda: one.pods[0].view[0] > number + 1)
    one.agree(one.pods)
    assert workers == [pod.worker for pod in one.pods]


@pytest.mark.parametrize("how", [0, 1], ids=["its connection ends", "its death is proven"])
def test_only_the_posts_of_ended_workers_are_forgotten(how):
    """A pod that is frozen for minutes sends its posts not again: without them the others would
    wait for it for ever."""
    mesh, pushed = Mesh.__new__(Mesh), list[Json]()
    mesh.views, frozen = Views("a", "a:1", 1, 2), Views("b", "b:1", 1, 2)
    heard = ["b"]  # the connection from it is open
    mesh._links = SimpleNamespace(agent="a", send=lambda frame: None, hears=heard.__contains__)
    mesh._links.dial = lambda address: None
    mesh._row, mesh._told, mesh._worker, mesh._posts = b"", {}, None, {}
    mesh._push = pushed.append
    frozen.attach({"id": "w", "pod": "b", "status": "warm"}, "")
    mesh.views.hear(frozen.row)
    mesh._post("b", "w", {"handle": "1"})
    mesh.views.tick(1000.0)
    mesh._update()
    assert "b" not in mesh.views.rows and "b" in mesh._posts
    pushed.clear()
    mesh._address, mesh._soon = "a:1", lambda: None
    mesh._take("b", {"row": frozen.row, "peers": []})  # a worker that is new here needs its posts
    assert pushed == [{"posts": {"w": {"handle": "1"}}}]
    mesh.views.tick(1000.0)
    ends = [heard.clear, lambda: mesh.views.died("b", "its pod has ended")]
    ends[how]()
    mesh._update()
    assert pushed[-1] == {"ended": "w"} and not mesh._posts
