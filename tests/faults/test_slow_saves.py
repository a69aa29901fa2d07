"""Saves that take longer than a life: they are committed all the same (see checkpoint/late.py)."""

import bisect
import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from pathlib import Path

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


SAVER = "the pod that saves"
HARM = {
    "worker-0's pod": lambda job: job.kill(0),
    "rank 0's worker": lambda job: os.kill(job.worker(0), signal.SIGKILL),
    "a random worker": lambda job: os.kill(job.worker(random.randrange(4)), signal.SIGKILL),
    "a random pod": lambda job: job.kill(random.randrange(4)),
    SAVER: lambda job: job.kill(next((i for i in range(4) if saves(job, i)), 0)),
}


def saves(job, i):
    """Has a process of this pod, other than its worker, the lock of a late save open?"""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(process.name)
            if os.getpgid(pid) != job.pid(i) or pid == job.worker(i):
                continue
            if any(os.readlink(fd).endswith("/late.lock") for fd in (process / "fd").iterdir()):
                return True
    return False


@pytest.mark.fault(9)
@pytest.mark.skipif(SHORT, reason="takes minutes")
@pytest.mark.parametrize("whom", HARM)
def test_lives_that_are_shorter_than_a_save(jobs, undisturbed, measured, tmp_path, whom):
    """Then all pods are killed. Neither then nor at any moment before would more have been done
    again than the steps of two saves, and of one more for each pod that was lost while it saved."""
    random.seed(8)
    quick = tmp_path / "quick"
    job = jobs(*STEPS, **patched(tmp_path / "patch", SLOW.format(quick=str(quick))))
    job.steady()
    lost = []  # when a pod was that was saving
    for _ in range(KILLS):
        job.until(lambda: all(pod.process for pod in job.pods))
        life = job.lines()[-1][0]
        saving = {job.pods[i].process: i for i in range(4) if saves(job, i)}
        HARM[whom](job)
        job.wait(LIFE_S)
        if any(it is not job.pods[i].process for it, i in saving.items()):
            lost.append(time.time() - LIFE_S)
        # a machine that is busy takes longer to begin the next one
        job.until(lambda life=life: job.lines()[-1][0] > life, what="a step of the next life")
    events = read_ledger(job.run)
    starts = [event for event in events if event["event"] == "start"]
    assert {start["source"] for start in starts[1:]} == {"memory"}
    commits = [e for e in events if e["event"] == "checkpoint" and "name" in e]
    lines = job.lines()
    times = [line["time"] for _, line in lines]
    # Not from the last step of a life to the first of the next: a busy machine does few in each.
    of_a_life = [b["time"] - a["time"] for (x, a), (y, b) in itertools.pairwise(lines) if x == y]
    with job.fault() as fault:
        job.kill(0, 1, 2, 3)
    save = SAVE_S / statistics.median(of_a_life)
    at_risk, bounds, before, step = [], [], 0.0, 0
    for commit in commits:
        at_risk.append(bisect.bisect(times, commit["time"]) - step)
        bounds.append((2 + sum(before < at < commit["time"] for at in lost)) * save)
        before, step = commit["time"], commit["step"]
    at_risk.append(fault.redone)
    bounds.append((2 + sum(before < at for at in lost)) * save)
    print(f"{whom}: at risk {at_risk} of {[round(it) for it in bounds]}, lost {len(lost)}")
    measured(
        f"{whom} killed every {LIFE_S:.0f} s, saves of {SAVE_S:.0f} s, then all pods",
        Fault(fault.seconds, fault.redone, len(starts), fault.source, fault.recovered),
        f"two saves are worth {2 * save:.0f} steps; {len(lost)} pods were lost while they saved",
    )
    assert all(0 < steps <= bound for steps, bound in zip(at_risk, bounds, strict=True))
    if whom == SAVER:  # nobody can finish what went with the pod
        assert len(lost) > KILLS // 2
    else:
        assert fault.source.startswith("step-")
    quick.touch()
    job.finish()
    check_same_run(job, undisturbed(1, *STEPS))
    saved = [e for e in read_ledger(job.run) if e["event"] == "checkpoint" and "name" in e]
    assert len({event["name"] for event in saved}) == len(saved)
    assert os.listdir(job.run / store.CHECKPOINTS / store.TMP) == []
