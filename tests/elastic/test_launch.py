"""The launcher of a real pod, one a loopback address: what ends its worker, and what ends itself.

What a kill costs the others is in tests/faults.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ledgers
from support.launchers import Training
from support.processes import alive, children
from support.waiting import until

FLAGS = ("--steps", "100000", "--checkpoint-every", "3600")


@pytest.fixture(scope="module")
def running(corpus, tmp_path_factory) -> Iterator[Training]:
    job = Training(tmp_path_factory.mktemp("launch") / "job", corpus, 3, 1, 1, *FLAGS)
    yield job
    job.close()


@pytest.fixture
def job(running: Training) -> Training:
    """A job of three pods that is under way, whatever the test before has done to it."""
    running.whole()
    return running


def survivors(job: Training, *gone: int) -> None:
    """The launchers of all other pods are the processes that they were."""
    assert [i for i, pod in job.pods.items() if pod.poll() is not None and i not in gone] == []


def test_a_signal_to_every_process_of_a_pod_leaves_the_worker_its_time(job):
    """As Slurm sends it: the server, whose end is the workers', outlives it; the worker stops."""
    (pod, worker), before = (job.pods[1].pid, job.worker(1)), job.log(1)
    (server,) = [child for child in children(pod) if worker in children(child)]
    os.kill(server, signal.SIGTERM)
    job.goes_on(3)
    assert alive(server) and job.worker(1) == worker and job.log(1) == before
    survivors(job)


def raises(job: Training) -> None:
    """An exception is printed with its rank, once."""
    job.order(1, "fail")
    until(lambda: "Traceback" in job.log(1), "the traceback")
    assert job.log(1).count("RuntimeError: told to raise") == 1


def without_server(job: Training) -> None:
    """Without the process that forks the workers, the pod makes a new one."""
    old = job.worker(1)
    server = int(Path(f"/proc/{old}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != job.pods[1].pid
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(old), "the old worker's end", timeout_s=5)


@pytest.mark.parametrize("harm", [raises, without_server])
def test_a_worker_that_is_lost_is_replaced(job, harm):
    """After it all three step on, and no launcher has ended, nor another worker."""
    old, others = job.worker(1), (job.worker(0), job.worker(2))
    harm(job)
    until(lambda: job.worker(1) != old, "a new worker")
    job.goes_on(3)
    survivors(job)
    assert (job.worker(0), job.worker(2)) == others


def test_a_final_error_ends_its_pod_with_its_code_and_message(job):
    """The trainer's exit code 2 is the container's, and its message the last line."""
    job.order(1, "final")
    assert job.exit_code(1) == 2
    assert job.log(1).splitlines()[-1].endswith("told that the data is bad")
    assert job.log(1).count("the data is bad") == 1
    job.goes_on(2)
    survivors(job, 1)


def test_a_final_error_after_sigterm_is_not_lost(job):
    """A worker that meets one while its pod is being stopped is heard, and the pod ends with 2."""
    job.order(2, "spoil")
    job.pods[2].terminate()
    assert job.exit_code(2) == 2
    assert job.log(2).count("bad data at the end") == 1
    job.goes_on(2)
    survivors(job, 2)


def test_the_end_does_not_wait_for_a_pod_that_is_gone(corpus, tmp_path):
    """One launcher dies after the last step: its peers end with 0, and so does its successor."""
    job = Training(tmp_path / "job", corpus, 3, 2, 1, "--steps", "5")
    try:
        job.order(2, "vanish")
        job.start(0, 1, 2)
        assert job.exit_code(2) == -signal.SIGKILL
        assert [job.exit_code(i) for i in (0, 1)] == [0, 0]
        job.start(2)
        assert job.exit_code(2) == 0
        assert [line["step"] for line in job.steps()] == [1, 2, 3, 4, 5]
    finally:
        job.close()


@pytest.mark.parametrize(("slot", "number"), [(3, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_pod_that_waits_can_be_stopped_and_sees_the_end(corpus, tmp_path, slot, number):
    """As it waits for others a signal ends a pod with 128 + its number, the run's end another with
    0; whether it has the endpoint or looks for it."""
    who = slot % 2
    stopped, ended = (
        Training(tmp_path / name, corpus, 2, slot + more, 2, "--steps", "1000000")
        for name, more in (("stopped", 0), ("ended", 2))
    )
    try:
        for job in (stopped, ended):
            job.start(who)
        for job in (stopped, ended):
            until((job.folder / f"pod-{who}.pid").exists, "its worker")
        time.sleep(1.0)
        stopped.pods[who].send_signal(number)
        stop = {"event": "stop", "step": 1000000, "cause": "steps"}
        ledgers.begun(ended.folder, {"steps": 1000000}, stop)
        assert stopped.pods[who].wait(20) == 128 + number
        assert ended.pods[who].wait(20) == 0
    finally:
        stopped.close()
        ended.close()
