"""Pods that come, go, move and run out of memory."""

import dataclasses
import math
import os
import socket
from pathlib import Path

import pytest
from support.faulty_jobs import SHORT, Fault, Job

CGROUP = Path("/sys/fs/cgroup/memory")  # v1; with v2 the kernel ends the whole container


@pytest.fixture(scope="module")
def cgroup():
    """A memory cgroup of version 1 that pod 1 is started in."""
    path = CGROUP / f"gptddp-{os.getpid()}"
    try:
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup here: {error}")
    yield path
    path.rmdir()


@pytest.fixture(scope="module")
def job(cgroup, jobs):  # the cgroup goes after the jobs
    """A job of four pods, one of which starts; pod 1 is to run in the memory cgroup."""

    def within(i: int) -> list[str]:
        enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh"] if i == 1 else []

    it: Job = jobs(within=within)
    it.hold(1, 2, 3)
    return it


@pytest.mark.fault(33)
def test_a_launcher_whose_port_is_taken_uses_another(job):
    """The first pod listens on another port: the others cannot find it there, but it finds them."""
    with socket.create_server((f"{job.network.prefix}.100", job.network.port)):
        job.steady(1)
        job.bring_back(1)
        job.steady(2)
    job.stop(1)
    job.steady(1)
    assert not any("worker-0 exited" in it for it in job.events)


@pytest.mark.fault(30)
def test_a_job_grows_and_shrinks(job, strike):
    """1 -> 4 -> 2 -> 3 -> 2 -> 4 pods: the workers that stay keep their processes."""
    few = ("+123", 4), ("-23", 2), ("+23", 4)
    for change, world in few if SHORT else (*few[:2], ("+3", 3), ("-3", 2), few[2]):
        which = [int(digit) for digit in change[1:]]
        old = job.lines(job.last())[-1]["world_size"]
        scaled = (
            f"scaled from {old} to {world} pods",
            "finish; longest pause",
        )
        lost = which if change[0] == "-" else []
        how = {"before": old, "world": world, "stays": True, "longest": True}
        with strike(job, *scaled, *lost, **how):
            if change[0] == "+":
                job.bring_back(*which)
            else:
                job.stop(*which)
    job.steady()


@pytest.mark.fault(30)
def test_a_pod_has_its_rows_before_it_joins(job, measured):
    """Each of its reads takes two seconds: the others do steps meanwhile, and do not wait for it.

    The test slows the steps: the blocks of the small dataset have few rows, and the pod would have
    to read again before it is in.
    """
    pause_s = job.pause_s
    job.pause(1.0)
    job.kill(2, back_s=math.inf)
    job.steady(3)
    first, slow = job.last(), job.orders / "2.read"
    slow.touch()
    job.bring_back(2)
    job.steady(4)
    fault = Fault(job.longest_s(first))
    slow.unlink()
    job.pause(pause_s)
    job.steady(4, steps=21)  # the next tests measure pauses beside the times of these
    measured("a pod added that reads slowly", fault, "finish; longest pause")
    assert fault.seconds < 1.5


@pytest.mark.fault(33)
def test_a_pod_may_come_back_with_another_address(job, strike):
    """It joins like any other pod."""
    with strike(job, "a pod killed, back with another address", "retry", 2):
        pod = job.pods[2]
        env = pod.plan.env | {"POD_ADDRESS": f"{job.network.prefix}.77"}
        pod.plan = dataclasses.replace(pod.plan, env=env)
        job.kill(2)


@pytest.mark.fault(19)
def test_an_oom_killed_worker_is_replaced(job, cgroup, strike):
    """The others retry the step, as after any kill; the pod's log names the signal."""
    used = int((cgroup / "memory.usage_in_bytes").read_text())
    with strike(job, "a worker OOM-killed", "retry", 1):
        (cgroup / "memory.limit_in_bytes").write_text(str(used + 300_000_000))
        job.order(1, "eat")
    assert "SIGKILL" in job.pods[1].log.read_text()


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)


# -- two workers a pod -----------------------------------------------------------------------------


@pytest.mark.fault(1)
def test_pods_of_two_workers(jobs, ends_undisturbed, measured):
    """A killed worker ends no other, not even the other one of its pod. A killed pod loses both."""
    job = jobs(size=2, per_pod=2)
    job.steady(4)

    def others(*lost):
        return [job.worker(i, n) for i in range(2) for n in range(2) if (i, n) not in lost]

    for lost, harm, what in (
        ([(0, 1)], lambda: job.shoot(0, 1), "one of a pod's two workers killed"),
        ([(0, 0), (0, 1)], lambda: job.kill(0), "a pod of two workers killed"),
    ):
        kept, step_s = others(*lost), job.step_s()
        with job.fault(4 - len(lost)) as fault:
            harm()
        job.steady(4)
        fault.back_s = job.entered(step_s)
        measured(what, fault, "retry")
        assert others(*lost) == kept and (fault.redone, fault.lives) == (0, 0)
    ends_undisturbed(job)
