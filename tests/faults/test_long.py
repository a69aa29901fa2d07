"""What takes minutes: a kill every ten seconds, a hundred lives, pods that fall silent."""

import os
import random
import signal
import statistics
import time
from pathlib import Path

import pytest
from support.faulty_jobs import SHORT, Fault, check_same_run, long

from gptddp.run.history import read_ledger

STEPS = ("--steps", "400" if SHORT else "3000", "--eval-every", "5000", "--checkpoint-every", "30")


@pytest.fixture(scope="module")
def job(jobs):
    """Steps of 0.25 s, so that ten minutes of them are not too many to repeat."""
    it = jobs(*STEPS, pause_s=0.25)
    it.steady()
    return it


@pytest.mark.fault(7)
def test_a_kill_every_ten_seconds_leaves_most_of_the_time(job, measured):
    """A random pod or worker each time: steps go on, and none is done again."""
    job.steady()
    random.seed(7)
    first, began = job.lines()[-1][1]["step"], time.time()
    lives = len(read_ledger(job.run))
    kills = 4 if SHORT else 60
    for _ in range(kills):
        job.until(lambda: all(pod.process for pod in job.pods))
        if (which := random.randrange(8)) < 4:
            job.kill(which)
        else:
            os.kill(job.worker(which - 4), signal.SIGKILL)
        job.wait(10)
    job.steady()
    lines = [line for _, line in job.lines() if line["step"] > first]
    gaps = [b["time"] - a["time"] for a, b in zip(lines, lines[1:], strict=False)]
    elapsed_s = lines[-1]["time"] - began
    share = len(lines) * statistics.median(gaps) / elapsed_s
    starts = [e for e in read_ledger(job.run)[lives:] if e["event"] == "start"]
    slow = sorted(gap for gap in gaps if gap > 1)
    fault = Fault(statistics.median(slow), sum(e["redo"] for e in starts), len(starts), "memory")
    happens = f"median of {len(starts)} lives; {share:.0%} of the time goes to kept steps"
    measured(f"a random pod or worker killed every 10 s for {kills * 10} s", fault, happens)
    assert fault.redone == 0 and share > 0.1


@pytest.mark.fault(13)
@long
@pytest.mark.parametrize("whole_pod", [False, True], ids=["worker", "pod"])
def test_a_rank_that_stays_silent_is_done_without(job, strike, whole_pod):
    """The others' collective times out, and they go on; a zombie that wakes up changes nothing."""
    what, out = "a whole pod" if whole_pod else "a worker", "its peers' collective times out (60 s)"
    with strike(job, f"{what} stopped for good (SIGSTOP)", out, 3 if whole_pod else 4):
        pid = job.worker(2)
        os.killpg(job.pid(2), signal.SIGSTOP) if whole_pod else os.kill(pid, signal.SIGSTOP)
    if whole_pod:
        anew = "its rank is fenced and joins anew"
        with strike(job, "a whole pod wakes up after a minute", anew, before=3):
            os.killpg(job.pid(2), signal.SIGCONT)


@pytest.mark.fault(38)
def test_a_hundred_lives_leave_nothing_behind(job, strike):
    """No descriptor, thread, shared memory or unfinished file more than after the first few; hardly
    more memory."""
    cycles = 10 if SHORT else 100
    job.steady()
    job.pause(0.05)

    def left() -> list[int]:
        proc = [Path(f"/proc/{job.pid(i)}") for i in range(4)]
        counts = [len(os.listdir(p / kind)) for p in proc for kind in ("fd", "task")]
        return [
            *counts,
            len(list(job.folder.rglob("*.tmp*"))),
            len(list(job.orders.parent.rglob("scratch/*"))),
        ]

    def resident_mb() -> list[int]:
        texts = (Path(f"/proc/{job.pid(i)}/status").read_text() for i in range(4))
        return [int(text.split("VmRSS:")[1].split()[0]) // 1024 for text in texts]

    for cycle in range(cycles):
        if cycle == 2:
            before, before_mb = left(), resident_mb()
        with strike(job, f"{cycles} workers killed, one after the other", "nothing piles up"):
            os.kill(job.worker(cycle % 4), signal.SIGKILL)
    job.steady()
    assert all(now <= then + 2 for now, then in zip(left(), before, strict=True)), (before, left())
    now_mb = resident_mb()
    assert all(b <= a + 50 for a, b in zip(before_mb, now_mb, strict=True)), (before_mb, now_mb)


def test_the_run_is_the_undisturbed_one(job, undisturbed):
    """After all of the above."""
    job.finish()
    check_same_run(job, undisturbed(1, *STEPS))
