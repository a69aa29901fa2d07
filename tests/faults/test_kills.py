"""Killed pods and processes, many in turn in one job: it is the run of a job that nobody kills."""

import math
import os
import signal
import time

import pytest
from support.faulty_jobs import SHORT, check_same_run, long
from support.owned import owned
from support.waiting import until

from gptddp.launch.launcher import FIRST_REPORT_S

STEPS = ("--steps", "600" if SHORT else "1500", "--eval-every", "5000")
MEMORY = "the others leave their state in memory; all go on from the step in flight"


@pytest.fixture(scope="module")
def job(jobs):
    """One job for all the kills in this file."""
    it = jobs(*STEPS, "--checkpoint-every", "3600")
    it.steady()
    return it


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def two(job):
    job.kill(1)
    time.sleep(0.05)
    job.kill(3)


def two_with_the_host(job):
    job.kill(2)
    time.sleep(0.05)
    job.kill(0)


def again_in_re_form(job):
    job.kill(2)
    job.wait(1.0)
    job.kill(1)


def at_the_join(job):
    done = job.order(2, "begin")
    job.kill(2)
    job.until(done.exists)


KILLS = [
    (1, lambda job: kill(job.worker(3)), "one worker process killed", MEMORY),
    (1, lambda job: kill(job.worker(0)), "the worker process of rank 0 killed", MEMORY),
    (3, lambda job: job.kill(2), "a pod killed, replaced at once", MEMORY),
    (4, lambda job: job.kill(0),
     "the pod of rank 0, which hosts the rendezvous, killed, replaced at once", MEMORY),
    (35, lambda job: kill(job.pid(3)), "only the launcher of a pod killed",
     "the kernel ends its worker; " + MEMORY),
    (8, two, "two pods killed 50 ms apart", MEMORY),
    (8, two_with_the_host, "a pod and 50 ms later that of rank 0 killed", MEMORY),
    (8, again_in_re_form, "another pod killed while the world forms again", MEMORY),
    (8, at_the_join, "the replacement killed as it joins", MEMORY),
]  # fmt: skip


@pytest.mark.parametrize(
    ("harm", "what", "happens"),
    [pytest.param(*row[1:], marks=pytest.mark.fault(row[0]), id=row[2]) for row in KILLS],
)
def test_a_kill_costs_the_step_in_flight(job, strike, harm, what, happens):
    """The whole world goes on from memory."""
    with strike(job, what, happens) as fault:
        harm(job)
    assert fault.source == "memory"


@pytest.mark.fault(35)
def test_a_worker_is_gone_as_soon_as_its_launcher(job):
    """Nothing trains on unsupervised."""
    job.steady()
    pid, launcher = job.worker(1), job.pid(1)
    kill(launcher)
    until(lambda: not os.path.exists(f"/proc/{pid}/exe"), "its end", 1)
    job.steady()


LATER = [
    pytest.param(2, 5, marks=[pytest.mark.fault(3), long], id="pod-5"),
    pytest.param(2, 60, marks=[pytest.mark.fault(3), long], id="pod-60"),
    pytest.param(0, 10, marks=pytest.mark.fault(5), id="host-10"),
    pytest.param(0, 60, marks=[pytest.mark.fault(34), long], id="host-60"),
]


@pytest.mark.parametrize(("which", "back_s"), LATER)
def test_a_replacement_may_come_later(job, strike, which, back_s):
    """Without a pod the others go on, without the rendezvous they wait; all go on when it is back.

    Each change of the world is one new life.
    """
    name = "the host of the rendezvous" if which == 0 else "a pod"
    killed = time.monotonic()
    if which:
        gone = "a pod killed, no replacement", "the others go on without it"
        with strike(job, *gone, 3, number=2) as fault:
            job.kill(which, back_s=math.inf)
        assert fault.lives == 1
    back = f"{name} is back after {back_s} s", "all go on with it; counted from its return"
    with strike(job, *back, before=None if which == 0 else 3) as fault:
        if which == 0:
            killed = time.monotonic()
            job.kill(0, back_s=math.inf)
        job.wait(max(0, killed + back_s - time.monotonic()))
        job.began = time.time()
        if which == 0 and back_s > FIRST_REPORT_S:
            said = [pod.log.read_text() for pod in job.pods[1:]]
            assert all("waiting for the rendezvous at" in log for log in said)
        job.bring_back(which)
    assert fault.lives == 1


def test_a_drain_of_the_host_is_no_stop_of_the_run(job):
    """The others are still there: until it is back, the world is forming again."""
    job.steady()
    before = owned(job.run)
    job.stop(0)
    job.bring_back(0)
    job.steady()
    after = owned(job.run)
    assert after["stopped"] == 0 and after["reforming"] > before["reforming"] + 1


def test_the_run_is_the_undisturbed_one(job, undisturbed):
    """After all of the above."""
    job.finish()
    check_same_run(job, undisturbed(1, *STEPS))
