"""Signals to pods and workers of a real job: who leaves, with which code, and what is not lost."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support import launchers
from support.faulty_jobs import check_same_run, long
from support.forked import train
from support.processes import alive, ending
from support.same_bits import check_same_bits, check_same_lines
from support.toy import SMALL
from support.trainer_patches import patch_here
from support.waiting import until

from gptddp.checkpoint import snapshot
from gptddp.checkpoint.load import load_newest
from gptddp.distributed.replicas import state_fp
from gptddp.launch.launcher import WORKER
from gptddp.run.history import history, read_ledger

PODS = 3
GRACE_S = 6
# Slow enough to be hit; each worker says in a file which process it is.
SLOW = """
_forward_backward = forward_backward
def forward_backward(ddp, batch, targets, step, *rest):
    (HERE / os.environ["POD_NAME"]).write_text(str(os.getpid()))
    time.sleep(0.05)
    return _forward_backward(ddp, batch, targets, step, *rest)
"""
LOAD = """
_settle = settle
def settle(*args):
    gate("load-" + os.environ["POD_NAME"])
    _settle(*args)
"""
EVALUATION = """
from gptddp.training import life
_evaluate = life.evaluate
def evaluate(net, rows, tokenizer, c, world, stop):
    gate("evaluation-" + os.environ["POD_NAME"])
    return _evaluate(net, rows, tokenizer, c, world, stop)
life.evaluate = evaluate
"""


# Rank 0 is killed in the middle of the save that ends the run.
LAST_SAVE = """
from gptddp.run.history import RunLog
_sync = RunLog.sync
def sync(log):
    if times("last_save", 1):  # all of the checkpoint is written but its name
        os.kill(os.getpid(), signal.SIGKILL)
    _sync(log)
