"""A late writer commits nothing: trainings that are stopped, killed, or started twice.

Fault 28 of the fault table, and the late writer of faults 13 and 15.
"""

import json
import os
import signal
import time

import pytest
import torch
from support.forked import TRAIN, ranks
from support.toy import SMALL
from support.waiting import until
from support.waiting_writer import Writer

from gptddp.checkpoint import retention, store
from gptddp.checkpoint.load import load_newest
from gptddp.errors import Superseded
from gptddp.run import lease
from gptddp.run.history import history, read_ledger

# A lease of another life on another machine.
OTHER = {"owner": "another life", "holder": "x", "job": "other", "host": "there"}
OTHER |= {"space": "elsewhere", "pid": 1, "started": 1}


def state(step):
    return {"x": torch.full((10,), float(step))}


def test_a_late_commit_after_the_last_look_never_wins(tmp_path):
    """If a newer life begins between the look and the rename, its own checkpoint is the newest, and
    the unfinished save of a late writer is discarded."""

    def newer_life(step):
        assert Writer(tmp_path, 2).save(step, state(step), {}).error is None

    late = Writer(tmp_path, 1)  # the writer cannot know of the newer life
    assert late.save(9, state(9), {}).error is None
    newer_life(3)
    assert store.order(store.names(tmp_path)[0]) == (2, 3) and load_newest(tmp_path).step == 3

    def another_life():
        retention.discard_unfinished(tmp_path)  # as it begins
        Writer(tmp_path, 3).save(4, state(4), {})

    late = Writer(tmp_path, 2, before_commit=another_life)
    assert "No such file" in late.save(10, state(10), {}).error
    assert [store.order(name) for name in store.names(tmp_path)] == [(3, 4), (2, 3), (1, 9)]


def test_nothing_is_committed_without_the_lease(tmp_path):
    """A save in flight while another life takes over is no checkpoint, and reports the reason."""
    mine, held = lease.Claim(tmp_path, "job", "life 1").poll(0), []

    def taken():
        held.append(lease.Claim(tmp_path, "job", "life 2", ["life 1"]).poll(0))
        mine.check()

    writer = Writer(tmp_path, 1, before_commit=taken)
    saved = writer.save(1, state(1), {})
    held[0].close()
    assert isinstance(writer.failure, Superseded) and "has taken over the run" in saved.error
    assert load_newest(tmp_path) is None


IMPATIENT = """
import sys
from gptddp import train
from gptddp.distributed import connect
from gptddp.training import entry
newest_state, connect.TIMEOUT_S = entry.newest_state, 2.0
def impatient(config, dataset, world, clock):
    world.set_timeout(0)  # from here on no rank waits longer than two seconds for another
    return newest_state(config, dataset, world, clock)
entry.newest_state = impatient
sys.exit(train.main(sys.argv[1:]))
"""


def test_the_ranks_wait_together_for_a_run_that_another_life_holds(corpus, tmp_path):
    """However long the lease is renewed, no collective times out, and the log names the holder."""
    (tmp_path / "lease.json").write_text(json.dumps(OTHER | {"job": "job at a:1"}))
    env = {"TORCHELASTIC_RUN_ID": "job", "PET_RDZV_ENDPOINT": "a:1"}
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path), "--steps", "2"]
    both = ranks(2, *flags, code=IMPATIENT, env=os.environ | env)
    said, end, renewals = "", time.monotonic() + 60, 0
    try:
        while renewals < 15:  # three seconds
            assert time.monotonic() < end, said
            os.utime(tmp_path / "lease.json")
            time.sleep(0.2)
            said += both[0].stderr.read()
            renewals += "waiting as long as job job at a:1" in said
        assert [process.poll() for process in both] == [None, None]
        (tmp_path / "lease.json").unlink()
        assert [process.wait(60) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
    assert [event["event"] for event in read_ledger(tmp_path)].count("start") == 1


SOON = "from gptddp.run import lease; lease.EXPIRY_S = 4.0\n"  # the lease of a stopped life
LATE = """
import os, signal, sys, time
from gptddp import train
from gptddp.run.history import RunLog
sync = RunLog.sync
def stopping(log):
    os.kill(os.getpid(), signal.SIGSTOP)  # the manifest is written, the name is not given
    time.sleep(0.5)  # the main thread may take the signal, and this one would go on till then
    sync(log)
RunLog.sync = stopping
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture
def training(corpus, tmp_path, forked):
    """training(*flags, code, job) -> a training process on the run directory `run`.

    Processes of one job are workers of one pod, whose launcher keeps the folder `job`.
    """

    def begin(*flags, code=TRAIN, job=""):
        places = ["--data", str(corpus), "--run-dir", str(tmp_path / "run")]
        env = {"TORCHELASTIC_RUN_ID": job, "PET_RDZV_ENDPOINT": "a:1"} if job else {}
        if job:
            (tmp_path / job).mkdir(exist_ok=True)
            env["GPTDDP_VERDICT"] = str(tmp_path / job / "verdict.json")
        return forked(code, *SMALL, *places, *flags, env=os.environ | env)

    return begin


def stopped(process):
    """Has the process stopped itself?"""
    with open(f"/proc/{process.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def test_a_writer_stopped_before_its_rename_ends_by_itself(tmp_path, training):
    """A life that is stopped between manifest and rename, and continues beside a newer life,
    commits nothing, and ends with the reason."""
    late = training("--steps", "100000", "--checkpoint-every", "0.1", code=LATE, job="job")
    until(lambda: stopped(late))
    run = tmp_path / "run"
    reached = max(line["step"] for line in history(run))
    follower = training(
        "--steps", "100000", "--checkpoint-every", "0.5", code=SOON + TRAIN, job="job"
    )
    until(lambda: store.names(run))
    late.send_signal(signal.SIGCONT)
    err = late.communicate(timeout=60)[1]
    assert late.returncode == 1, err
    assert "has taken over the run" in err
    assert "Traceback" not in err and reached > 0
    assert {store.order(name)[0] for name in store.names(run)} == {2}
    follower.terminate()
    assert "is saved" in follower.communicate(timeout=60)[1] and follower.returncode == 143
    assert not (run / "lease.json").exists() and load_newest(run).generation == 2


def test_a_second_training_on_a_run_is_refused(tmp_path, training):
    """The second training of a run ends with exit code 2, and the first continues. After the first
    is killed, the next continues at once."""
    first = training("--steps", "100000", "--checkpoint-every", "0.5")
    until(lambda: store.names(tmp_path / "run"))
    second = training("--steps", "100000")
    err = second.communicate(timeout=60)[1]
    assert second.returncode == 2 and f"(process {first.pid})" in err, err
    assert first.poll() is None
    first.kill()
    first.wait(timeout=60)  # a dying process still counts as alive
    third = training("--steps", "100000", "--log-every", "1")
    until(lambda: (tmp_path / "run/log.2.jsonl").exists())
    third.terminate()
    err = third.communicate(timeout=60)[1]
    assert third.returncode == 143 and "waiting" not in err and "life 2: from step-" in err
