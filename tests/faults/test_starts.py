"""One read or write of a volume fails: each in turn, until a life has done a step."""

import errno
import json
import os
import shutil

import pytest
from support.failing_volume import Reads, Writes
from support.faulty_jobs import SHORT
from support.same_bits import FIELDS, SOME, check_same_bits

from gptddp import files
from gptddp.data import blocks
from gptddp.run import lines
from gptddp.run.history import history, read_ledger
from gptddp.training.recorder import Recorder

pytestmark = pytest.mark.skipif(SHORT, reason="takes minutes")
FLAGS = ("--final-lr", "1")  # the rate does not depend on --steps


def until_a_step(faults, monkeypatch) -> None:
    """Let no read or write fail once a step is recorded."""
    step = Recorder.step

    def stepping(*args) -> None:
        faults.on = False
        step(*args)

    monkeypatch.setattr(Recorder, "step", stepping)


def begin(kind: str, run, tmp_path) -> None:
    """Make a run with a checkpoint, or an empty one, and keep a copy."""
    if kind == "checkpoint":
        assert run(*FLAGS, "--steps", "3") == 0
    (tmp_path / "run").mkdir(exist_ok=True)
    shutil.copytree(tmp_path / "run", tmp_path / "kept")


def put_back(tmp_path) -> None:
    """Restore the run from the copy."""
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(tmp_path / "kept", tmp_path / "run")


def records(run) -> tuple[list, dict, str]:
    """All numbers of each step; the newest start; the run id in config.json."""
    found = [[line.get(k) for k in (*FIELDS, *SOME)] for line in history(run)]
    start = [event for event in read_ledger(run) if event["event"] == "start"][-1]
    return found, start, json.loads((run / "config.json").read_text())["run_id"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_single_failed_read_does_not_end_the_run(
    code, run, corpus, undisturbed, tmp_path, monkeypatch
):
    """EIO or ESTALE at any read of run directory or dataset before the first step: the run starts
    from the same state and has the same bits, or the life ends with an error that is retried."""
    monkeypatch.setattr(files, "RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(blocks, "RETRY_S", (0.0, 0.0))
    begin("checkpoint", run, tmp_path)
    reads = Reads(tmp_path / "run", corpus, setattr=monkeypatch.setattr)
    until_a_step(reads, monkeypatch)

    def again(at: int | None) -> list:
        put_back(tmp_path)
        with reads.failing(code, at=at):
            assert run(*FLAGS, "--steps", "6") == 0, at
        found, start, saved = records(tmp_path / "run")
        return [found, start["source"], start["step"], start["run_id"], saved]

    whole, number, over = again(None), len(reads.seen), 0
    check_same_bits(tmp_path / "run", undisturbed(*FLAGS, "--steps", "6"))
    assert whole[2] == 3 and number > 40
    for at in range(number):
        try:
            assert again(at) == whole, (at, reads.seen[at])
        except OSError as error:  # the command ends with code 1, and may be repeated
            assert files.may_pass(error), at
            over += 1
    assert over < number / 4


@pytest.mark.parametrize("kind", ["new", "checkpoint"])
@pytest.mark.parametrize("done", [False, True])
def test_a_single_failed_write_does_not_end_the_run(
    kind, done, run, undisturbed, tmp_path, monkeypatch, caplog
):
    """EIO at any write of the run directory, before or after the write is done: the run has the
    same bits and records, and the log reports what has failed."""
    monkeypatch.setattr(files, "RETRY_S", (0.0, 0.0))
    monkeypatch.setattr(lines, "RETRY_S", 0.01)
    begin(kind, run, tmp_path)
    writes = Writes(tmp_path / "run", setattr=monkeypatch.setattr)
    until_a_step(writes, monkeypatch)

    def again(at: int | None) -> list:
        put_back(tmp_path)
        caplog.clear()
        with writes.failing(errno.EIO, at, done):
            assert run(*FLAGS, "--steps", "6") == 0, at
        found, start, saved = records(tmp_path / "run")
        events = [event["event"] for event in read_ledger(tmp_path / "run")]
        assert saved == start["run_id"]
        return [found, events, start["source"], start["step"], sorted(os.listdir(tmp_path / "run"))]

    whole, number, silent = again(None), len(writes.seen), []
    check_same_bits(tmp_path / "run", undisturbed(*FLAGS, "--steps", "6"))
    assert number > 8
    for at in range(number):
        assert again(at) == whole, (at, writes.seen[at])
        if at < len(writes.seen) and "Input/output error" not in caplog.text:
            silent.append(writes.seen[at].replace(str(tmp_path / "run"), "").split())
    # a folder or file that exists need not be made; the ledger may be written in fewer calls
    assert all(it in (["mkdir"], ["open", "/lease.json"]) for it in silent), silent
