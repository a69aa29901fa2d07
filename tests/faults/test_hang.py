"""A hang that no collective notices, in pods: ranks that all wait for data."""

from collections.abc import Iterator

import pytest
from support.faulty_jobs import SHORT
from support.launchers import Training, undisturbed, until
from support.same_bits import check_same_lines

from gptddp.run.history import read_ledger

pytestmark = pytest.mark.skipif(SHORT, reason="takes a minute")
FLAGS = ("--steps", "1000000", "--checkpoint-every", "3600")


@pytest.fixture
def job(corpus, tmp_path) -> Iterator[Training]:
    """Two ranks; each ends after 3 s without progress, or is killed 1 s later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_MARGIN_S", "1")
        it = Training(tmp_path / "job", corpus, 2, 42, 2, *FLAGS)
        it.before = "from gptddp.launch import hung; hung.LATER_S = 1.0; "
        it.whole()
        yield it
    it.close()


def test_ranks_that_all_wait_for_data_for_ever_start_again_from_memory(job, corpus, tmp_path):
    """Outside of a collective nobody misses anybody: each says where it hangs. No step is lost,
    every bit is right, and no launcher has ended."""
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
    assert [pod.poll() for pod in job.pods.values()] == [None] * 2
    for pod in job.pods.values():
        pod.terminate()
    lines = job.finish(143)
    expected = undisturbed(tmp_path / "run", corpus, 1, lines[-1]["step"])
    check_same_lines(lines, expected)
