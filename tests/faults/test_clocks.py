"""Pods whose clocks differ and jump: none is dropped for it, and a killed pod still is."""

import contextlib
import glob
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.faulty_jobs import SHORT, Fault, long

from gptddp.run.history import read_ledger

LIBRARY = next(iter(glob.glob("/usr/lib/*/faketime/libfaketime.so.1")), "")
APART = [0, 10, -10, 0]  # seconds by which each pod's clock is ahead; pod 0 has rank 0
HOUR = 3600
PATIENCE_S = 6.5  # longer than the limit for a silent pod
SOON_S = 3.0
# libfaketime 0.9.10 computes the end of a sleep by the wrong clock.
SLEEP = """import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


class Clocks:
    """The time of day that the processes of each pod see; it may be set while they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(SLEEP)
        self.set(APART)

    def set(self, ahead_s: list[int]) -> None:
        for i, seconds in enumerate(ahead_s):
            (self.folder / "new").write_text(f"{seconds:+d}")
            (self.folder / "new").rename(self.folder / str(i))

    def within(self, i: int) -> list[str]:
        path = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        return [
            "env",
            f"LD_PRELOAD={LIBRARY}",
            f"PYTHONPATH={os.pathsep.join(path)}",
            f"FAKETIME_TIMESTAMP_FILE={self.folder / str(i)}",
            "FAKETIME_CACHE_DURATION=0",
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "FAKETIME_FORCE_MONOTONIC_FIX=0",
            "NO_FAKE_STAT=1",
        ]


@pytest.fixture(scope="module")
def clocks(tmp_path_factory):
    """The clocks of four pods, which differ."""
    if not LIBRARY:
        assert not os.environ.get("GPTDDP_CI")
        pytest.skip("needs libfaketime")
    yield Clocks(tmp_path_factory.mktemp("clocks"))
    for left in Path("/dev/shm").glob("*faketime_*"):  # left by killed processes
        with contextlib.suppress(FileNotFoundError):
            if not Path(f"/proc/{left.name.rpartition('_')[2]}").exists():
                left.unlink()


@pytest.fixture(scope="module")
def job(clocks, jobs):
    """Four pods with those clocks."""
    it = jobs(within=clocks.within, pause_s=0.3)
    it.one_clock = False
    return it


def calmly(job, seconds: float) -> None:
    """For so long all pods do steps, no world changes and no life begins."""
    before = changes(job)
    job.wait(seconds)
    job.steady(steps=2)
    assert changes(job) == before


def changes(job) -> list[str]:
    events = read_ledger(job.run)
    return [it["event"] for it in events if it["event"] in ("start", "world")]


@pytest.mark.fault(32)
def test_pods_with_different_clocks_form_one_world(job, clocks):
    """They form one world in the first life, and keep it."""
    job.steady()
    calmly(job, PATIENCE_S if SHORT else 15)
    assert changes(job).count("start") == 1
    tell = [sys.executable, "-c", "import time; print(time.time())"]
    times = [subprocess.check_output([*clocks.within(i), *tell], text=True) for i in range(4)]
    ahead_s = [float(text) - time.time() for text in times]
    assert max(ahead_s) > 5 and min(ahead_s) < -5  # they do differ


ALL = [[HOUR, HOUR + 10, HOUR - 10, HOUR], [-HOUR, 10 - HOUR, -10 - HOUR, -HOUR]]
JUMPS = [
    pytest.param("one pod's", [[0, HOUR, -10, 0], [0, -HOUR, -10, 0]], id="pod", marks=long),
    pytest.param("rank 0's", [[HOUR, 10, -10, 0], [-HOUR, 10, -10, 0]], id="host"),
    pytest.param("every", ALL, id="all", marks=long),
]


@pytest.mark.fault(32)
@pytest.mark.parametrize(("whose", "ahead_s"), JUMPS)
def test_a_clock_that_jumps_changes_no_world(job, clocks, measured, whose, ahead_s):
    """A clock jumps forward by an hour, then back by two: all pods continue in one world."""
    job.steady()
    for now_s, far, calm_s in zip(ahead_s, ["+1 h", "-2 h"], [SOON_S, PATIENCE_S], strict=True):
        last, began = job.last(), time.monotonic()
        clocks.set(now_s)
        job.until(lambda last=last: job.last() > last)
        fault = Fault(time.monotonic() - began)
        calmly(job, calm_s)
        assert abs(job.lines(job.last())[-1]["time"] - time.time() - now_s[0]) < 60  # it did jump
        measured(f"{whose} clock jumps by {far}", fault, "no effect; seconds include a step")


@pytest.mark.fault(32)
@pytest.mark.parametrize(
    "which", [pytest.param(1, id="pod", marks=long), pytest.param(0, id="host")]
)
def test_a_pod_that_is_killed_is_replaced(job, clocks, measured, which):
    """A killed pod is replaced: one whose clock is an hour ahead, or rank 0's with such a peer."""
    clocks.set([0, HOUR, -10, 0])
    job.steady()
    what = [
        "rank 0's pod killed, clocks 1 h apart",
        "a pod killed, its successor's clock 1 h ahead",
    ]
    pids, last, began = job.workers(), job.last(), time.monotonic()
    job.kill(which)
    job.until(lambda: any(it["world_size"] == 3 for it in job.lines(last + 1)))
    fault = Fault(time.monotonic() - began - job.pause_s)
    measured(what[which], fault, "retry; seconds include a step")
    job.steady()
    assert all(job.worker(i) == pid for i, pid in pids.items() if i != which)
    calmly(job, SOON_S)


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)
