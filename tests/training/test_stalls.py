"""Two ranks that train, of which one is really slow, stopped, or hanging."""

import os
import re
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from support.forked import ranks
from support.processes import free_port
from support.toy import SMALL
from support.waiting import until

from gptddp.run.history import read_ledger
from gptddp.training.stalls import described

# Rank 1 of two: 0.05 s more for each of its micro-batches, while there is a file `slow`; no step
# ends while there is a file `hang`. Windows and limits are a tenth of the real ones.
SLOWED = """
import os, sys, time
from pathlib import Path
from gptddp import train
from gptddp.run import owners
from gptddp.training import stalls, stragglers
stalls.LEAST_S, stalls.GATHER_S, stalls.AGAIN_S = 1.5, 0.5, 4.0
stragglers.WINDOW_S, stragglers.HOLD_S = 2.0, 1.0
def slowly(*args):
    for part in of_step(*args):
        time.sleep(0.02)
        if os.environ["RANK"] == "1" and Path(os.environ["ORDERS"], "slow").exists():
            time.sleep(0.05)
        while os.environ["RANK"] == "1" and Path(os.environ["ORDERS"], "hang").exists():
            time.sleep(0.05)
        yield part
of_step, train.of_step = train.of_step, slowly
owners.OF_FAULTS = ("start",)  # as if there had been one: goodput is said
os.environ["POD_NAME"] = "pod-" + os.environ["RANK"]
sys.exit(train.main(sys.argv[1:]))
"""


class Job:
    """Two ranks that train, and rank 0's log, metrics and records."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.port = free_port()
        flags = [*SMALL, "--data", str(corpus), "--run-dir", str(self.run), "--log-every", "1"]
        flags += ["--steps", "1000000", "--metrics-port", str(self.port)]
        env = {**os.environ, "ORDERS": str(folder)}
        self.ranks = ranks(2, *flags, code=SLOWED, env=env)
        self.said = ""

    def until(self, true, timeout_s: float = 60.0):
        def heard():
            self.said += self.ranks[0].stderr.read()
            return true()

        return until(heard, timeout_s=timeout_s, why=lambda: self.said[-2000:])

    def events(self, kind: str) -> list[dict]:
        return [it for it in read_ledger(self.run) if it["event"] == kind]

    def page(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            return answer.read().decode()

    def scraped(self, name: str, page: str = "") -> dict[str, float]:
        """The samples of this family by their labels, now or in a page."""
        lines = (page or self.page()).splitlines()
        found = [re.fullmatch(rf"gptddp_{name}(\{{.*\}})? (\S+)", line) for line in lines]
        return {it[1] or "": float(it[2]) for it in found if it}


@pytest.fixture(scope="module")
def job(corpus, tmp_path_factory):
    made = Job(tmp_path_factory.mktemp("stalls"), corpus)
    made.until(lambda: "step 3/" in made.said)
    yield made
    for process in made.ranks:
        process.kill()


def test_the_goodput_logged_with_a_step_counts_the_steps_up_to_it(job):
    """The logged goodput is not ten seconds old, or the first one would count no step."""
    said = job.until(lambda: re.search(r"step 6/.*  ETA [^:]+  goodput ([\d.]+) %", job.said))
    assert float(said[1]) > 0


def test_a_slow_rank_is_named_and_released(job):
    """Its name is in rank 0's log, each step's line, the ledger, and a metric with its pod."""
    assert job.scraped("straggler_ratio") == {}
    (job.folder / "slow").touch()
    (slow,) = job.until(lambda: job.events("slow"))
    assert (slow["rank"], slow["name"]) == (1, "rank 1 (pod-1)") and slow["ratio"] > 1.3
    step = r"step \d+/.*  ETA .*  goodput [\d.]+ %  slow: rank 1 \(pod-1\) "
    job.until(lambda: re.search(step, job.said))
    assert "rank 1 (pod-1) is slow: it takes " in job.said
    ((labels, ratio),) = job.scraped("straggler_ratio").items()
    assert labels == '{slow_pod="pod-1",slow_rank="1"}' and ratio > 1.3
    (job.folder / "slow").unlink()
    over, *_ = job.until(lambda: job.events("slow_end"))
    assert over["rank"] == 1 and over["seconds"] >= 1.0
    job.until(lambda: "rank 1 (pod-1) is as fast as the others again" in job.said)
    job.until(lambda: job.scraped("straggler_ratio") == {})  # set a moment later


def test_a_stopped_rank_is_reported_by_the_others(job):
    """A stalled step is reported: the rank without a sign of life, and the place of the other."""
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    stopped = time.monotonic()
    try:
        (stall,) = job.until(lambda: job.events("stall"))
        job.until(lambda: "has not moved for" in job.said)
        assert job.scraped("stall_seconds")[""] >= 1.5
        assert job.scraped("stuck_rank") == {'{slow_pod="pod-1",slow_rank="1"}': 1}
    finally:
        stopped = time.monotonic() - stopped
        os.kill(job.ranks[1].pid, signal.SIGCONT)
    assert (stall["ranks"], stall["names"]) == ([1], ["rank 1 (pod-1)"])
    where = r"rank 1 \(pod-1\) gives no sign of life; rank 0 \(pod-0\) waits in \w+ \(\w+\.py:\d+\)"
    assert re.fullmatch(where, stall["where"])
    assert f"step {stall['step']} has not moved for " in job.said
    (over,) = job.until(lambda: job.events("stall_end"))
    assert over["step"] == stall["step"] and over["seconds"] >= stall["seconds"]
    assert over["seconds"] >= stopped - 0.2  # a step may still have been logged
    assert job.until(lambda: job.scraped("stall_seconds")[""] == 0)
    assert job.scraped("stuck_rank") == {}


def test_a_rank_that_hangs_elsewhere_reports_the_place(job):
    """A rank that hangs in no collective has a thread that posts its function for rank 0."""
    before = len(job.events("stall"))
    (job.folder / "hang").touch()
    (stall,) = job.until(lambda: job.events("stall")[before:])
    (job.folder / "hang").unlink()
    assert stall["ranks"] == [1]
    here = r"rank 1 \(pod-1\) is at slowly \(<string>:\d+\), called by forward_backward "
    assert re.match(here + r"\(train\.py:\d+\), phase step; rank 0 \(pod-0\) waits", stall["where"])
    job.until(lambda: job.events("stall_end")[before:])


def test_the_places_of_the_ranks_are_reported_in_a_line():
    """Missing ranks come first; waiting ranks are counted, by place; no escape sequences."""
    names = [f"rank {i} (p{i})" for i in range(4)]
    waits = {"phase": "step", "waits": True, "at": "agree (agree.py:1)"}
    busy = {"phase": "data_wait", "waits": False, "at": "next_batch (q.py:2)\x1b[2J"}
    stall = described(7, 12.0, {0: waits, 1: busy, 2: waits}, names)
    assert stall.missing == [1, 3] and stall.text == (
        "rank 1 (p1) is at next_batch (q.py:2)\\x1b[2J, phase data_wait; "
        "rank 3 (p3) gives no sign of life; 2 ranks wait in agree (agree.py:1)"
    )
    assert described(7, 12.0, dict.fromkeys(range(4), waits), names).missing == []
    assert described(7, 12.0, {0: busy, 1: "x", 2: None, 3: busy}, names).missing == []
