"""The state outlives its pods: a pod that waits, stops or is the last one commits it."""

import math
import os
import random
import signal
import time

import pytest
from support.faulty_jobs import Fault, long

from gptddp.run.history import read_ledger

SOON_S = 6.0  # several times what a commit of the model takes here
LONE_S = 3.0  # of steps may be lost with the last pod


@pytest.fixture(scope="module")
def job(jobs):
    """Four pods, of which three are enough to train; they save only because of a fault."""
    it = jobs(fewest=3)
    it.steady()
    return it


def newest(job) -> int:
    """The step of the newest checkpoint."""
    return max((it["step"] for it in job.saved()), default=0)


@pytest.mark.fault(10)
def test_after_sigterm_a_pod_leaves_and_the_others_save(job, strike):
    """It exits with 143; the others keep their processes and save at once. Rank 0 does so too."""
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
def test_after_sigterm_a_pod_beside_a_silent_pod_saves(jobs):
    """It saves its state before it leaves, although the lease has to expire first."""
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
def test_too_few_pods_save_and_wait(job):
    """Two of four pods save all steps and do no more; then the same two processes continue."""
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
def test_pods_that_wait_may_be_stopped(job):
    """Too few pods wait, and get SIGTERM: the next start of the job does no step again."""
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
def test_the_job_resumes_after_the_loss_of_all_pods(job, measured):
    """All pods are killed at once: the steps after the newest checkpoint are done again."""
    job.steady()
    done = newest(job)
    with job.fault() as fault:
        job.kill(0, 1, 2, 3)
    measured("all pods killed at once", fault, "resume")
    start = [event for event in read_ledger(job.run) if event["event"] == "start"][-1]
    assert start["source"].startswith("step-") and start["step"] == done


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)


# -- kills during a save ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saving(jobs):
    """Four pods, a checkpoint every second."""
    it = jobs("--steps", "300", "--checkpoint-every", "1")
    it.until(lambda: len(it.saved()) > 1)
    return it


@pytest.mark.fault(4)
def test_a_save_outlives_its_worker(saving, strike):
    """Rank 0 is killed during a save: the saver of its pod commits it."""
    saving.steady()
    which, what = saving.by_rank(0), "rank 0's worker killed during a commit"
    with strike(saving, what, "the checkpoint is committed; retry", which):
        saving.until(saving.order(which, "save").exists)
        saving.began = time.time()
    assert "is saved, after the end of its rank 0" in saving.pods[which].log.read_text()


@pytest.mark.fault(4)
def test_after_a_kill_during_a_commit_the_previous_checkpoint_counts(saving, measured):
    """All pods are killed during a commit: there is always a valid checkpoint."""
    saving.steady()
    with saving.fault() as fault:
        saving.until(saving.order(saving.by_rank(0), "commit").exists)
        saving.began = time.time()
        saving.kill(0, 1, 2, 3)
    measured("all pods killed during a commit", fault, "resume, one checkpoint earlier")
    assert fault.lives == 1


@pytest.mark.fault(36)
def test_rank_0_is_killed_twice_at_the_end_of_the_run(saving, measured, ends_undisturbed):
    """Rank 0 is killed before the last checkpoint, and the next one before the run is finished.

    The job succeeds once, and the parameters have the bits of an undisturbed run.
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


# -- all pods are lost, one after another ----------------------------------------------------------

PODS = 3


@pytest.fixture(scope="module")
def three(jobs):
    """Three pods, of which one is enough to train."""
    it = jobs(size=PODS)
    it.steady()
    return it


@pytest.mark.fault(8)
@pytest.mark.parametrize("tries", [1, pytest.param(6, marks=long)])
@pytest.mark.parametrize("apart_s", [2, pytest.param(10, marks=long)])
def test_the_last_pod_saves_its_state(three, measured, apart_s, tries):
    """All three pods are killed, one after another, and none comes back in between: at most three
    seconds of steps are done again."""
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


def test_the_run_of_three_pods_equals_an_undisturbed_run(three, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(three)
