"""Saves that take longer than a life: they are committed all the same (see checkpoint/late.py)."""

import itertools
import os
import random
import signal
import statistics

import pytest
from support.faulty_jobs import SHORT, Fault, check_same_run
from support.trainer_patches import patched

from gptddp.checkpoint import store
from gptddp.run.history import read_ledger

SAVE_S, LIFE_S = 8.0, 5.0
KILLS = 9
STEPS = ("--steps", "600", "--eval-every", "5000", "--checkpoint-every", "2")
SLOW = f"""
from gptddp.checkpoint import store
_commit = store.commit
def commit(run_dir, manifest, shards, before_rename=lambda: None, *more):
    def slowly():
        if not Path({{quick!r}}).exists():
            time.sleep({SAVE_S})
        before_rename()
    return _commit(run_dir, manifest, shards, slowly, *more)
store.commit = commit
"""


def worker(job):
    os.kill(job.worker(random.randrange(4)), signal.SIGKILL)


def worker_of_rank_0(job):
    os.kill(job.worker(0), signal.SIGKILL)


def host(job):
    job.kill(0)


def pod(job):
    job.kill(random.randrange(4))


HARM = [
    pytest.param(host, "worker-0's pod", id="host"),
    pytest.param(worker_of_rank_0, "rank 0's worker", id="rank-0"),
    pytest.param(worker, "a random worker", id="worker"),
    pytest.param(pod, "a random pod", id="pod"),
]


@pytest.mark.fault(9)
@pytest.mark.skipif(SHORT, reason="takes minutes")
@pytest.mark.parametrize(("harm", "whom"), HARM)
def test_lives_that_are_shorter_than_a_save(jobs, undisturbed, measured, tmp_path, harm, whom):
    """Then all pods are killed: no more is done again than the steps of two saves."""
    random.seed(8)
    quick = tmp_path / "quick"
    job = jobs(*STEPS, **patched(tmp_path / "patch", SLOW.format(quick=str(quick))))
    job.steady()
    for _ in range(KILLS):
        job.until(lambda: all(pod.process for pod in job.pods))
        life = job.lines()[-1][0]
        harm(job)
        job.wait(LIFE_S)
        # a machine that is busy takes longer to begin the next one
        job.until(lambda life=life: job.lines()[-1][0] > life, what="a step of the next life")
    starts = [event for event in read_ledger(job.run) if event["event"] == "start"]
    assert {start["source"] for start in starts[1:]} == {"memory"}
    times = [line["time"] for _, line in job.lines()]
    with job.fault() as fault:
        job.kill(0, 1, 2, 3)
    worth = 2 * SAVE_S / statistics.median(b - a for a, b in itertools.pairwise(times))
    measured(
        f"{whom} killed every {LIFE_S:.0f} s, saves of {SAVE_S:.0f} s, then all pods",
        Fault(fault.seconds, fault.redone, len(starts), fault.source, fault.recovered),
        f"two saves are worth {worth:.0f} steps",
    )
    assert 0 < fault.redone <= worth and fault.source.startswith("step-")
    quick.touch()
    job.finish()
    check_same_run(job, undisturbed(1, *STEPS))
    saved = [e for e in read_ledger(job.run) if e["event"] == "checkpoint" and "name" in e]
    assert len({event["name"] for event in saved}) == len(saved)
    assert os.listdir(job.run / store.CHECKPOINTS / store.TMP) == []
