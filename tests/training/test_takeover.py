"""A new rank 0 has the books as the lost one would have had them, be the disk there or not."""

import time
from types import SimpleNamespace

import pytest
from support.failing_disk import Disk

from gptddp.distributed.members import LeaseAsked, View
from gptddp.run import lines
from gptddp.run.history import history, read_ledger
from gptddp.run.lease import Claim
from gptddp.training.life import Life
from gptddp.training.worlds import Worlds

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


def test_who_has_taken_the_lease_for_a_view_that_came_to_nothing_does_not_wait_for_itself(tmp_path):
    """It renews that lease: as the proof for the next view it would wait for ever. A minority lets
    it go."""
    world = SimpleNamespace(job="job", life="life")
    it = object.__new__(Worlds)
    it._life = SimpleNamespace(
        recorder=None, world=world, config=SimpleNamespace(run_dir=str(tmp_path))
    )
    it.takeover, it._lease = None, Claim(tmp_path, "job", "life").poll(0.0)
    assert it._prove(LeaseAsked(2, "tie")).held(0.0) is it._lease is not None
    assert it._prove(LeaseAsked(3, "minority")).held(0.0) is it._lease is None
