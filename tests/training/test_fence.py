"""Who comes late commits nothing: fault 28, and the late writer of faults 13 and 15."""

import itertools
import json
import os
import time

import torch
from support.forked import ranks
from support.toy import SMALL
from support.waiting_writer import Writer

from gptddp.checkpoint import retention, store
from gptddp.checkpoint.load import load_newest
from gptddp.errors import Superseded
from gptddp.run import lease
from gptddp.run.history import read_ledger
from gptddp.training import life

# A lease of another life on another machine.
OTHER = {"owner": "another life", "holder": "x", "job": "other", "host": "there"}
OTHER |= {"space": "elsewhere", "pid": 1, "started": 1}


def state(step):
    return {"x": torch.full((10,), float(step))}


def test_a_late_commit_after_the_last_look_never_wins(tmp_path):
    """A newer life begins between the look and the rename: its own checkpoint is the newest, and
    once it has one, what the late writer has written is gone."""

    def newer_life(step):
        assert Writer(tmp_path, 2).save(step, state(step), {}).error is None

    late = Writer(tmp_path, 1)  # nobody could have told it
    assert late.save(9, state(9), {}).error is None
    newer_life(3)
    assert store.order(store.names(tmp_path)[0]) == (2, 3) and load_newest(tmp_path).step == 3

    def another_life():
        retention.discard_unfinished(tmp_path)  # as it begins
        Writer(tmp_path, 3).save(4, state(4), {})

    late = Writer(tmp_path, 2, fence=another_life)
    assert "No such file" in late.save(10, state(10), {}).error
    assert [store.order(name) for name in store.names(tmp_path)] == [(3, 4), (2, 3), (1, 9)]


def test_nothing_is_committed_without_the_lease(tmp_path):
    """A save that is in flight when another takes over is no checkpoint, and says why."""
    mine, held = lease.Claim(tmp_path, "job", "life 1").poll(0), []

    def taken():
        held.append(lease.Claim(tmp_path, "job", "life 2", ["life 1"]).poll(0))

    writer = Writer(tmp_path, 1, before_commit=taken, fence=mine.check)
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


def test_the_ranks_wait_together_for_a_run_that_another_has(corpus, tmp_path):
    """However long it is renewed: no collective times out, and the log says who has it."""
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


def test_a_life_that_has_lost_the_run_leaves_its_state(run, tmp_path, monkeypatch):
    """The job that has taken over may end before it has saved anything: no step is lost then."""
    agree, calls = life.agree, itertools.count(1)
    path = tmp_path / "run/lease.json"

    def taken(*args):
        if next(calls) == 4:
            path.write_text(json.dumps(OTHER))
            time.sleep(0.5)
        return agree(*args)

    monkeypatch.setattr(lease, "PERIOD_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(life, "agree", taken)
        assert run("--steps", "6") == Superseded.exit_code
    path.unlink()
    assert run("--steps", "6") == 0
    start = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"][-1]
    assert (start["source"], start["step"], start["redo"]) == ("memory", 4, 0)
