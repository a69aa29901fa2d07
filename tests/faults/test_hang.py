"""Hangs that no collective notices, in pods: what the launcher sees, and ranks that all hang."""

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from support.faulty_jobs import SHORT
from support.launchers import Training, undisturbed, until
from support.processes import alive
from support.same_bits import check_same_lines

from gptddp.run.history import read_ledger

pytestmark = pytest.mark.skipif(SHORT, reason="takes a minute")
FLAGS = ("--steps", "1000000", "--checkpoint-every", "3600")


@pytest.fixture(scope="module")
def jobs(corpus, tmp_path_factory) -> Iterator[Callable[[int], Training]]:
    """jobs(n): of n ranks; each ends after 3 s without progress, or is killed 1 s later."""
    made: dict[int, Training] = {}

    def job(pods: int) -> Training:
        if pods not in made:
            folder = tmp_path_factory.mktemp("hang") / "job"
            made[pods] = Training(folder, corpus, pods, 40 + pods, pods, *FLAGS)
            made[pods].before = "from gptddp.launch import hung; hung.LATER_S = 1.0; "
            made[pods].whole()
        return made[pods]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_MARGIN_S", "1")
        yield job
    for one in made.values():
        one.close()


def same_run(job: Training, corpus, tmp_path) -> None:
    """No launcher has ended meanwhile; no step is missing, every bit is right."""
    assert [pod.poll() for pod in job.pods.values()] == [None] * job.size
    for pod in job.pods.values():
        pod.send_signal(signal.SIGTERM)
    lines = job.finish(143)
    expected = undisturbed(tmp_path / "run", corpus, 1, lines[-1]["step"])
    check_same_lines(lines, expected)


@pytest.mark.parametrize("fault", ["stick", "stop"])
def test_what_stops_every_thread_is_seen_by_the_launcher(jobs, fault):
    """A call that holds the GIL, and SIGSTOP: the pod says where, kills it and goes on."""
    job = jobs(1)
    job.goes_on(1)
    old, mark = job.worker(0), len(job.log(0))
    if fault == "stop":
        os.kill(old, signal.SIGSTOP)
    else:
        job.order(0, fault)
    until("a new worker", lambda: job.worker(0) != old)
    job.goes_on(1)
    what = "is stopped (SIGSTOP)" if fault == "stop" else "hangs in stick (faulty_worker.py:"
    said = job.log(0)[mark:]
    assert "gptddp.launch: no progress for " in said and f" s: rank 0 {what}" in said
    assert not alive(old)
    # who stops it from outside is not its own error
    assert [path.suffixes[-2] for path in (job.folder / "faults").iterdir()] == [".0"]


def test_the_run_of_one_rank_is_the_undisturbed_one(jobs, corpus, tmp_path):
    """After both of them."""
    same_run(jobs(1), corpus, tmp_path)


def test_ranks_that_all_wait_for_data_for_ever_start_again_from_memory(jobs, corpus, tmp_path):
    """Outside of a collective nobody misses anybody: each says where it hangs; no step is lost."""
    job = jobs(2)
    job.goes_on(2)
    for i in range(2):
        job.order(i, "starve")
    generation = read_ledger(job.folder)[-1]["generation"]
    until("another life", lambda: read_ledger(job.folder)[-1]["generation"] > generation)
    job.goes_on(2)
    for i in range(2):
        assert f"[rank {i}] no progress for " in job.log(i)
        assert " s: hangs in next_batch (faulty_worker.py:" in job.log(i)
    starts = [e for e in read_ledger(job.folder) if e["event"] == "start"]
    assert [(e["source"], e["redo"]) for e in starts] == [("scratch", 0), ("memory", 0)]
    same_run(job, corpus, tmp_path)
