"""A new rank 0 writes the records that the lost rank 0 would have, with or without a disk."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest
from support.failing_disk import Disk
from support.processes import free_port
from support.waiting import until

from gptddp import files
from gptddp.distributed.members import LeaseAsked, View
from gptddp.errors import Superseded
from gptddp.run import lines
from gptddp.run.history import history, read_ledger
from gptddp.run.lease import Claim
from gptddp.training import scrapes, takeover
from gptddp.training.life import Life
from gptddp.training.recorder import Recorder
from gptddp.training.takeover import Takeover
from gptddp.training.worlds import Worlds

LOST = [{"rank": 0, "pod": "pod-0", "how": "its process died of SIGKILL"}]


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """The disk of the run directory; no rank 0 waits long for it."""
    settle = lines.Lines.settle
    monkeypatch.setattr(lines.Lines, "settle", lambda it, s: settle(it, min(s, 0.05)))
    monkeypatch.setattr(lines, "RETRY_S", 0.02)
    monkeypatch.setattr(takeover, "_RETRY_S", 0.02)
    return Disk(tmp_path / "run", monkeypatch.setattr)


def lose_rank_0(life: Life) -> None:
    """Act as if rank 0 was killed: this rank follows it, and begins other records."""
    records, life.recorder = life.recorder, None
    for it in (records.log, records.ledger):
        it._lines.clear(), it._unsynced.clear()
        it.close()
    records.lease.close()
    about = {"world_size": 1, "nodes": 1, "pods": [""], "lost": LOST, "joined": [], "pause_s": 0.2}
    about["machines"] = life.machines
    spent = {"phases": life.spent.by_phase(), "since_s": 0.0, "at": time.time()}
    event = {"event": "world", "generation": life.generation, "time": time.time()}
    event |= {"step": life.step, **about, **spent}
    life.worlds._take_over(event, View(2, "quorum", (), ()))


def at_step(monkeypatch, **what):
    """Call these functions with the life, before these steps (`step_3=`)."""
    agree, plan = Life.agree, {int(name.removeprefix("step_")): it for name, it in what.items()}

    def agreed(life, batch):
        if life.step in plan:
            plan.pop(life.step)(life)
        return agree(life, batch)

    monkeypatch.setattr(Life, "agree", agreed)
    return plan


def test_rank_0_lost_again_and_again_in_one_outage_leaves_no_gap(run, disk, tmp_path, monkeypatch):
    """After losses on a full disk and on a working one, the log has every step, and the ledger has
    the begin and end of all records, because each rank keeps them until they are on disk."""

    def full(life):
        disk.turn("ENOSPC")
        lose_rank_0(life)
        life.worlds.takeover.join()

    def works(life):
        disk.turn(None)
        lose_rank_0(life)
        life.worlds.takeover.join()

    step_2 = lambda life: disk.turn("ENOSPC")  # noqa: E731
    plan = at_step(monkeypatch, step_2=step_2, step_3=full, step_7=full, step_9=works)
    assert run("--steps", "12") == 0 and not plan
    assert [line["step"] for line in history(tmp_path / "run")] == list(range(1, 13))
    events = read_ledger(tmp_path / "run")
    records = [("start", 1)]
    for generation in (1, 2, 3):
        records += [(it, generation + (it != "end")) for it in ("end", "start", "world")]
    kept = [(event["event"], event["generation"]) for event in events]
    assert [it for it in kept if it[0] in ("start", "end", "world")] == records
    ends = [event for event in events if event["event"] == "end"]
    assert all(end["cause"].endswith("rank 0 (pod-0): its process died of SIGKILL") for end in ends)
    assert [end["step"] for end in ends] == [3, 7, 9]


def test_a_volume_that_fails_for_long_ends_no_new_rank_0(run, disk, tmp_path, monkeypatch):
    """A new rank 0 gets the records when the volume works again; the steps continue meanwhile."""
    monkeypatch.setattr(files, "RETRY_S", (0.01,))
    begin, failed = Recorder.begin, []

    def failing(records, *about):
        begin(records, *about)
        if records.origin.source == "memory" and not failed:  # fail once more, within the takeover
            failed.append(records)
            raise OSError(5, "Input/output error", "ledger.jsonl")

    monkeypatch.setattr(Recorder, "begin", failing)

    def lose(life):
        disk.turn("EIO")
        lose_rank_0(life)

    def heal(life):
        assert life.worlds.takeover.recorder() is None and life.worlds.takeover.is_alive()
        disk.turn(None)
        life.worlds.takeover.join()

    plan = at_step(monkeypatch, step_3=lose, step_9=heal)
    assert run("--steps", "12") == 0 and not plan
    assert [line["step"] for line in history(tmp_path / "run")] == list(range(1, 13))
    starts = [it for it in read_ledger(tmp_path / "run") if it["event"] == "start"]
    assert failed and [it["step"] for it in starts] == [0, 3, 3]


@pytest.mark.parametrize("harm", ["gone", "in the lease's place"])
def test_no_state_of_the_run_directory_stops_a_new_rank_0(
    run, disk, tmp_path, monkeypatch, caplog, harm
):
    """An error would end each new rank 0 in turn. A missing directory is created again."""
    monkeypatch.setattr(takeover, "_RETRY_S", 0.05)
    lease = tmp_path / "run/lease.json"

    def lose(life):
        if harm == "gone":
            shutil.rmtree(tmp_path / "run")
        else:
            lease.unlink(), lease.mkdir()
        lose_rank_0(life)

    def mend(life):
        if harm != "gone":
            until(lambda: "cannot take over the records yet" in caplog.text, "a word")
            lease.rmdir()
            life.worlds.takeover.join()

    plan = at_step(monkeypatch, step_3=lose, step_6=mend)
    assert run("--steps", "9") == 0 and not plan
    anew = "is missing: it is created again" in caplog.text
    steps = [line["step"] for line in history(tmp_path / "run")]
    assert anew == (harm == "gone") and steps == list(range(1, 10))  # memory has kept them
    starts = [it for it in read_ledger(tmp_path / "run") if it["event"] == "start"]
    assert starts[-1]["source"] == "memory"


def test_records_that_no_rank_knows_get_their_end(run, disk, tmp_path, monkeypatch):
    """A new rank 0 is lost after its `start`: the next one records its end, with its name."""

    def unheard(life):
        generation = life.generation
        lose_rank_0(life)
        life.worlds.takeover.join()
        life.recorder, life.worlds.takeover = life.worlds.takeover.recorder(), None
        life.recorder.ledger.sync()
        assert life.generation == generation
        lose_rank_0(life)
        life.worlds.takeover.join()

    at_step(monkeypatch, step_5=unheard)
    assert run("--steps", "8") == 0
    ends = [it for it in read_ledger(tmp_path / "run") if it["event"] == "end"]
    assert [it["generation"] for it in ends] == [1, 2]
    assert all("rank 0 (pod-0)" in it["cause"] for it in ends)


@pytest.mark.parametrize("how", ["tie", "minority"])
def test_a_lease_is_requested_during_a_takeover(run, disk, monkeypatch, how):
    """In a tie the takeover's lease is the answer; a minority gives up the records first.

    Records that are given up free the port of /metrics.
    """
    closed = []
    monkeypatch.setattr(scrapes.Scrapes, "close", lambda it: closed.append(it))

    def ask(life):
        lose_rank_0(life)
        takeover = life.worlds.takeover
        if how == "minority":
            takeover.join()
        proof = life.worlds._prove(LeaseAsked(7, how))
        end = time.monotonic() + 10.0
        while (lease := proof.held(0.1)) is None and how == "tie":
            assert time.monotonic() < end
        if how == "tie":
            assert lease is takeover.lease and life.worlds.takeover is takeover
            return takeover.join()
        # no other process takes it within its expiry
        assert lease is None and life.worlds.takeover is None and takeover.lease._over.is_set()
        assert len(closed) == 1
        takeover.lease.release()
        life.worlds._lease = proof.held(10.0)
        life.recorder = takeover.recorder()
        lose_rank_0(life)

    at_step(monkeypatch, step_4=ask)
    assert run("--steps", "8", "--metrics-port", str(free_port())) == 0


@pytest.mark.parametrize("learned", [False, True], ids=["decided here", "learned"])
def test_a_quarantine_during_a_takeover_is_recorded(run, tmp_path, monkeypatch, learned):
    """Without the record a life from an older checkpoint would get other rows. A rank that was
    interrupted in the decision learns of it with the state of another rank."""
    next_batch = Life.next_batch

    def batch(life):
        if life.step == 3 and life.generation == 1:
            lose_rank_0(life)
            taken = life.worlds.takeover
            life.worlds.takeover = None if learned else taken
            life.quarantine(SimpleNamespace(bad=0))
            life.worlds.takeover = taken
            life.generation = 0  # once
        return next_batch(life)

    monkeypatch.setattr(Life, "next_batch", batch)
    assert run("--steps", "5") == 0
    (found,) = (it for it in read_ledger(tmp_path / "run") if it["event"] == "quarantine")
    assert (found["generation"], found["step"], found["row_groups"]) == (2, 3, [0])


def test_a_stopped_rank_0_does_not_begin_the_records_of_another(run, tmp_path, monkeypatch):
    """A rank 0 that was stopped after it chose a generation ends if another has the lease."""
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


def test_an_evaluation_completed_by_another_rank_is_logged(run, tmp_path, monkeypatch):
    """A rank whose evaluation was interrupted logs the numbers of a rank that completed it."""
    next_batch = Life.next_batch

    def batch(life):
        if life.step == 3 and "val_loss" not in life.line:
            life.line |= {"val_loss": 1.5, "val_bpb": None}  # as `compare` does
            life.go_on(moved=True)
        return next_batch(life)

    monkeypatch.setattr(Life, "next_batch", batch)
    assert run("--steps", "5") == 0
    assert [it.get("val_loss") for it in history(tmp_path / "run", 3, 3)] == [1.5]


def test_a_lease_taken_for_a_view_that_was_not_formed_is_no_obstacle_to_its_holder(tmp_path):
    """Its holder still renews it, so a second claim would wait for ever: the next proof reuses it.
    A minority releases it."""
    world = SimpleNamespace(job="job", life="life")
    it = object.__new__(Worlds)
    it._life = SimpleNamespace(
        recorder=None, world=world, config=SimpleNamespace(run_dir=str(tmp_path))
    )
    it.takeover, it._lease = None, Claim(tmp_path, "job", "life").poll(0.0)
    assert it._prove(LeaseAsked(2, "tie")).held(0.0) is it._lease is not None
    assert it._prove(LeaseAsked(3, "minority")).held(0.0) is it._lease is None
