"""The state outlives its pods: who waits, holds it alone or is told to stop has committed it."""

import math
import os
import random
import signal
import time

import pytest
from support.faulty_jobs import Fault, long

from gptddp.run.history import read_ledger

SOON_S = 6.0  # several times what a commit of the model takes here
LONE_S = 3.0  # of steps are lost at most where the last of several pods is


@pytest.fixture(scope="module")
def job(jobs):
    """Four pods of which three may go on; only what a fault makes them commit is saved."""
    it = jobs(fewest=3)
    it.steady()
    return it


def newest(job) -> int:
    """The step of the newest checkpoint."""
    return max((it["step"] for it in job.saved()), default=0)


@pytest.mark.fault(10)
def test_a_pod_that_is_told_to_stop(job, strike):
    """It ends with 143; the others go on, in the same processes, and save at once. Rank 0 too."""
    for rank in (2, 0):
        told = f"SIGTERM to {'a pod' if rank else 'rank 0'}", "finish"
        before, i = newest(job), job.by_rank(rank)
        with strike(job, *told, i, stays=True):
            job.stop(i)
        job.until(lambda before=before: newest(job) > before, SOON_S, "a save")
        job.until(lambda i=i: job.pods[i].process is None, what="its end")
        assert job.pods[i].exit_code == 128 + signal.SIGTERM
        job.bring_back(i)
        job.steady()


@pytest.mark.fault(10)
def test_one_that_is_told_to_stop_beside_a_silent_one(jobs):
    """Of two: it has its state saved before it leaves, though the lease is to expire first."""
    two = jobs(size=2)
    two.steady()
    silent = two.by_rank(0)
    os.killpg(two.pid(silent), signal.SIGSTOP)
    two.wait(2)
    two.stop(1 - silent)
    two.until(lambda: two.pods[1 - silent].process is None, what="its end")
    assert two.pods[1 - silent].exit_code == 128 + signal.SIGTERM
    assert newest(two) == two.last() > 0
    two.kill(silent, back_s=math.inf)


@pytest.mark.fault(2)
def test_below_the_fewest_they_wait_and_have_saved(job):
    """Two of four are too few: no step is done, all steps are saved; then the same two go on."""
    job.steady()
    kept = job.worker(1), job.worker(3)
    job.hold(0, 2)
    job.kill(0, 2, back_s=math.inf)
    job.until(lambda: newest(job) == job.last(), 2 * SOON_S, "a save of the last step")
    last = job.last()
    job.wait(3)
    assert job.last() == last and (job.worker(1), job.worker(3)) == kept
    with job.fault() as fault:
        job.bring_back(0, 2)
    assert (fault.redone, fault.lives) == (0, 0)
    assert (job.worker(1), job.worker(3)) == kept


@pytest.mark.fault(12)
def test_those_that_wait_may_be_told_to_stop(job):
    """Too few, and then SIGTERM to them all: nothing is done again when the job is started anew."""
    job.steady()
    job.hold(0, 1)
    job.kill(0, 1, back_s=math.inf)
    job.until(lambda: newest(job) == job.last(), 2 * SOON_S, "a save of the last step")
    job.stop(2, 3)
    job.until(lambda: not any(pod.process for pod in job.pods), what="the end of all pods")
    with job.fault() as fault:
        job.bring_back(0, 1, 2, 3)
    assert (fault.redone, fault.lives) == (0, 1)


@pytest.mark.fault(6)
@long
def test_all_pods_at_once_leave_the_newest_checkpoint(job, measured):
    """What was done since then is done again, with the same bits."""
    job.steady()
    done = newest(job)
    with job.fault() as fault:
        job.kill(0, 1, 2, 3)
    measured("all pods killed at once", fault, "resume")
    start = [event for event in read_ledger(job.run) if event["event"] == "start"][-1]
    assert start["source"].startswith("step-") and start["step"] == done


def test_the_run_is_the_undisturbed_one(job, ends_undisturbed):
    """After all of the above."""
    ends_undisturbed(job)


# -- saves that are hit ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saving(jobs):
    """Four pods, a checkpoint every second."""
    it = jobs("--steps", "500", "--checkpoint-every", "1")
    it.until(lambda: len(it.saved()) > 1)
    return it


@pytest.mark.fault(4)
def test_a_save_outlives_its_worker(saving, strike):
    """Rank 0 is killed in the middle of it: its pod's saver commits it."""
    saving.steady()
    which, what = saving.by_rank(0), "rank 0's worker killed during a commit"
    with strike(saving, what, "its saver commits; retry", which):
        saving.until(saving.order(which, "save").exists)
        saving.began = time.time()
    assert "is saved, after the end of its rank 0" in saving.pods[which].log.read_text()


@pytest.mark.fault(4)
def test_all_pods_killed_in_a_commit_leave_the_checkpoint_before(saving, measured):
    """Never neither: the save that was cut off does not count."""
    saving.steady()
    with saving.fault() as fault:
        saving.until(saving.order(saving.by_rank(0), "commit").exists)
        saving.began = time.time()
        saving.kill(0, 1, 2, 3)
    measured("all pods killed during a commit", fault, "resume, one checkpoint earlier")
    assert fault.lives == 1


@pytest.mark.fault(36)
def test_the_end_may_be_killed_twice(saving, measured, ends_undisturbed):
    """Rank 0: before the last checkpoint, and its heir again before the run is called finished.

    Success is told once, and the parameters are those of an undisturbed job to the bit.
    """
    saving.steady()
    saving.pause(0)
    saving.kill_at("end")
    began = time.time()
    saving.kill_at("finish")
    ends_undisturbed(saving)
    fault = Fault(time.time() - began)
    what = "rank 0's pod killed before and after the last commit"
    measured(what, fault, "finishes once; seconds to the end")


# -- the last of several ---------------------------------------------------------------------------

PODS = 3


@pytest.fixture(scope="module")
def three(jobs):
    """Three pods of which one may go on."""
    it = jobs(size=PODS)
    it.steady()
    return it


@pytest.mark.fault(8)
@pytest.mark.parametrize("tries", [1, pytest.param(6, marks=long)])
@pytest.mark.parametrize("apart_s", [2, pytest.param(10, marks=long)])
def test_the_last_of_several_pods_saves_what_it_holds(three, measured, apart_s, tries):
    """All three are lost, one after the other, nobody comes back in between: three seconds of
    steps are done again at most."""
    for _ in range(tries):
        three.steady()
        step_s, order = three.step_s(), random.sample(range(PODS), PODS)
        three.hold(*order)
        for i in order:
            three.kill(i, back_s=math.inf)
            three.wait(apart_s if i != order[-1] else 0.5)
        with three.fault() as fault:
            three.bring_back(*order)
        what = f"all three pods killed {apart_s} s apart"
        measured(what, fault, "resume; seconds from the pods' return")
        print(f"{apart_s} s apart: {fault.redone} steps of {step_s:.2f} s done again")
        assert fault.redone * step_s <= 2 * LONE_S


def test_the_run_of_the_three_is_the_undisturbed_one(three, ends_undisturbed):
    """After all of the above."""
    ends_undisturbed(three)
