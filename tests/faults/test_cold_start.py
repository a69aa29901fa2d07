"""A cold start whose read takes three times as long as a silent peer is waited for: whole jobs."""

import os
import signal
import time

import pytest
from support.faulty_jobs import SHORT
from support.forked import train
from support.launchers import Job, until
from support.paths import SUPPORT
from support.same_bits import check_same_bits
from support.toy import SMALL

from gptddp.run.history import read_ledger

pytestmark = pytest.mark.skipif(SHORT, reason="takes minutes")
LIMIT_S = 4.0  # of slow_volume.py


@pytest.fixture
def job(corpus, tmp_path):
    """Three pods that go on with a run of four steps to the eighth, from its checkpoint."""
    script = SUPPORT / "slow_volume.py"
    flags = ["--data", str(corpus), *SMALL]
    it = Job(tmp_path / "job", 3, 61, 3, script, *flags, "--steps", "8")
    train(1, *flags, "--run-dir", str(it.folder), "--steps", "4")
    it.start(0, 1, 2)
    yield it
    it.close()


def lives(job: Job) -> list[dict]:
    """The starts of the lives after the first."""
    return [event for event in read_ledger(job.folder) if event["event"] == "start"][1:]


def finish(job: Job) -> list[dict]:
    """All pods end well, with the same bits as one process; the lives."""
    assert [job.exit_code(i) for i in range(3)] == [0] * 3, "\n".join(map(job.log, range(3)))
    alone = job.folder.parent / "alone"
    for steps in ("4", "8"):
        train(1, *job.flags, "--run-dir", str(alone), "--steps", steps)
    check_same_bits(job.folder, alone)
    assert [event["step"] for event in lives(job)] == [4]
    return lives(job)


def test_a_read_longer_than_the_limit_is_one_life(job):
    """Nobody gives rank 0 up, and each pod says how far it is."""
    (start,) = finish(job)
    assert start["world_size"] == 3 and start["restarts"] == 0
    said = [job.log(i).count("waiting for rank 0 (pod-") for i in range(3)]
    assert sorted(said)[0] == 0 and sorted(said)[1] in range(2, 9)
    assert sum("the other ranks wait: reading step-000000000004.1" in job.log(i) for i in range(3))


def test_a_rank_0_that_dies_while_it_reads_is_replaced_at_once(job):
    """Its peers are not held up by the limit: the next life reads within it."""
    reader = until("a reader", lambda: (job.folder / "reading").exists())
    reader = int((job.folder / "reading").read_text())
    time.sleep(2)
    os.kill(reader, signal.SIGKILL)
    killed = time.monotonic()
    until("another", lambda: int((job.folder / "reading").read_text()) != reader)
    print(f"the next life read {time.monotonic() - killed:.1f} s after the kill of rank 0")
    finish(job)
    logs = "".join(map(job.log, range(3)))
    assert "rank 0 (pod-" in logs and "has got no further" not in logs


def test_a_read_that_hangs_ends_the_life_and_the_next_one_reads(job):
    """The volume is dead for one read: it is noticed after the limit, and the run goes on."""
    (job.folder / "hang").touch()
    finish(job)
    logs = "".join(map(job.log, range(3)))
    assert f"has got no further for {LIMIT_S:g} s: reading step-000000000004.1, 2" in logs
