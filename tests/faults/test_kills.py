"""Killed pods and processes, one by one in one job: no survivor restarts, no step is lost."""

import itertools
import math
import os
import signal
import time

import pytest
from support.faulty_jobs import SHORT, Job, long
from support.processes import alive
from support.waiting import until

RETRY = "retry"


@pytest.fixture(scope="module")
def job(jobs):
    """One job for all the kills in this file."""
    it = jobs()
    it.steady()
    return it


def pods(job, *which):
    """Kill these pods, 50 ms apart."""
    for i in which:
        job.kill(i)
        time.sleep(0.05)


def in_re_form(job, first, second):
    """Kill a pod, and another one while its worker forms the world without the first."""
    done = job.order(second, "form")
    job.kill(first)
    job.until(done.exists, what="the second kill")


def at_the_join(job, which):
    """Kill a pod, and then its successor while it joins."""
    job.kill(which)
    done = job.order(which, "join")
    job.until(done.exists, what="the successor's end")


def launcher(job, which):
    os.kill(job.pid(which), signal.SIGKILL)


KILLS = [
    (1, Job.shoot, "one worker process killed", RETRY, 3),
    (1, Job.shoot, "rank 0's worker process killed", RETRY, 0),
    (3, pods, "a pod killed, replaced at once", RETRY, 2),
    (4, pods, "rank 0's pod killed, replaced at once", RETRY, 0),
    (35, launcher, "only a pod's launcher killed", "the kernel ends its worker; " + RETRY, 3),
    (8, in_re_form, "rank 0's pod killed during the re-form", RETRY, 3, 0),
    (8, at_the_join, "a pod killed, and its joining successor", RETRY, 2),
]
LIKE_OTHERS = [
    (8, pods, "a pod killed, 50 ms later rank 0's pod", RETRY, 2, 0),
    (8, pods, "two pods killed 50 ms apart", RETRY, 1, 3),
    (8, in_re_form, "another pod killed during the re-form", RETRY, 2, 1),
]


@pytest.mark.parametrize(
    ("harm", "what", "happens", "ranks"),
    [
        pytest.param(*row[1:4], row[4:], marks=[pytest.mark.fault(row[0]), *marks], id=row[2])
        for row, marks in [*((it, []) for it in KILLS), *((it, [long]) for it in LIKE_OTHERS)]
    ],
)
def test_a_kill_costs_the_step_in_flight(job, strike, harm, what, happens, ranks):
    """The others continue in the same processes; the ledger names the lost pods; all come back."""
    job.steady()
    known, lost = len(job.worlds()), [job.by_rank(rank) for rank in ranks]
    with strike(job, what, happens, *lost):
        harm(job, *lost)
    lost_pods = {f"gptddp-worker-{i}" for i in lost}
    job.until(lambda: job.lost(known) == lost_pods, 10, f"{lost_pods} in the ledger")


@pytest.mark.fault(35)
@long
def test_a_killed_launcher_ends_its_worker(job):
    """A worker whose launcher is killed ends within three seconds."""
    job.steady()
    pid = job.worker(1)
    os.kill(job.pid(1), signal.SIGKILL)
    until(lambda: not alive(pid), "its end", 3)
    job.steady()


@pytest.mark.fault(3)
@long
@pytest.mark.parametrize("back_s", [5, 60])
@pytest.mark.parametrize("which", [2, 0])
def test_a_successor_may_come_later(job, strike, which, back_s):
    """A pod joins when it is back, also worker-0, by whose name the pods find each other."""
    name = "a pod" if which else "worker-0's pod"
    gone = f"{name} killed, no successor", "retry"
    with strike(job, *gone, which, stays=True, number=2):
        job.kill(which, back_s=math.inf)
    job.wait(back_s)
    back = f"{name} is back after {back_s} s", "joins; seconds from its start"
    with strike(job, *back, before=3, world=4):
        job.bring_back(which)


ORDERS = list(itertools.permutations(range(4), 3))


@pytest.mark.fault(8)
@pytest.mark.parametrize("order", ORDERS[9:10] if SHORT else ORDERS, ids=str)
def test_three_pods_killed_two_seconds_apart(job, strike, order):
    """In every order, the fourth pod continues in the same process, alone until another is back."""
    what = "three of four pods killed 2 s apart", "retry; longest pause, loss or return"
    with strike(job, *what, *order, world=4, longest=True):
        for i in order:
            job.kill(i)
            job.wait(2)


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)
