"""While the disk takes nothing, log and ledger are in every rank's memory, until they are on it."""

import logging
from types import SimpleNamespace

import pytest
import torch
from support.failing_disk import Disk
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import snapshot
from gptddp.errors import LifeLost
from gptddp.run import lines
from gptddp.run.history import Ledger, RunLog, history, read_ledger
from gptddp.run.progress import Progress
from gptddp.training import live_state
from gptddp.training.recorder import Recorder


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Of the run directory; no life waits long for it."""
    settle = lines.Lines.settle
    monkeypatch.setattr(lines.Lines, "settle", lambda it, s: settle(it, min(s, 0.05)))
    monkeypatch.setattr(lines, "RETRY_S", 0.02)
    return Disk(tmp_path / "run", monkeypatch.setattr)


def test_rank_0_lost_again_and_again_in_one_outage_leaves_no_gap(run, disk, tmp_path):
    """After three losses while the disk is full, the log has every step and the ledger every life
    with its end: what was taken over from memory is handed on until it is on the disk."""
    lose_a_peer(run, "--steps", "12", at=3)
    disk.turn("ENOSPC")
    for _ in range(3):
        lose_a_peer(run, "--steps", "12", at=3)
    assert [line["step"] for line in history(tmp_path / "run")] == [1, 2]
    assert [event["event"] for event in read_ledger(tmp_path / "run")] == ["start"]
    disk.turn(None)
    assert run("--steps", "12") == 0
    assert [line["step"] for line in history(tmp_path / "run")] == list(range(1, 13))
    events = read_ledger(tmp_path / "run")
    lives = [(e["event"], e["generation"]) for e in events if e["event"] in ("start", "end")]
    ends = [("end", 1), ("end", 2), ("end", 3), ("end", 4)]
    assert lives[1:] == [it for end in ends for it in (end, ("start", end[1] + 1))]
    causes = [event["cause"] for event in events if event["event"] == "end"]
    assert all("Connection closed by peer" in cause for cause in causes)


def left(tmp_path):
    (path,) = (tmp_path / "memory").iterdir()
    return snapshot.read(path)


def test_memory_carries_no_more_than_the_disk_lacks(run, disk, tmp_path, monkeypatch):
    """What is on the disk is dropped by every rank: rank 0 tells the others in each step."""
    monkeypatch.setattr(RunLog, "sync_every", 1)
    monkeypatch.setattr(lines, "WAIT_S", 60.0)
    lose_a_peer(run, "--steps", "12", at=5)
    assert [line["step"] for line in left(tmp_path).lines] == [4]  # not asked about any more
    assert left(tmp_path).events == []
    monkeypatch.setattr(lines, "WAIT_S", 0.01)
    disk.turn("EROFS")
    lose_a_peer(run, "--steps", "12", at=3)
    assert [line["step"] for line in left(tmp_path).lines] == [4, 5, 6]
    kinds = [event["event"] for event in left(tmp_path).events]
    assert kinds == ["end", "start", "recovered"]


def test_every_rank_hands_on_what_rank_0_had(tmp_path):
    """One that writes no log: the lines and events that it was told, until they are on the disk."""
    origin = SimpleNamespace(run_id="run", generation=4, step=20)
    live = live_state.LiveState(tmp_path / "s", origin, SimpleNamespace(by_phase=dict, since_s=0.0))
    start, found = ({"event": kind, "time": 1.0, "generation": 4} for kind in ("start", "found"))

    def handed_on(step: int) -> tuple[list[int], list[str]]:
        live.keep({"step": step})
        live.mark_whole({"w": torch.zeros(4)}, Progress(step=step))
        live.leave_snapshot("a peer is lost")
        it = snapshot.read(tmp_path / "s")
        return [line["step"] for line in it.lines], [event["event"] for event in it.events]

    live.take_over({step: {"step": step} for step in (19, 20)}, [])
    live.begun([start])
    live.forget(0)
    assert handed_on(21) == ([19, 20, 21], ["start"])
    live.forget(20)  # they were written before the events
    assert handed_on(22) == ([21, 22], ["start"])
    live.forget(21)
    assert handed_on(23) == ([22, 23], [])
    live.keep_event(found, 23)
    live.forget(23)
    assert handed_on(24) == ([24], ["found"])
    live.forget(24)
    assert handed_on(25) == ([25], [])


def test_an_outage_beyond_the_memory_is_told_twice(run, disk, tmp_path, monkeypatch, caplog):
    """When lines are dropped, and by the life that finds that the log lacks them."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(live_state, "MOST_LINES", 3)
    lose_a_peer(run, "--steps", "12", at=3)
    disk.turn("EDQUOT")
    lose_a_peer(run, "--steps", "12", at=7)
    assert [line["step"] for line in left(tmp_path).lines] == [6, 7, 8]
    assert caplog.text.count("the log will lack steps from 1 on") == 1
    disk.turn(None)
    assert run("--steps", "12") == 0
    assert caplog.text.count("lacks step 5, and maybe some before it") == 1
    steps = [line["step"] for line in history(tmp_path / "run")]
    assert steps == [1, 2, *range(6, 13)]


def test_a_life_that_is_lost_as_it_begins_hands_on_all(run, disk, tmp_path, monkeypatch):
    """Rank 0 is lost while it waits for the disk, before the first step: what the life had from
    memory is in what it leaves."""
    lose_a_peer(run, "--steps", "12", at=3)
    disk.turn("ENOSPC")
    lose_a_peer(run, "--steps", "12", at=3)
    before = left(tmp_path)
    assert [line["step"] for line in before.lines] == [1, 2, 3, 4] and len(before.events) == 3

    def lost(*args):
        raise RuntimeError("gloo: Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(Recorder, "begin", lost)
        assert run("--steps", "12") == LifeLost.exit_code
    assert left(tmp_path).generation == 3
    assert (left(tmp_path).lines, left(tmp_path).events) == (before.lines, before.events)
    disk.turn(None)
    assert run("--steps", "12") == 0
    assert [line["step"] for line in history(tmp_path / "run")] == list(range(1, 13))


def test_no_step_is_logged_before_the_start_of_its_life(run, tmp_path, monkeypatch):
    """Nor one that memory has kept: a ledger that lacks the start of a life has lost its end."""
    lose_a_peer(run, "--steps", "12", at=3)
    (tmp_path / "run/log.1.jsonl").unlink()
    append = Ledger.append

    def killed(ledger, event):
        if event["event"] == "start":
            raise KeyboardInterrupt
        append(ledger, event)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Ledger, "append", killed)
        run("--steps", "12")
    assert not (tmp_path / "run/log.2.jsonl").exists()
    assert run("--steps", "12") == 0
    assert [line["step"] for line in history(tmp_path / "run")] == list(range(1, 13))


def without_evaluation(tmp_path):
    """The log of the first life, as if it had been stopped before it could evaluate."""
    log = tmp_path / "run/log.1.jsonl"
    log.write_text(log.read_text().replace('"val_loss"', '"was_loss"'))


def test_an_evaluation_is_handed_on_too(run, disk, tmp_path):
    """Where the log has the step, but not its evaluation, the line is written again: by the next
    life, or the one after it if the disk takes nothing meanwhile."""
    flags = ("--eval-every", "2")
    assert run("--steps", "2", *flags) == 0
    without_evaluation(tmp_path)
    disk.turn("ENOSPC")
    lose_a_peer(run, "--steps", "6", *flags, at=3)
    disk.turn(None)
    assert run("--steps", "6", *flags) == 0
    assert ["val_loss" in line for line in history(tmp_path / "run")] == [False, True] * 3
