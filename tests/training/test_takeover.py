"""A new rank 0 has the books as the lost one would have had them, be the disk there or not."""

import json
import time
from types import SimpleNamespace

import pytest
from support.failing_disk import Disk

from gptddp.distributed.members import View
from gptddp.errors import Superseded
from gptddp.run import lines
from gptddp.run.history import history, read_ledger
from gptddp.training.life import Life
from gptddp.training.takeover import Takeover

LOST = [{"rank": 0, "pod": "pod-0", "how": "its process died of SIGKILL"}]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Of the run directory; no rank 0 waits long for it."""
    settle = lines.Lines.settle
    monkeypatch.setattr(lines.Lines, "settle", lambda it, s: settle(it, min(s, 0.05)))
    monkeypatch.setattr(lines, "RETRY_S", 0.02)
    return Disk(tmp_path / "run", monkeypatch.setattr)


def lose_rank_0(life: Life) -> None:
    """The books are another process's that was killed; this rank follows it, and begins its own."""
    books, life.recorder = life.recorder, None
    for it in (books.log, books.ledger):
        it._lines.clear(), it._unsynced.clear()
        it.close()
    books.lease.close()
    about = {"world_size": 1, "nodes": 1, "pods": [""], "lost": LOST, "joined": [], "pause_s": 0.2}
    about["machines"] = life.machines
    spent = {"phases": life.spent.by_phase(), "since_s": 0.0, "at": time.time()}
    event = {"event": "world", "generation": life.generation, "time": time.time()}
    event |= {"step": life.step, **about, **spent}
    life.worlds._take_over(event, View(2, "quorum", (), ()))
    life.worlds.takeover.join()


def test_rank_0_lost_again_and_again_in_one_outage_leaves_no_gap(run, disk, tmp_path, monkeypatch):
    """Twice while the disk is full, once when it works: the log has every step, and the ledger how
    all books begin and end, as each rank keeps that until it is on the disk."""
    agree, plan = Life.agree, {3: "ENOSPC", 7: "ENOSPC", 9: None}

    def agreed(life, batch):
        if life.step == 2:
            disk.turn("ENOSPC")
        if life.step in plan:
            disk.turn(plan.pop(life.step))
            lose_rank_0(life)
        return agree(life, batch)

    monkeypatch.setattr(Life, "agree", agreed)
    assert run("--steps", "12") == 0 and not plan
    assert [line["step"] for line in history(tmp_path / "run")] == list(range(1, 13))
    events = read_ledger(tmp_path / "run")
    books = [("start", 1)]
    for generation in (1, 2, 3):
        books += [(it, generation + (it != "end")) for it in ("end", "start", "world")]
    kept = [(event["event"], event["generation"]) for event in events]
    assert [it for it in kept if it[0] in ("start", "end", "world")] == books
    ends = [event for event in events if event["event"] == "end"]
    assert all(end["cause"].endswith("rank 0 (pod-0): its process died of SIGKILL") for end in ends)
    assert [end["step"] for end in ends] == [3, 7, 9]


def test_what_is_left_out_while_the_books_are_taken_over_is_in_them(run, tmp_path, monkeypatch):
    """A life that begins at an older checkpoint would read it, and get other rows."""
    next_batch = Life.next_batch

    def batch(life):
        if life.step == 3 and life.generation == 1:
            lose_rank_0(life)
            life.quarantine(SimpleNamespace(bad=0))
            life.generation = 0  # once
        return next_batch(life)

    monkeypatch.setattr(Life, "next_batch", batch)
    assert run("--steps", "5") == 0
    (found,) = (it for it in read_ledger(tmp_path / "run") if it["event"] == "quarantine")
    assert (found["generation"], found["step"], found["row_groups"]) == (2, 3, [0])


def test_a_rank_0_that_stood_does_not_begin_the_books_of_another(run, tmp_path, monkeypatch):
    """It had read which generation is next, and another has taken lease and generation since."""
    agree, origin = Life.agree, Takeover._origin

    def agreed(life, batch):
        if life.step == 3:
            lose_rank_0(life)
        return agree(life, batch)

    def stood(takeover):
        found = origin(takeover)
        lease = tmp_path / "run" / "lease.json"
        lease.write_text(json.dumps(json.loads(lease.read_text()) | {"holder": "another"}))
        return found

    monkeypatch.setattr(Life, "agree", agreed)
    monkeypatch.setattr(Takeover, "_origin", stood)
    assert run("--steps", "5") == Superseded.exit_code
    starts = [it["generation"] for it in read_ledger(tmp_path / "run") if it["event"] == "start"]
    assert starts == [1] and not list((tmp_path / "run").glob("log.2.*"))


def test_an_evaluation_that_another_world_brings_is_logged(run, tmp_path, monkeypatch):
    """This rank was cut off in it, after it had logged the step; another was not."""
    next_batch = Life.next_batch

    def batch(life):
        if life.step == 3 and "val_loss" not in life.line:
            life.line |= {"val_loss": 1.5, "val_bpb": None}  # as `compare` does
            life.go_on(moved=True)
        return next_batch(life)

    monkeypatch.setattr(Life, "next_batch", batch)
    assert run("--steps", "5") == 0
    assert [it.get("val_loss") for it in history(tmp_path / "run", 3, 3)] == [1.5]