RunLog.sync = sync
"""


class Job(launchers.Job):
    """Pods of the real trainer with this code in it; its workers wait at gates of the test."""

    grace_s = GRACE_S

    def __init__(self, folder: Path, corpus: Path, slot: int, code: str, *flags: str) -> None:
        given = [*SMALL, "--data", str(corpus), *flags]
        super().__init__(folder / "run", PODS, 50 + slot, 2, Path(WORKER), *given)
        self.gates = folder / "patch"
        self.before = patch_here(self.gates, code)

    def steps(self) -> list[dict[str, Any]]:
        return list(history(self.folder))

    def worker(self, i: int) -> int:
        return int(until((self.gates / f"pod-{i}").read_text))  # it is just being written

    def shut(self, gate: str) -> None:
        (self.gates / f"{gate}.reached").unlink(missing_ok=True)
        (self.gates / f"{gate}.closed").touch()

    def open(self, gate: str) -> None:
        (self.gates / f"{gate}.closed").unlink()

    def reached(self, gate: str) -> None:
        until((self.gates / f"{gate}.reached").exists, timeout_s=60)

    def stops(self, i: int) -> float:
        """Seconds until this pod, told to stop, has exited with 143."""
        begin = time.monotonic()
        self.pods[i].terminate()
        assert self.pods[i].wait(30) == 143, self.log(i)
        return time.monotonic() - begin

    def check(self) -> None:
        """No step was lost: each is logged once, and no life began with steps to do again."""
        starts = [event for event in read_ledger(self.folder) if event["event"] == "start"]
        assert [start["redo"] for start in starts] == [0] * len(starts)


@pytest.fixture
def job(corpus, tmp_path):
    """job(slot, *flags, code): a Job of which nothing outlives the test."""

    def make(slot: int, *flags: str, code: str = SLOW) -> Job:
        return Job(tmp_path, corpus, slot, code, *flags)

    yield from ending(make, Job.close)


def test_pods_and_workers_that_are_stopped_one_by_one_cost_no_step(job, corpus, tmp_path):
    """A pod, a worker, a pod in a re-form, a pod whose host and peer hang: all in one job. Its
    steps and what it leaves in memory are those of one process, bit for bit."""
    flags = ("--eval-every", "100000", "--final-lr", "1")  # the rate does not depend on --steps
    it = job(1, "--steps", "100000", *flags, code=SLOW + LOAD)
    it.start(0, 1, 2)
    it.goes_on(3)

    assert it.stops(2) < GRACE_S / 2
    it.goes_on(2)  # the others, without it

    os.kill(it.worker(1), signal.SIGTERM)  # a worker alone: its pod starts another
    it.goes_on(2)
    it.start(2)
    it.goes_on(3)

    it.shut("load-pod-0")  # the next life begins slowly, with a state that is in memory alone
    os.kill(it.worker(0), signal.SIGKILL)
    it.reached("load-pod-0")
    time.sleep(0.5)
    it.pods[2].terminate()
    time.sleep(0.5)
    it.open("load-pod-0")
    assert it.pods[2].wait(30) == 143
    it.goes_on(2)
    assert it.pods[0].poll() is None and it.pods[1].poll() is None
    it.check()

    worker = it.worker(1)
    for pid in (it.pods[0].pid, it.worker(0)):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1)  # the launcher waits for the store's answer, the worker for its peer
    assert it.stops(1) < GRACE_S and not alive(worker)
    left = snapshot.read(snapshot.path_of(it.folder / "memory-1", it.folder))
    lines, alone = list(history(it.folder)), tmp_path / "alone"
    assert left and left.step >= max(line["step"] for line in lines) - 1
    flags = (*flags, "--steps", str(left.step), "--data", str(corpus), "--run-dir", str(alone))
    train(1, *SMALL, *flags)
    lines, wanted = lines[: left.step], list(history(alone))
    check_same_lines(lines, wanted[: len(lines)])
    assert state_fp(left.tensors) == state_fp(load_newest(alone).tensors)


def test_the_end_comes_once_with_everything_done(job, corpus, tmp_path):
    """A stop while loading, a kill in an evaluation, one in the last save: then all end with 0, and
    the run is that of one process, bit for bit."""
    code = SLOW + LOAD + EVALUATION + LAST_SAVE
    flags = ("--steps", "12", "--eval-every", "6", "--checkpoint-every", "3600")
    it = job(2, *flags, code=code)
    it.shut("load-pod-1")
    it.shut("evaluation-pod-1")
    it.start(0, 1, 2)
    it.reached("load-pod-1")
    assert it.stops(2) < GRACE_S / 2
    it.open("load-pod-1")
    it.start(2)

    it.reached("evaluation-pod-1")
    time.sleep(0.5)
    os.kill(it.worker(1), signal.SIGKILL)
    it.open("evaluation-pod-1")

    assert [it.pods[i].wait(60) for i in range(PODS)] == [0] * PODS, it.log(0)
    assert (it.gates / "last_save.0").exists()
    lines = list(history(it.folder))
    assert [line["step"] for line in lines if "val_loss" in line] == [6, 12]
    alone = tmp_path / "alone"
    train(1, *SMALL, "--data", str(corpus), "--run-dir", str(alone), *flags)
    check_same_bits(it.folder, alone)
    assert list((it.folder / "checkpoints").glob("step-000000000012.*/manifest.json"))
    it.check()


BETWEEN = ("--steps", "150", "--eval-every", "5000", "--checkpoint-every", "3600")


@pytest.mark.fault(12)
@pytest.mark.parametrize(
    "gone", [pytest.param(2, id="pod", marks=long), pytest.param(0, id="host")]
)
def test_a_stop_between_two_worlds_saves_what_is_in_memory(jobs, undisturbed, gone):
    """A pod is gone, the others have left their state: SIGTERM to all commits it, once."""
    job = jobs(*BETWEEN)
    job.steady()
    job.hold(gone)
    job.kill(gone, back_s=3600)
    job.until(lambda: list(job.folder.rglob("shm/gptddp-*[0-9a-f]")), what="a memory")
    job.stop(*({0, 1, 2, 3} - {gone}))
    job.until(lambda: not any(pod.process for pod in job.pods), what="the end of all pods")
    last = job.lines()[-1][1]["step"]
    assert [path.name for path in (job.run / "checkpoints").glob("step-*")] == [
        f"step-{last:012}.1"
    ]
    job.bring_back(0, 1, 2, 3)
    job.finish()
    starts = [event for event in read_ledger(job.run) if event["event"] == "start"]
    assert starts[-1]["source"] == f"step-{last:012}.1" and starts[-1]["redo"] == 0
    check_same_run(job, undisturbed(1, *BETWEEN))
