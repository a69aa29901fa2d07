"""Peers that are there and say nothing: stopped, hung in Python or in C, a whole pod or a part.

One job of three pods, rank 0 the rendezvous host, takes all of it in turn.
"""

import os
import re
import signal
from collections.abc import Iterator

import pytest
from support.faulty_jobs import SHORT
from support.launchers import Training, undisturbed
from support.processes import alive
from support.same_bits import check_same_lines
from support.waiting import until

from gptddp.run.history import read_ledger


@pytest.fixture(scope="module")
def running(corpus, tmp_path_factory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("silent") / "job"
    job = Training(folder, corpus, 3, 21, 2, "--steps", "1000000", "--checkpoint-every", "3600")
    yield job
    job.close()


@pytest.fixture
def job(running: Training) -> Training:
    """The job with all its ranks, whatever the test before has done to it."""
    running.whole()
    return running


def told(job: Training, i: int, text: str) -> None:
    until(lambda: text in job.log(i), text, why=lambda: job.log(i))


@pytest.mark.parametrize(
    ("fault", "frame"),
    [("sleep", "sleep (faulty_worker.py:"), ("spin", "spin (faulty_"), ("stick", "stick (faulty_")],
)
def test_a_rank_that_hangs_is_named_with_its_stack_and_replaced(job, fault, frame):
    """With the GIL or without: two say which rank they miss and in what, its pod where it hangs."""
    marks = [len(job.log(i)) for i in range(3)]
    old = job.worker(1)
    job.order(1, fault)
    until(lambda: job.worker(1) != old, "a new worker")
    job.goes_on(3)
    logs = [job.log(i)[mark:] for i, mark in enumerate(marks)]
    for i in (0, 2):
        assert f"[rank {i}] lost a peer: after step" in logs[i]
        missed = r"rank 1 \(pod-1\) has not answered for 2 s in forward_backward \(train.py:"
        assert re.search(missed, logs[i])
        assert "Traceback" not in logs[i]
    assert f"rank 1 hangs in {frame}" in logs[1]
    assert not alive(old)


def test_a_stopped_worker_is_killed_by_its_agent(job):
    """SIGSTOP of rank 0, which has the store: the others miss it, and its pod says why."""
    old = job.worker(0)
    os.kill(old, signal.SIGSTOP)
    told(job, 1, "rank 0 (pod-0) has not answered for 2")
    told(job, 0, "rank 0 is stopped (SIGSTOP): it is killed")
    until(lambda: job.worker(0) != old, "a new worker")
    job.goes_on(3)


def test_a_stopped_pod_is_done_without_and_rejoins(job):
    """SIGSTOP of all of its processes: two go on; SIGCONT, and its stale worker makes way."""
    old = job.worker(2)
    os.killpg(job.pods[2].pid, signal.SIGSTOP)
    try:
        told(job, 0, "rank 2 (pod-2) has not answered for 2")
        job.goes_on(2)
    finally:
        os.killpg(job.pods[2].pid, signal.SIGCONT)
    job.goes_on(3)
    assert not alive(old)


def test_a_stopped_launcher_holds_up_nobody(job):
    """Its worker trains on; when another is killed the rest go on without it until SIGCONT."""
    launcher = job.pods[1].pid
    os.kill(launcher, signal.SIGSTOP)
    try:
        job.goes_on(3)
        os.kill(job.worker(2), signal.SIGKILL)
        job.goes_on(2)
    finally:
        os.kill(launcher, signal.SIGCONT)
    job.goes_on(3)


def test_the_run_is_the_undisturbed_one(job, corpus, tmp_path):
    """After all of that no step is missing and every bit is right, from memory alone."""
    assert [pod.poll() for pod in job.pods.values()] == [None] * 3
    lines = job.steps()
    expected = undisturbed(tmp_path / "run", corpus, 1, lines[-1]["step"])
    check_same_lines(lines, expected)


@pytest.mark.skipif(SHORT, reason="takes a minute")
def test_ranks_that_all_wait_for_data_for_ever_start_again_from_memory(
    corpus, tmp_path, monkeypatch
):
    """Outside of a collective nobody misses anybody: each ends after 3 s without progress, or is
    killed 1 s later, and says where it hangs. No step is lost, every bit is right, and no launcher
    has ended."""
    monkeypatch.setenv("HANG_MARGIN_S", "1")
    flags = ("--steps", "1000000", "--checkpoint-every", "3600")
    job = Training(tmp_path / "job", corpus, 2, 42, 2, *flags)
    job.before = "from gptddp.launch import worker; worker.LATER_S = 1.0; "
    try:
        job.whole()
        for i in range(2):
            job.order(i, "starve")
        generation = read_ledger(job.folder)[-1]["generation"]
        until(lambda: read_ledger(job.folder)[-1]["generation"] > generation, "another life")
        job.goes_on(2)
        for i in range(2):
            assert f"[rank {i}] no progress for " in job.log(i)
            assert " s: hangs in next_batch (faulty_worker.py:" in job.log(i)
        starts = [e for e in read_ledger(job.folder) if e["event"] == "start"]
        assert [(e["source"], e["redo"]) for e in starts] == [("scratch", 0), ("memory", 0)]
        assert [pod.poll() for pod in job.pods.values()] == [None] * 2
        for pod in job.pods.values():
            pod.terminate()
        lines = job.finish(143)
    finally:
        job.close()
    check_same_lines(lines, undisturbed(tmp_path / "run", corpus, 1, lines[-1]["step"]))
