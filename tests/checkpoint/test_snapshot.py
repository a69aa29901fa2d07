"""What survivors leave in memory: whole or ignored, and the newest state of a run goes on."""

import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.small_disk import small_disk
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import snapshot
from gptddp.errors import Diverged, LifeLost
from gptddp.launch import agent
from gptddp.run import summary
from gptddp.run.history import Ledger, history, read_ledger
from gptddp.training import choose, life

TENSORS = {
    "w": torch.arange(1000, dtype=torch.float32).reshape(10, 100),
    "step": torch.tensor(7, dtype=torch.int64),
    "half": torch.ones(3, dtype=torch.bfloat16),
}
HEAD = dict(
    run_id="run",
    generation=3,
    meta={"step": 7, "data": {"lanes": [[0, 1, 2]]}},
    fault={"cause": "a peer is gone", "time": 1.5},
)


def leave(path: Path, **changes) -> Path:
    head = HEAD | {"lines": [{"step": 7}]} | changes
    assert snapshot.write(path, TENSORS, **head)
    return path


def test_what_is_left_is_what_is_found(tmp_path):
    """Tensors bit for bit, their dtypes and shapes, and everything that is not a tensor."""
    found = snapshot.read(leave(tmp_path / "s"))
    assert (found.run_id, found.generation, found.step, found.lines) == ("run", 3, 7, [{"step": 7}])
    assert (found.meta, found.fault) == (HEAD["meta"], HEAD["fault"])
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_torn_file_is_ignored_wherever_it_ends(tmp_path, caplog):
    """Cut at any length, or longer than it should be: a warning, and no state."""
    whole = leave(tmp_path / "s").read_bytes()
    lengths = [0, 1, len(whole) - 1, *random.Random(0).sample(range(len(whole)), 40)]
    for length in lengths:
        (tmp_path / "t").write_bytes(whole[:length])
        assert snapshot.read(tmp_path / "t") is None, length
    (tmp_path / "t").write_bytes(whole + whole)
    assert snapshot.read(tmp_path / "t") is None
    assert len(caplog.records) == len(lengths) + 1
    assert snapshot.read(tmp_path / "none") is None  # the usual case says nothing
    assert len(caplog.records) == len(lengths) + 1


