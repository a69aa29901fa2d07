"""Real launchers and trainers: if ranks are lost and join, no survivor ends, no bit changes."""

import os
import signal
import time

import pytest
from support.launchers import Training, undisturbed
from support.same_bits import check_same_lines

from gptddp.run.history import read_ledger

STEPS = 150
END_S = 9.0  # ten times the usual time; a worker that is ended in its last messages makes it longer


@pytest.fixture
def job(corpus, tmp_path):
    it = Training(tmp_path / "job", corpus, 3, 41, 1, "--steps", str(STEPS))
    it.start(0, 1, 2)
    it.goes_on(3)
    yield it
    it.close()


def test_kills_of_a_worker_and_of_rank_0_change_no_bit(job, corpus, tmp_path):
    """The third rank keeps its process, no step is repeated, and all lines are as undisturbed."""
    survivor = job.worker(2)
    os.kill(job.worker(1), signal.SIGKILL)
    job.goes_on(2)
    job.goes_on(3)  # the worker has rejoined
    job.pods[0].kill()
    job.goes_on(2)
    job.whole()
    assert job.worker(2) == survivor
    lines = job.finish()
    ended = time.time()
    check_same_lines(lines, undisturbed(tmp_path / "alone", corpus, 1, STEPS))

    events = read_ledger(job.folder)
    starts = [it for it in events if it["event"] == "start"]
    assert [it["redo"] for it in starts] == [0, 0]  # a new rank 0 writes the second
    worlds = [it for it in events if it["event"] == "world"]
    lost = [(it["pod"], it["rank"]) for world in worlds for it in world["lost"]]
    assert lost == [("pod-1", 1), ("pod-0", 0)]
    assert [it["pod"] for world in worlds for it in world["joined"]] == ["pod-1", "pod-0"]
    checked = {line["step"] for line in lines if "state_fp" in line}
    assert {it["step"] + 1 for it in worlds if it["joined"]} <= checked
    assert ended - next(it["time"] for it in events if it["event"] == "stop") < END_S
    ends = [it["cause"] for it in events if it["event"] == "end"]
    assert len(ends) == 1 and "rank 0 (pod-0)" in ends[0]
