"""A job that is stopped while its world forms again."""

import pytest
from support.faulty_jobs import check_same_run, long

from gptddp.run.history import read_ledger

STEPS = ("--steps", "150", "--eval-every", "5000", "--checkpoint-every", "3600")


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    "gone", [pytest.param(2, id="pod", marks=long), pytest.param(0, id="host")]
)
def test_a_stop_between_two_worlds_saves_what_is_in_memory(jobs, undisturbed, gone):
    """A pod is gone, the others have left their state: SIGTERM to all commits it, once."""
    job = jobs(*STEPS)
    job.steady()
    job.hold(gone)
    job.kill(gone, back_s=3600)
    job.until(lambda: list(job.folder.rglob("shm/gptddp-*[0-9a-f]")), what="a memory")
    job.stop(*({0, 1, 2, 3} - {gone}))
    job.until(lambda: not any(pod.process for pod in job.pods), what="the end of all pods")
    last = job.lines()[-1][1]["step"]
    assert [path.name for path in (job.run / "checkpoints").glob("step-*")] == [
        f"step-{last:012}.1"
    ]
    job.bring_back(0, 1, 2, 3)
    job.finish()
    starts = [event for event in read_ledger(job.run) if event["event"] == "start"]
    assert starts[-1]["source"] == f"step-{last:012}.1" and starts[-1]["redo"] == 0
    check_same_run(job, undisturbed(1, *STEPS))
