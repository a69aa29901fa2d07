"""Signals to one training process in every phase: the exit code, and no finished step is lost."""

import os
import re
import signal
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.toy import SMALL
from support.trainer_patches import patch_here
from support.waiting import until

from gptddp.run.history import history, read_ledger
from gptddp.training import entry

START = "import sys; from gptddp.train import main; sys.exit(main())"
# Python runs no signal handler in a thread that waits for this, as in a collective in C++.
STUCK = """
def stuck(what):
    import ctypes
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    (HERE / f"{what}.reached").touch()
    lock(mutex)
"""
LOAD = """
def settle_buckets(*args):
    stuck("here")
"""
COMMIT = """
from gptddp.run.history import RunLog
_sync = RunLog.sync
def sync(log):
    if times("commit", 1):  # all of the checkpoint is written but its name
        stuck("here")
    _sync(log)
RunLog.sync = sync
"""
STEP = """
_forward_backward = forward_backward
def forward_backward(ddp, batch, targets, step, *rest):
    if step == 5 and times("forward", 1):
        gate("here")
    return _forward_backward(ddp, batch, targets, step, *rest)
"""
FORWARD = STEP.replace("gate", "stuck")
EVALUATION = """
from gptddp.training import life
_evaluate = life.evaluate
def evaluate(net, rows, tokenizer, c, world, stop):
    def slow():
        times("micro_batches", 1000)
        if times("evaluation", 1):
            gate("here")
        return stop()
    return _evaluate(net, rows, tokenizer, c, world, slow)
life.evaluate = evaluate
"""


class Run:
    """A training process with an injected fault."""

    def __init__(self, forked, folder, corpus, code="", grace_s="60"):
        self.forked, self.folder, self.run = forked, folder / "patch", folder / "run"
        self.code = patch_here(self.folder, STUCK + code) + START
        self.env = os.environ | ({"GPTDDP_GRACE_S": grace_s} if grace_s else {})
        self.args = [*SMALL, "--data", str(corpus), "--run-dir", str(self.run)]
        (self.folder / "here.closed").touch()

    def start(self, *flags):
        return self.forked(self.code, *self.args, *flags, env=self.env)

    def reached(self):
        until((self.folder / "here.reached").exists, timeout_s=60)

    def open(self):
        (self.folder / "here.closed").unlink()

    def finish(self, *flags):
        process = self.start(*flags)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        return [event for event in read_ledger(self.run) if event["event"] == "start"][-1]


@pytest.fixture
def training(tmp_path, corpus, forked):
    """training(code, grace_s) -> a Run whose processes have this code in gptddp.train."""
    return lambda code="", **kind: Run(forked, tmp_path, corpus, code, **kind)


def ended(process, timeout_s=20):
    """Exit code and stderr."""
    return process.wait(timeout_s), process.stderr.read()


def test_a_process_without_a_state_exits_at_once(training):
    """A process that hangs in C while it loads does not wait for an unknown grace period."""
    run = training(LOAD, grace_s="")
    process = run.start("--steps", "10")
    run.reached()
    process.terminate()
    code, err = ended(process)
    assert code == 143 and "Traceback" not in err


def test_a_stop_is_agreed_on_between_two_steps_after_any_number_of_signals(training):
    """After two SIGTERMs the step is finished and committed, and the exit code is 143."""
    run = training(STEP)
    process = run.start("--steps", "10")
    run.reached()
    for _ in range(2):
        process.terminate()
        time.sleep(0.1)
    run.open()
    code, err = ended(process)
    assert code == 143, err
    assert "stopped after step 6: checkpoint step-000000000006.1 is saved" in err
    start = run.finish("--steps", "10")
    assert (start["step"], start["redo"]) == (6, 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_long_step_at_once(training, number, code):
    """The message of the first signal says that a second one does not wait."""
    run = training(STEP, grace_s="")
    process = run.start("--steps", "10")
    run.reached()
    process.send_signal(number)
    said = until(lambda: re.search(f"{number.name}: (.*)", process.stderr.read()))[1]
    assert said == "training stops after this step; a second signal stops it at once"
    assert process.poll() is None
    process.send_signal(number)
    assert ended(process)[0] == code
    assert not list((run.run / "checkpoints").glob("step-*"))


def test_a_hanging_process_exits_within_its_grace_period(training):
    """A process that hangs in C in step 6 ends in time, with exit code 143."""
    run = training(FORWARD, grace_s="10")  # of which it has 5 s
    process = run.start("--steps", "10")
    run.reached()
    process.terminate()
    begin = time.monotonic()
    code, err = ended(process)
    assert code == 143 and time.monotonic() - begin < 10, err
    assert "after SIGTERM: the main thread is busy" in err


def test_a_log_that_hangs_does_not_hold_up_a_stop(training):
    """The process ends with 143, and the saver commits the state without rank 0."""
    run = training(STEP + COMMIT, grace_s="10")
    process = run.start("--steps", "10")
    run.reached()
    process.terminate()
    run.open()
    begin = time.monotonic()
    code, err = ended(process)
    assert code == 143 and time.monotonic() - begin < 10, err
    assert "after SIGTERM: the main thread is busy" in err
    until(lambda: list((run.run / "checkpoints").glob("step-*")))
    start = run.finish("--steps", "10")
    assert (start["step"], start["redo"]) == (6, 0)


def test_the_next_life_repeats_an_interrupted_evaluation(training, forked, corpus, tmp_path):
    """A stop in the last evaluation gives 143; the next life has the val_loss of a whole run."""
    run = training(EVALUATION)
    process = run.start("--steps", "6")
    run.reached()
    process.terminate()
    time.sleep(0.2)
    run.open()
    code, err = ended(process)
    assert code == 143, err
    assert len(list(run.folder.glob("micro_batches.*"))) == 1  # and no other step
    assert not (run.run / "finished.json").exists()
    start = run.finish("--steps", "6")
    assert (start["step"], start["redo"]) == (6, 0)
    assert (run.run / "finished.json").exists()
    whole = tmp_path / "whole"
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(whole), "--steps", "6"]
    assert forked(START, *flags).wait(60) == 0
    keys = ("step", "loss", "val_loss", "val_bpb", "chain_fp")
    assert [[line.get(key) for key in keys] for line in history(run.run)] == [
        [line.get(key) for key in keys] for line in history(whole)
    ]


@pytest.mark.usefixtures("train_here")
@pytest.mark.parametrize(("launched", "code"), [(True, 143), (False, 0)])
def test_a_signal_in_the_last_moment_ends_a_worker_of_a_launcher(monkeypatch, launched, code):
    """After a signal the launcher expects a failure; without a launcher the run has succeeded."""
    monkeypatch.setattr(entry, "connect", lambda device: nullcontext(None))
    monkeypatch.setattr(entry, "begin", lambda config, world, stop: setattr(stop, "holds", True))
    monkeypatch.setattr(entry.environment, "members", lambda: Path("members") if launched else None)

    def finish(life):
        os.kill(os.getpid(), signal.SIGTERM)

    assert entry.main(finish, ["--data", "data", "--run-dir", "run"]) == code
