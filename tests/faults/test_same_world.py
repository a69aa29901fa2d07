"""A job that is never smaller than four ranks: whatever happens, the same bits in the end."""

import os
import signal
import time

import pytest
from support.faulty_jobs import SHORT, Fault, check_same_run

STEPS = ("--steps", "450" if SHORT else "600", "--eval-every", "5000", "--checkpoint-every", "3")


@pytest.fixture(scope="module")
def job(jobs):
    """Four pods or none; a checkpoint every three seconds."""
    it = jobs(*STEPS, fewest=4)
    it.steady()
    return it


@pytest.mark.fault(6)
def test_all_pods_at_once_cost_the_steps_since_the_last_checkpoint(job, measured):
    """The newest checkpoint goes on: no more is lost than was done within its interval."""
    job.until(lambda: any((job.run / "checkpoints").glob("step-*")))
    job.steady()
    with job.fault() as fault:
        job.kill(0, 1, 2, 3)
    measured("all pods killed at once", fault, "the newest checkpoint goes on")
    assert fault.source.startswith("step-") and fault.redone < 3 / 0.1 * 2


@pytest.mark.fault(4)
def test_rank_0_killed_in_a_commit_costs_the_step_in_flight(job, strike):
    """The others have the state; what was not renamed is no checkpoint."""
    what = "rank 0's pod killed in the middle of a commit"
    with strike(job, what, "memory, not disk, goes on") as fault:
        job.until(job.order(0, "commit").exists)
        job.began = time.time()
    assert fault.source == "memory"


@pytest.mark.fault(4)
def test_all_pods_killed_in_a_commit_leave_the_checkpoint_before(job, measured):
    """Never neither: the save that was cut off does not count."""
    job.steady()
    with job.fault() as fault:
        job.until(job.order(0, "commit").exists)
        job.began = time.time()
        job.kill(1, 2, 3)
    measured("all pods killed in the middle of a commit", fault, "the checkpoint before goes on")
    assert fault.source.startswith("step-")


@pytest.mark.fault(13)
def test_a_pause_of_three_seconds_is_none_of_our_business(job, strike):
    """No life ends: the peers wait."""
    what = "a worker stopped for 3 s (SIGSTOP)"
    with strike(job, what, "the others wait for it", new_life=False) as fault:
        os.kill(job.worker(2), signal.SIGSTOP)
        job.wait(3)
        os.kill(job.worker(2), signal.SIGCONT)
    assert fault.lives == 0 and fault.seconds > 2.5


@pytest.mark.fault(36)
def test_the_end_may_be_killed_twice_and_the_run_is_the_undisturbed_one(job, measured, undisturbed):
    """After the last step and before its checkpoint, and again before the run is called finished.

    Success is told once, and the parameters are those of an undisturbed job to the bit.
    """
    before, after = job.order(0, "end"), job.order(0, "finish")
    job.pause(0)
    job.until(before.exists)
    began = time.time()
    job.finish()
    fault = Fault(time.time() - began, 0, 2, "memory")
    measured("rank 0's pod killed before the last commit, and again after it", fault, "done once")
    assert after.exists()
    check_same_run(job, undisturbed(4, *STEPS))
