"""Which checkpoints stay on the disk, and what a user is told of them."""

import os

import pytest
import torch

from gptddp import retention, store
from gptddp.checkpoint import load_newest
from gptddp.writer import Writer


def save(run_dir, *steps, generation=1, keep=99):
    """Commit a small checkpoint for each step; the directory of all."""
    for step in steps:
        tensors = {"x": torch.full((100,), float(step))}
        assert Writer(run_dir, generation, keep=keep).save(step, tensors, {}).error is None
    return run_dir / "checkpoints"


def steps(run_dir):
    """(generation, step) of the checkpoints that are there, newest first."""
    return [store.order(name) for name in store.names(run_dir) if store.is_candidate(name)]


def test_keeps_the_newest(tmp_path):
    """After each commit the newest `keep` stay, and trash and temporary directories are empty."""
    root = save(tmp_path, *range(8, 13), keep=3)
    assert steps(tmp_path) == [(1, 12), (1, 11), (1, 10)]
    assert os.listdir(root / ".trash") == os.listdir(root / ".tmp") == []


def test_newest_by_generation_then_step(tmp_path):
    """A low step of the newest generation is not pruned as the oldest, whatever the file times."""
    save(tmp_path, 100, 200, 300)
    for path in (save(tmp_path, 50, 60, generation=2)).glob("step-*.2"):
        os.utime(path, (0, 0))
    retention.prune(tmp_path, 3)
    assert steps(tmp_path) == [(2, 60), (2, 50), (1, 300)]


def test_only_loadable_ones_count(tmp_path):
    """Torn checkpoints do not push out whole ones, nor are they deleted while newer than those."""
    root = save(tmp_path, *range(1, 8))
    for step in (5, 6, 7):
        os.truncate(root / f"step-{step:012d}.1" / "manifest.json", 10)
    assert retention.prune(tmp_path, 2) == [f"step-{step:012d}.1" for step in (2, 1)]
    assert steps(tmp_path) == [(1, step) for step in (7, 6, 5, 4, 3)]
    assert load_newest(tmp_path).step == 4


def test_bad_ones_are_never_deleted(tmp_path):
    """What was set aside stays for inspection."""
    root = save(tmp_path, 1)
    retention.quarantine(root / "step-000000000001.1")
    save(tmp_path, 2, 3, 4, keep=1)
    assert (root / "step-000000000001.1.bad.1" / "manifest.json").exists()
    assert steps(tmp_path) == [(1, 4)]


def test_a_deletion_that_resists_is_tried_again(tmp_path, monkeypatch):
    """Busy files delay the deletion: no error, the name is free, the next call finishes."""
    root = save(tmp_path, 1, 2)
    unlink = os.unlink

    def busy(*_args, **_kwargs):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "unlink", busy)
    retention.prune(tmp_path, 1)
    assert steps(tmp_path) == [(1, 2)] and len(os.listdir(root / ".trash")) == 1
    monkeypatch.setattr(os, "unlink", unlink)
    retention.prune(tmp_path, 1)
    assert os.listdir(root / ".trash") == []


def test_an_open_reader_is_not_disturbed(tmp_path):
    """Files that a reader has open can be pruned; it reads on, and a new reader falls back."""
    root = save(tmp_path, 1, 2)
    with open(root / "step-000000000001.1" / "shard-0-of-1.bin", "rb") as file:
        retention.prune(tmp_path, 1)
        assert len(file.read()) == 400
    assert load_newest(tmp_path).step == 2


def test_a_reader_survives_a_pruner_that_is_faster(tmp_path, monkeypatch):
    """All that a reader has listed may vanish under it: it lists again and loads the newest."""
    save(tmp_path, 1, 2)
    read_manifest = store.read_manifest

    def slow(path):
        monkeypatch.setattr(store, "read_manifest", read_manifest)
        save(tmp_path, 3, 4, keep=1)
        return read_manifest(path)

    monkeypatch.setattr(store, "read_manifest", slow)
    assert load_newest(tmp_path).step == 4


def test_stale_work_is_removed_but_not_a_newer_generations(tmp_path):
    """A writer clears what dead ones of its own and older generations left; a late one does not
    touch what its successor is building."""
    root = save(tmp_path, 1)
    for generation in (1, 2, 3):
        (root / ".tmp" / f"step-000000000009.{generation}.{'ab' * 16}").mkdir()
    (root / ".tmp" / "else").mkdir()
    retention.remove_stale(tmp_path, 2)
    assert os.listdir(root / ".tmp") == [f"step-000000000009.3.{'ab' * 16}"]


def test_list_tells_the_state_of_each(tmp_path):
    """The list has whole, torn and set-aside ones, newest first; only `full` sees a flipped bit."""
    root = save(tmp_path, 1, 2, 3, 4)
    shard = root / "step-000000000003.1" / "shard-0-of-1.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    os.truncate(root / "step-000000000002.1" / "manifest.json", 9)
    retention.quarantine(root / "step-000000000001.1")
    rows = retention.list_checkpoints(tmp_path)
    assert [row.step for row in rows] == [4, 3, 2, 1]
    assert [row.state for row in rows] == ["complete", "complete", "invalid", "quarantined"]
    assert rows[0].nbytes == 400 and rows[0].time > 1.7e9 and rows[0].generation == 1
    assert rows[2].reason == "manifest.json does not match its own hash"
    rows = retention.list_checkpoints(tmp_path, full=True)
    assert [row.state for row in rows] == ["verified", "invalid", "invalid", "quarantined"]
    assert [row.ok for row in rows] == [True, False, False, False]
    assert "bytes 0 to 400 do not match" in rows[1].reason
    assert retention.list_checkpoints(tmp_path / "absent") == []


@pytest.mark.parametrize("name", ["step-1.1", "step-000000000001", "step-٠٠٠٠٠٠٠٠٠٠٠١.1"])
def test_other_names_are_not_checkpoints(name):
    """Only the exact form of the name counts."""
    assert store.order(name) is None and not store.is_candidate(name)
