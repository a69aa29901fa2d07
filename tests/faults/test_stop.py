"""Signals to pods and workers of a real job: which of them exit, how, and that no step is lost."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support import launchers
from support.forked import train
from support.processes import alive, ending
from support.same_bits import check_same_bits, check_same_lines
from support.toy import SMALL
from support.trainer_patches import patch_here
from support.waiting import until

from gptddp.checkpoint.load import load_newest
from gptddp.distributed.replicas import state_fp
from gptddp.launch.launcher import SCRIPT
from gptddp.run.history import history, read_ledger

PODS = 3
GRACE_S = 6
# Steps are slow enough for a signal to arrive in one. Each worker writes its process id to a file.
SLOW = """
_forward_backward = forward_backward
def forward_backward(ddp, batch, targets, step, *rest):
    (HERE / os.environ["POD_NAME"]).write_text(str(os.getpid()))
    time.sleep(0.05)
    return _forward_backward(ddp, batch, targets, step, *rest)
"""
LOAD = """
_settle_buckets = settle_buckets
def settle_buckets(*args):
    gate("load-" + os.environ["POD_NAME"])
    _settle_buckets(*args)
"""
CLOSE = """
from gptddp.training.recorder import Recorder
_close = Recorder.close
def close(recorder):
    gate("close-" + os.environ["POD_NAME"])
    _close(recorder)
Recorder.close = close
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
        super().__init__(folder / "run", PODS, 50 + slot, 1, Path(SCRIPT), *given)
        self.gates = folder / "patch"
        self.before = patch_here(self.gates, code)

    def steps(self) -> list[dict[str, Any]]:
        return list(history(self.folder))

    def worker(self, i: int) -> int:
        return int(until((self.gates / f"pod-{i}").read_text))  # it may be half written

    def shut(self, gate: str) -> None:
        (self.gates / f"{gate}.reached").unlink(missing_ok=True)
        (self.gates / f"{gate}.closed").touch()

    def open(self, gate: str) -> None:
        (self.gates / f"{gate}.closed").unlink()

    def reached(self, gate: str) -> None:
        until((self.gates / f"{gate}.reached").exists, timeout_s=60)

    def stops(self, i: int) -> float:
        """Send SIGTERM to this pod; the seconds until it has exited with 143."""
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


def test_stopping_pods_and_workers_one_by_one_costs_no_step(job, corpus, tmp_path):
    """Rank 0 whose disk hangs, a pod, a worker, a pod while another one joins, and a pod whose peer
    hangs get SIGTERM in one job. Its steps and its last checkpoint have the bits of one process."""
    flags = ("--eval-every", "100000", "--final-lr", "1")  # the rate does not depend on --steps
    it = job(1, "--steps", "100000", *flags, code=SLOW + LOAD + CLOSE)
    it.start(0, 1, 2)
    it.goes_on(3)
    it.shut("close-pod-0")
    worker_0 = it.worker(0)
    it.pods[0].terminate()
    it.reached("close-pod-0")
    it.goes_on(2)  # the others, while it cannot close its files
    assert alive(worker_0)
    it.open("close-pod-0")
    assert it.pods[0].wait(30) == 143, it.log(0)
    it.start(0)
    it.goes_on(3)
    worker_0 = it.worker(0)

    assert it.stops(2) < GRACE_S / 2
    it.goes_on(2)  # the others, without it

    os.kill(it.worker(1), signal.SIGTERM)  # a worker alone: its pod starts another
    it.goes_on(1)
    it.goes_on(2)

    it.shut("load-pod-2")
    it.start(2)
    it.reached("load-pod-2")
    assert it.stops(1) < GRACE_S / 2
    it.open("load-pod-2")
    it.goes_on(2)
    assert it.worker(0) == worker_0

    for pid in (it.pods[0].pid, worker_0):
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    worker = it.worker(2)
    assert it.stops(2) < GRACE_S + 1 and not alive(worker)
    it.pods[0].send_signal(signal.SIGCONT)
    os.kill(worker_0, signal.SIGCONT)
    it.goes_on(1)
    assert it.stops(0) < GRACE_S
    it.check()
    lines, alone = it.steps(), tmp_path / "alone"
    done = load_newest(it.folder)
    assert done and done.step == lines[-1]["step"]
    flags = (*flags, "--steps", str(done.step), "--data", str(corpus), "--run-dir", str(alone))
    train(1, *SMALL, *flags)
    check_same_lines(lines, list(history(alone)))
    assert state_fp(done.tensors) == state_fp(load_newest(alone).tensors)


def test_stops_and_kills_until_the_last_save_change_no_bit(job, corpus, tmp_path):
    """A pod is stopped while another one loads, a worker is killed in an evaluation, and rank 0 in
    the last save: all pods exit with 0, and the run has the bits of one process."""
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
