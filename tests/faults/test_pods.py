"""Pods that come, go, move and run out of memory."""

import dataclasses
import os
import socket
import time
from pathlib import Path

import pytest
from support.faulty_jobs import Fault, Job, check_same_run

STEPS = ("--steps", "400", "--eval-every", "5000", "--checkpoint-every", "3600")
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
def job(jobs, cgroup):
    """One pod of four, whose rendezvous cannot listen at first; pod 1 has a memory limit."""

    def within(i: int) -> list[str]:
        enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
        return ["sh", "-c", enter, "sh"] if i == 1 else []

    it: Job = jobs(*STEPS, within=within)
    it.hold(1, 2, 3)
    return it


@pytest.mark.fault(33)
def test_a_port_that_is_taken_is_waited_for(job, measured):
    """The launcher tries again until the rendezvous can listen."""
    with socket.create_server((f"{job.network.prefix}.100", job.network.port)):
        job.wait(8)
        assert not job.lines() and not any("exited" in it for it in job.events)
        freed = time.time()
    job.steady(1)
    fault = Fault(job.lines()[0][1]["time"] - freed, 0, 1, "scratch")
    measured("the rendezvous' port is taken when the job starts", fault, "tried again until free")


@pytest.mark.fault(30)
def test_a_job_grows_and_shrinks(job, strike):
    """1 -> 4 -> 2 -> 3 -> 2 -> 4 pods: each change is one new life, and no step is done again."""
    for change, world in (("+123", 4), ("-23", 2), ("+3", 3), ("-3", 2), ("+23", 4)):
        which = [int(digit) for digit in change[1:]]
        old = job.lines()[-1][1]["world_size"]
        scaled = f"scaled from {old} to {world} pods", "all agree on a step, and go on"
        with strike(job, *scaled, world, before=old):
            if change[0] == "+":
                job.bring_back(*which)
            else:
                job.stop(*which)
    job.steady()


@pytest.mark.fault(33)
def test_a_pod_may_come_back_with_another_address(job, strike):
    """Nothing is tied to the address of a pod."""
    with strike(job, "a pod killed that comes back with another address", "as any other"):
        pod = job.pods[2]
        env = pod.plan.env | {"POD_ADDRESS": f"{job.network.prefix}.77"}
        pod.plan = dataclasses.replace(pod.plan, env=env)
        job.kill(2)


@pytest.mark.fault(19)
def test_a_worker_that_the_kernel_ends_for_its_memory(job, cgroup, strike):
    """It is a killed worker; the pod's log has the signal."""
    used = int((cgroup / "memory.usage_in_bytes").read_text())
    with strike(job, "a worker over its pod's memory limit (OOM kill)", "as a killed worker"):
        (cgroup / "memory.limit_in_bytes").write_text(str(used + 300_000_000))
        job.order(1, "eat")
    assert "exitcode: -9" in job.pods[1].log.read_text()


def test_the_run_is_the_undisturbed_one(job, undisturbed):
    """After all of the above."""
    job.finish()
    check_same_run(job, undisturbed(1, *STEPS))
