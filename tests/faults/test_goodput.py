"""Faults for minutes: random kills beside undisturbed minutes, and a hundred re-forms."""

import os
import random
from pathlib import Path

import pytest
from support.faulty_jobs import SHORT, long

from gptddp.training.worlds import ALONE_S

TURN_S = 60


@pytest.fixture(scope="module")
def job(jobs):
    """Four pods, steps of about 0.2 s."""
    it = jobs("--checkpoint-every", "30", pause_s=0.2)
    it.steady()
    return it


def kill_one(job):
    """Kill a random running pod, or its worker; do not wait for it."""
    there = [i for i, pod in enumerate(job.pods) if pod.process]
    if there:
        random.choice([job.kill, job.shoot])(random.choice(there))


def steps_a_second(job, every_s: float | None) -> float:
    """Steps per second in a turn, with a kill every `every_s` seconds; None: undisturbed."""
    first, kills = job.last(), 1 if every_s is None else int(TURN_S / every_s)
    for _ in range(kills):
        if every_s:
            kill_one(job)
        job.wait(TURN_S / kills)
    return (job.last() - first) / TURN_S


@pytest.mark.fault(7)
@long
@pytest.mark.parametrize("every_s", [10, 5, 3])
def test_repeated_kills_cost_few_steps(job, measured, every_s):
    """With kills, more than half as many steps are done as without. No finished one is lost unless
    all pods die before one is back: then those of a few seconds."""
    random.seed(every_s)
    turns, killed, calm = 3, 0.0, 0.0
    with job.fault() as fault:
        for _ in range(turns):
            job.steady()
            calm += steps_a_second(job, None)
            killed += steps_a_second(job, every_s)
    share = killed / calm
    fault.seconds = every_s * (1 - share)  # the cost of a kill
    print(f"a kill every {every_s} s: {share:.1%}")
    what = f"random kills every {every_s} s"
    measured(what, fault, f"{share:.0%} of undisturbed speed")
    most_s = 2 * ALONE_S * fault.lives if every_s == 3 else 0  # kills faster than pods start
    assert fault.redone * job.step_s() <= most_s and share > 0.5


@pytest.mark.fault(38)
def test_a_hundred_re_forms_leak_nothing(job, strike):
    """Survivors and launchers have no more file descriptors, threads or shared memory than after
    the first few re-forms, and hardly more memory."""
    cycles = 5 if SHORT else 50  # of two re-forms each
    job.steady()
    job.pause(0.05)

    def processes():
        return [job.worker(0), job.pid(0), job.pid(1)]

    def left() -> list[int]:
        counts = [
            len(os.listdir(f"/proc/{pid}/{kind}")) for pid in processes() for kind in ("fd", "task")
        ]
        return [*counts, len(os.listdir("/dev/shm"))]

    def resident_mb() -> list[int]:
        texts = (Path(f"/proc/{pid}/status").read_text() for pid in processes())
        return [int(text.split("VmRSS:")[1].split()[0]) // 1024 for text in texts]

    for cycle in range(cycles):
        if cycle == 2:
            before, before_mb, pids = left(), resident_mb(), processes()
        which = 1 + cycle % 3
        what = f"{2 * cycles} re-forms in one process", "no leak"
        with strike(job, *what, which):
            job.shoot(which)
    job.steady()
    assert processes() == pids
    print(f"{before} -> {left()}, MB {before_mb} -> {resident_mb()}")
    # rank 0 has more of both, and this process may have become rank 0
    assert all(now <= then + 8 for now, then in zip(left(), before, strict=True)), (before, left())
    assert all(b <= a + 60 for a, b in zip(before_mb, resident_mb(), strict=True))


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)


def test_killed_processes_leave_no_semaphores():
    """The host's shared memory has no semaphores of killed processes."""
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("sem.mp-")]
