"""If rank 0 or the saver is killed during a save, the other one continues."""

import errno
import fcntl
import json
import os
import re
import signal
from types import SimpleNamespace

import pytest
import torch
from support.checkpoint_saver import loaded_step, state
from support.processes import alive
from support.waiting import until

from gptddp.checkpoint import store
from gptddp.checkpoint.load import load_newest
from gptddp.checkpoint.writer import Writer
from gptddp.errors import Superseded
from gptddp.run import lease
from gptddp.run.history import history, read_ledger

# A rank 0 that cannot write log and ledger, and is killed during its save.
RANK_0 = """
import sys, threading, time
from support.checkpoint_saver import state
from gptddp.checkpoint.writer import Writer
from gptddp.run.history import Ledger, RunLog
from gptddp.run.lease import Claim
run, step = sys.argv[1], int(sys.argv[2])
lease, ledger = Claim(__import__("pathlib").Path(run), "job", "life").poll(0), Ledger(run)
log = RunLog(run, 1, ledger)
for it in (ledger, log):
    it._put = lambda sync=False: time.sleep(999)
ledger.event("start", 1, step=0)
for done in (step - 1, step, step + 1):
    log.append({"step": done, "time": 1.0, "chain_fp": f"{done:016x}"})
def left():
    return {"lease": lease.me, "events": ledger.pending(), "lines": log.pending()}
def hang():
    print("asked", flush=True)
    time.sleep(999)
writer = Writer(run, 1, run_id="r", before_commit=hang, left=left)
writer.submit(step, state(step, 100_000_000), {"step": step}, {"batch_fp": "f"})
print(writer._saver, flush=True)
time.sleep(999)
"""


@pytest.fixture
def rank_0(tmp_path, forked):
    """A process of rank 0 that saves step 2; its attribute `saver` is its saver's process id."""
    process = forked(RANK_0, str(tmp_path), "2", stderr=tmp_path / "said")
    process.saver = int(until(lambda: re.search(r"^(\d+)\n", said(tmp_path), re.M))[1])
    return process


def said(run):
    """What rank 0 has written."""
    return (run / "said").read_text()


def end(process):
    process.kill()
    process.wait(60)
    until(lambda: not alive(process.saver))


@pytest.mark.parametrize("asked", [False, True])
def test_a_save_outlives_its_rank_0(tmp_path, rank_0, asked):
    """If rank 0 is killed at the start of a save or just before the rename, the checkpoint exists,
    log and ledger are complete, the lease is released, and the saver ends."""
    until(lambda: not asked or "asked" in said(tmp_path))
    end(rank_0)
    assert loaded_step(tmp_path) == 2
    assert [line["step"] for line in history(tmp_path)] == [1, 2]
    start, saved = read_ledger(tmp_path)
    assert start["event"] == "start" and saved["event"] == "checkpoint"
    assert (saved["name"], saved["batch_fp"]) == ("step-000000000002.1", "f")
    assert not (tmp_path / "lease.json").exists()


def test_a_saver_without_the_lease_commits_nothing(tmp_path, rank_0):
    """If another rank 0 gets the lease after the death of the first, the saver writes nothing."""
    until(lambda: "asked" in said(tmp_path))
    os.kill(rank_0.saver, signal.SIGSTOP)  # otherwise it commits before the takeover
    rank_0.kill()
    rank_0.wait(60)
    other = lease.Claim(tmp_path, "job", "life 2", ["life"]).poll(0)
    os.kill(rank_0.saver, signal.SIGCONT)
    until(lambda: not alive(rank_0.saver))
    assert not store.names(tmp_path) and not read_ledger(tmp_path) and not [*history(tmp_path)]
    other.check()
    other.release()


def test_a_life_on_the_same_machine_waits_for_the_saver(tmp_path, rank_0):
    """The next life gets the lease when the save is done, and loads the checkpoint of that save."""
    until(lambda: "asked" in said(tmp_path))
    claim = lease.Claim(tmp_path, "job", "life 2")
    with open(tmp_path / "ledger.jsonl", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the saver waits for it for up to a second
        rank_0.kill()
        rank_0.wait(60)
        until(lambda: json.loads((tmp_path / "lease.json").read_text())["pid"] == rank_0.saver)
        assert claim.poll(0.3) is None
    held = claim.poll(30)
    assert held and loaded_step(tmp_path) == 2
    held.release()


# -- within one process --------------------------------------------------------------------------


def save(writer, step, tensors=None):
    assert writer.submit(step, tensors or state(step), {}) and writer.wait(60)
    return SimpleNamespace(**{"error": None, **writer.poll()})


def test_a_killed_saver_is_an_error_and_the_next_save_works(tmp_path):
    """A saver may be killed while it is idle, while it writes, or just before the rename."""
    writer = Writer(tmp_path, 1)
    assert save(writer, 1).error is None
    first = writer._saver
    writer.before_commit = lambda: os.kill(writer._saver, signal.SIGKILL)
    error = save(writer, 2).error
    assert f"process {first}) has died of SIGKILL" in error and writer.trouble(0) == error
    assert isinstance(writer.failure, OSError) and not writer.has(2)
    writer.before_commit = lambda: None
    assert save(writer, 2).error is None and loaded_step(tmp_path) == 2 != first
    os.kill(writer._saver, signal.SIGKILL)
    assert "SIGKILL" in save(writer, 3).error
    assert save(writer, 3).error is None and loaded_step(tmp_path) == 3


def test_full_memory_is_an_error_of_the_save(tmp_path, monkeypatch):
    """A save without enough memory fails with the reason, and the next save works."""
    writer = Writer(tmp_path, 1)

    def full(*args):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert "Cannot allocate memory" in save(writer, 1).error
    assert save(writer, 1).error is None and loaded_step(tmp_path) == 1


def test_rank_0_allows_or_refuses_the_commit(tmp_path, capfd):
    """If rank 0 has lost the lease or cannot sync the log, the save fails and commits nothing."""
    writer = Writer(tmp_path, 1, run_id="r", keep=2)

    def lost():
        raise Superseded("another job has it")

    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "log.1.jsonl")

    writer.before_commit = lost
    assert save(writer, 1).error == "another job has it" and isinstance(writer.failure, Superseded)
    writer.before_commit = full
    assert "log.1.jsonl" in save(writer, 1).error and not store.names(tmp_path)
    writer.before_commit = lambda: None
    assert Writer(tmp_path, 1, run_id="other").submit(1, state(1), {})
    until(lambda: store.names(tmp_path))
    assert save(writer, 1).error is None
    assert "belongs to another run: it is set aside" in capfd.readouterr().err


def test_tensors_that_are_not_plain_are_saved(tmp_path):
    """A strided tensor, one of bfloat16 and an empty one come back with their values and types."""
    tensors = {"t": torch.rand(6, 4).t(), "b": torch.ones(3).bfloat16(), "e": torch.ones(0, 2)}
    assert save(Writer(tmp_path, 1), 1, tensors).error is None
    loaded = load_newest(tmp_path).tensors
    assert all(
        (loaded[name] == it).all() and loaded[name].dtype == it.dtype
        for name, it in tensors.items()
    )