def test_a_second_rank_of_the_pod_does_not_wait(tmp_path):
    """While one writes, the file is not touched by another."""
    import fcntl

    with open(tmp_path / "gptddp-s.part", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not snapshot.write(tmp_path / "gptddp-s", TENSORS, lines=[], **HEAD)
        began = time.monotonic()
        agent.wait_for_snapshot(tmp_path, limit_s=0.3)  # as the agent does before it kills
        assert time.monotonic() - began >= 0.3
    agent.wait_for_snapshot(tmp_path, limit_s=60)  # a lock goes with its process: no wait
    assert time.monotonic() - began < 30
    assert not (tmp_path / "gptddp-s").exists()


def test_a_full_memory_is_an_error_and_not_a_signal(tmp_path, caplog):
    """On a real tmpfs that is too small: one warning, nothing half-written is left."""
    big = {"w": torch.zeros(100_000)}
    with small_disk(tmp_path, "64k"):
        with pytest.raises(OSError, match="No space left"):
            snapshot.write(tmp_path / "s", big, lines=[], **HEAD)
        assert list(tmp_path.iterdir()) == []
        assert snapshot.read(leave(tmp_path / "s")).step == 7  # what fits is taken


@pytest.mark.parametrize(
    ("left", "newest", "rank"),
    [
        ([None, None], None, None),
        ([("run", 2, 30), None], None, 0),
        ([None, ("run", 2, 30), ("run", 2, 31)], (2, 30), 2),
        ([("run", 2, 30), ("run", 2, 30)], (2, 20), 0),
        ([("run", 2, 30)], (2, 30), None),  # the checkpoint has it
        ([("run", 2, 30)], (3, 10), None),  # a later life has decided otherwise
        ([("run", 3, 10), ("run", 2, 30)], (2, 20), 0),
        ([("other", 9, 90), ("run", 2, 30)], (2, 20), 1),
        ([("other", 9, 90)], None, None),
    ],
)
def test_the_newest_state_of_this_run_wins(left, newest, rank):
    """By generation, then step; another run's is foreign, a checkpoint as new is preferred."""
    assert choose.rank_of_newest(choose.of_this_run(left, "run"), newest) == rank


A, B = 11, 12  # digests


@pytest.mark.parametrize(
    ("diverged", "left", "trusted", "names"),
    [
        (0, [("run", 3, 30, A), None, ("run", 3, 30, A)], {0, 2}, None),
        (0, [("run", 3, 30, A), ("run", 3, 31, B)], {0, 1}, None),  # a step apart
        (0, [("run", 3, 30, A), ("run", 2, 30, B)], {0, 1}, None),  # a life apart
        (0, [("run", 3, 30, A), ("other", 3, 30, B)], {0}, None),
        # A rank that differs has spoilt the gradients of all.
        (0, [("run", 3, 30, A)] * 2 + [("run", 3, 30, B)], set(), ["rank 2"]),
        (0, [("run", 3, 30, A), ("run", 3, 30, B)], set(), ["rank 0", "rank 1"]),
        (0, [("run", 3, 30, A), ("run", 3, 30, B), ("run", 4, 9, A)], {2}, ["rank 0", "rank 1"]),
        # Known from an earlier life: a pod that was away then must not win now.
        (3, [("run", 3, 30, A), ("run", 2, 99, A), None], set(), None),
        (3, [("run", 3, 30, A), ("run", 3, 30, B)], set(), None),
        (3, [("run", 3, 30, A), ("run", 4, 9, B)], {1}, None),
    ],
)
def test_no_memory_of_a_diverged_generation_is_trusted(tmp_path, diverged, left, trusted, names):
    """The ledger voids it and all older ones; what ranks bring is compared, and recorded."""
    if diverged:
        Ledger(tmp_path).event("diverged", diverged, step=40, ranks=[1], names=["rank 1"])
    world = SimpleNamespace(names=[f"rank {rank}" for rank in range(len(left))])
    for _ in range(2):  # the second life finds what the first has recorded
        snapshots = choose.of_this_run(left, "run")
        found = choose.trusted(snapshots, summary.read(tmp_path).void, tmp_path, world)
        assert found.keys() == trusted
        events = [e["names"] for e in read_ledger(tmp_path)][diverged > 0 :]
        assert events == ([names] if names else [])


def test_two_ranks_cannot_tell_which_is_wrong():
    """Three can; the message says either."""
    names = [f"rank {rank} (pod-{rank})" for rank in range(3)]
    error = Diverged({0: A, 1: B, 2: B}, 70, names)
    assert (error.ranks, error.names) == ([0], ["rank 0 (pod-0)"])
    assert "after step 70" in str(error) and "rank 0 (pod-0) differs from the rest" in str(error)
    error = Diverged({0: A, 1: B}, 70, names)
    assert error.ranks == [0, 1]
    assert "no majority to tell which of rank 0 (pod-0) and rank 1 (pod-1) is wrong" in str(error)


def test_a_lost_peer_costs_only_the_step_in_flight(run, tmp_path):
    """The next life goes on from memory, with the losses of an undisturbed run, bit for bit."""
    lose_a_peer(run, "--steps", "9", at=6)
    log = tmp_path / "run/log.1.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:3]))  # rank 0 went as well
    assert run("--steps", "9") == 0
    start = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"][-1]
    assert (start["source"], start["step"], start["redo"]) == ("memory", 5, 0)
    assert not list((tmp_path / "memory").iterdir())
    found = list(history(tmp_path / "run"))
    (tmp_path / "run").rename(tmp_path / "disturbed")
    assert run("--steps", "9") == 0
    for key in ("step", "loss", "grad_norm", "batch_fp", "chain_fp"):
        assert [x[key] for x in found] == [x[key] for x in history(tmp_path / "run")]


def test_a_memory_that_was_taken_up_makes_room(run, tmp_path, monkeypatch):
    """Its file is not held open by the life that came from it: the next has to fit in its place."""
    lose_a_peer(run, "--steps", "9", at=4)
    (left,) = (tmp_path / "memory").iterdir()
    mapped = []
    agree = life.agree

    def looking(*args):
        mapped.append(left.name in Path("/proc/self/maps").read_text())
        return agree(*args)

    monkeypatch.setattr(life, "agree", looking)
    assert run("--steps", "6") == 0
    assert mapped == [False] * 3


def test_diverged_ranks_leave_nothing(run, tmp_path, monkeypatch):
    """Their states are not to be trusted: the next life goes back, whatever an absent pod has."""
    assert run("--steps", "2") == 0
    lose_a_peer(run, "--steps", "9", at=3)
    with monkeypatch.context() as patch:
        check, calls = life.check_replicas, iter(range(9))
        (left,) = (tmp_path / "memory").iterdir()
        absent = left.read_bytes()

        def differ(*args):
            if next(calls):
                raise Diverged({0: A, 1: B}, 9, "01")
            return check(*args)

        patch.setattr(life, "check_replicas", differ)
        assert run("--steps", "9") == LifeLost.exit_code
    assert not list((tmp_path / "memory").iterdir())
    left.write_bytes(absent)
    assert run("--steps", "9") == 0
    event, start = [
        e for e in read_ledger(tmp_path / "run") if e["event"] in ("diverged", "start")
    ][-2:]
    assert (event["event"], event["generation"], event["ranks"]) == ("diverged", 3, [0, 1])
    assert (start["source"], start["step"]) == ("step-000000000002.1", 2)
