"""Signals to pods and workers of a real job: who leaves, with which code, and what is not lost."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked import LAUNCH, Forked, train
from support.local_jobs import alive, until
from support.same_bits import check_same_bits, check_same_lines
from support.toy import SMALL
from support.trainer_patches import patch_here

from gptddp.checkpoint import snapshot
from gptddp.checkpoint.load import load_newest
from gptddp.distributed.replicas import state_fp
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
_warm_up = warm_up
def warm_up(*args):
    gate("load-" + os.environ["POD_NAME"])
    _warm_up(*args)
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
from gptddp.checkpoint import store
_commit = store.commit
def commit(*args):
    if times("last_save", 1):
        os.kill(os.getpid(), signal.SIGKILL)
    return _commit(*args)
store.commit = commit
"""


class Job:
    """Launchers as the operator starts them, an address each; exits are the test's."""

    def __init__(
        self,
        fork: Callable[..., Forked],
        folder: Path,
        corpus: Path,
        slot: int,
        code: str,
        flags: tuple[str, ...],
    ) -> None:
        self.fork = fork
        self.folder, self.patch, self.run = folder, folder / "patch", folder / "run"
        self.network = f"127.{10 + os.getpid() % 200}.{200 + slot}"
        self.code = patch_here(self.patch, code) + LAUNCH
        self.flags = [*SMALL, "--data", str(corpus), "--run-dir", str(self.run), *flags]
        self.pods: dict[int, Forked] = {}

    def start(self, *pods: int) -> None:
        for i in pods:
            memory = self.folder / f"memory-{i}"
            memory.mkdir(exist_ok=True)
            env = {
                "POD_NAME": f"pod-{i}",
                "POD_ADDRESS": f"{self.network}.{100 + i}",
                "PET_NNODES": f"2:{PODS}",
                "PET_NPROC_PER_NODE": "1",
                "PET_RDZV_ID": "job",
                "PET_RDZV_ENDPOINT": f"{self.network}.100:23112",
                "GPTDDP_GRACE_S": str(GRACE_S),
                "GPTDDP_MEMORY": str(memory),
            }
            log = self.folder / f"{i}.log"
            self.pods[i] = self.fork(self.code, *self.flags, env=os.environ | env, stderr=log)

    def steps(self, world_size: int) -> int:
        """How many steps are done, if the last was done by that many."""
        lines = list(history(self.run)) if self.run.exists() else []
        return lines[-1]["step"] if lines and lines[-1]["world_size"] == world_size else 0

    def goes_on(self, world_size: int) -> int:
        """Wait for two more steps, by that many."""
        begin = max([line["step"] for line in history(self.run)], default=0)
        return until(lambda: (n := self.steps(world_size)) > begin + 1 and n, timeout_s=60)

    def worker(self, i: int) -> int:
        return int(until((self.patch / f"pod-{i}").read_text))  # it is just being written

    def close(self, gate: str) -> None:
        (self.patch / f"{gate}.reached").unlink(missing_ok=True)
        (self.patch / f"{gate}.closed").touch()

    def open(self, gate: str) -> None:
        (self.patch / f"{gate}.closed").unlink()

    def reached(self, gate: str) -> None:
        until((self.patch / f"{gate}.reached").exists, timeout_s=60)

    def log(self, i: int) -> str:
        return (self.folder / f"{i}.log").read_text()

    def stops(self, i: int) -> float:
        """Seconds until this pod, told to stop, has exited with 143."""
        begin = time.monotonic()
        self.pods[i].terminate()
        assert self.pods[i].wait(30) == 143, self.log(i)
        return time.monotonic() - begin

    def check(self) -> None:
        """No step was lost: each is logged once, and no life began with steps to do again."""
        starts = [event for event in read_ledger(self.run) if event["event"] == "start"]
        assert [start["redo"] for start in starts] == [0] * len(starts)


@pytest.fixture
def job(corpus, tmp_path, forked):
    """job(slot, *flags, code) -> a Job of which nothing outlives the test."""

    def begin(slot: int, *flags: str, code: str = SLOW) -> Job:
        return Job(forked, tmp_path, corpus, slot, code, flags)

    return begin


def test_pods_and_workers_that_are_stopped_one_by_one_cost_no_step(job, corpus, tmp_path):
    """A pod, a worker, a pod in a re-form, a pod whose host and peer hang: all in one job. Its
    steps and what it leaves in memory are those of one process, bit for bit."""
    flags = ("--eval-every", "100000", "--final-lr", "1")  # the rate does not depend on --steps
    it = job(1, "--steps", "100000", *flags, code=SLOW + LOAD)
    it.start(0, 1, 2)
    until(lambda: it.steps(3) > 3, timeout_s=60)

    assert it.stops(2) < GRACE_S / 2
    it.goes_on(2)  # the others, without it

    os.kill(it.worker(1), signal.SIGTERM)  # a worker alone: its pod starts another
    it.goes_on(2)
    it.start(2)
    it.goes_on(3)

    it.close("load-pod-0")  # the next life begins slowly, with a state that is in memory alone
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
    left = snapshot.read(snapshot.path_of(it.folder / "memory-1", it.run))
    lines, alone = list(history(it.run)), tmp_path / "alone"
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
    it.close("load-pod-1")
    it.close("evaluation-pod-1")
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
    assert (it.patch / "last_save.0").exists()
    lines = list(history(it.run))
    assert [line["step"] for line in lines if "val_loss" in line] == [6, 12]
    alone = tmp_path / "alone"
    train(1, *SMALL, "--data", str(corpus), "--run-dir", str(alone), *flags)
    check_same_bits(it.run, alone)
    assert list((it.run / "checkpoints").glob("step-000000000012.*/manifest.json"))
    it.check()
