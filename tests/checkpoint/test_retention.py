"""Retention keeps, lists and deletes the right checkpoints."""

import os
import shutil
import threading
import time

import pytest
import torch
from support.crashing import killed
from support.waiting_writer import Writer

from gptddp.checkpoint import retention, shard, store
from gptddp.checkpoint.load import load_newest


def save(run_dir, *steps, generation=1, keep=99):
    """Commit a small checkpoint for each step; return their directory."""
    for step in steps:
        tensors = {"x": torch.full((100,), float(step))}
        assert Writer(run_dir, generation, keep=keep).save(step, tensors, {}).error is None
    return run_dir / "checkpoints"


def steps(run_dir):
    """(generation, step) of the existing checkpoints, newest first."""
    return [store.order(name) for name in store.names(run_dir) if store.is_candidate(name)]


def test_the_newest_checkpoints_by_generation_then_step_stay(tmp_path):
    """After each commit the newest `keep` exist; trash and temporary directories are empty. A low
    step of the newest generation is not the oldest, whatever the file times are."""
    root = save(tmp_path, *range(8, 13), keep=3)
    assert steps(tmp_path) == [(1, 12), (1, 11), (1, 10)]
    assert os.listdir(root / ".trash") == os.listdir(root / ".tmp") == []
    for path in save(tmp_path, 5, 6, generation=2).glob("step-*.2"):
        os.utime(path, (0, 0))
    retention.prune(tmp_path, 3)
    assert steps(tmp_path) == [(2, 6), (2, 5), (1, 12)]


def test_only_loadable_checkpoints_count(tmp_path):
    """Torn checkpoints do not displace whole ones, and are not deleted if they are newer."""
    root = save(tmp_path, *range(1, 8))
    for step in (5, 6, 7):
        os.truncate(root / f"step-{step:012d}.1" / "manifest.json", 10)
    assert retention.prune(tmp_path, 2) == [f"step-{step:012d}.1" for step in (2, 1)]
    assert steps(tmp_path) == [(1, step) for step in (7, 6, 5, 4, 3)]
    assert load_newest(tmp_path).step == 4


def flip(path):
    raw = bytearray((path / "shard-0-of-1.bin").read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / "shard-0-of-1.bin").write_bytes(raw)


@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("when", ["after each commit", "after all"])
def test_the_last_good_checkpoint_stays(tmp_path, caplog, keep, when):
    """One bit flips in each of three commits: the good one before them still exists and loads,
    however many damaged ones follow, and the log has a warning."""
    keep_meanwhile = keep if when == "after each commit" else 99
    root = save(tmp_path, 1, keep=keep)
    for step in (2, 3, 4):
        flip(save(tmp_path, step, keep=keep_meanwhile) / store.name_of(step, 1))
    retention.prune(tmp_path, keep)
    assert (root / store.name_of(1, 1)).exists()
    assert "is damaged, older ones are kept: shard-0-of-1.bin: bytes 0 to 400" in caplog.text
    for step in (5, 6, 7):
        flip(save(tmp_path, step, keep=keep) / store.name_of(step, 1))
    assert load_newest(tmp_path).step == 1


def test_bytes_read_by_a_save(tmp_path, monkeypatch):
    """A save reads its own bytes and, when it replaces one, those of the oldest kept one."""
    read, real = [], shard.read

    def reading(path, *args):
        read.append(path.name.split(".")[0])
        return real(path, *args)

    monkeypatch.setattr(shard, "read", reading)
    save(tmp_path, 1, 2, 3, keep=3)
    assert read == [f"step-{n:012}" for n in (1, 2, 3)]
    read.clear()
    save(tmp_path, 4, keep=3)
    assert read == [f"step-{n:012}" for n in (4, 2)]


def test_a_disk_that_writes_other_bytes_is_reported(tmp_path, monkeypatch):
    """The bytes are read back before the commit: the save fails with the reason, the checkpoint
    before it stays, and the next save works."""
    save(tmp_path, 1, keep=1)
    write = os.write

    def lying(fd, data):
        raw = bytearray(data)
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".bin"):
            raw[len(raw) // 2] ^= 1
        return write(fd, raw)

    monkeypatch.setattr(os, "write", lying)
    saved = Writer(tmp_path, 1, keep=1).save(2, {"x": torch.full((100,), 2.0)}, {})
    assert "the bytes read back are not those written (shard-0-of-1.bin: bytes" in saved.error
    assert steps(tmp_path) == [(1, 1)] and os.listdir(tmp_path / "checkpoints/.tmp") == []
    monkeypatch.undo()
    save(tmp_path, 3, keep=1)
    assert load_newest(tmp_path).step == 3


def test_keep_every(tmp_path):
    """With keep_every 100, the first checkpoints at or after 100, 200 and 300 stay for good."""
    tensors = {"x": torch.ones(10)}
    for step in (40, 90, 130, 180, 210, 260, 310, 320, 330):
        writer = Writer(tmp_path, 1, keep=2, keep_every=100)
        assert writer.save(step, tensors, {}).error is None
    assert [step for _, step in steps(tmp_path)] == [330, 320, 310, 210, 130]
    retention.prune(tmp_path, 1, keep_every=100)
    assert [step for _, step in steps(tmp_path)] == [330, 310, 210, 130]


def save_skipped(tmp_path, *skipped, keep, keep_every=0):
    """Save steps 1, 2, 3... with these numbers of skipped steps in a row; return the kept steps."""
    for step, number in enumerate(skipped, 1):
        writer = Writer(tmp_path, 1, keep=keep, keep_every=keep_every)
        saved = writer.save(step, {"x": torch.ones(100)}, {"step": step, "skipped": number})
        assert saved.error is None
    return [step for _, step in steps(tmp_path)]


def test_checkpoints_before_skipped_steps_stay(tmp_path):
    """A checkpoint in a streak of skipped steps does not count, and is deleted once a newer one
    exists, even as a milestone. After the streak retention is as before."""
    assert save_skipped(tmp_path / "1", 0, 0, 0, *range(1, 30), keep=2) == [32, 3, 2]
    assert save_skipped(tmp_path / "2", 0, 1, 2, keep=1) == [3, 1]
    assert save_skipped(tmp_path / "3", 0, 1, 2, 0, keep=1) == [4]
    assert save_skipped(tmp_path / "4", 0, 1, 2, 0, 0, keep=2) == [5, 4]
    assert save_skipped(tmp_path / "5", 0, 0, 1, 2, 0, 0, 0, keep=1, keep_every=3) == [7, 6, 5]


def test_a_failed_deletion_is_tried_again(tmp_path, monkeypatch):
    """Busy files delay the deletion: no error, the name is free, and the next call finishes."""
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


def test_a_reader_survives_a_pruner_that_is_faster(tmp_path, monkeypatch):
    """If all listed checkpoints vanish, the reader lists again and loads the newest."""
    save(tmp_path, 1, 2)
    read_manifest = store.read_manifest

    def slow(path):
        monkeypatch.setattr(store, "read_manifest", read_manifest)
        save(tmp_path, 3, 4, keep=1)
        return read_manifest(path)

    monkeypatch.setattr(store, "read_manifest", slow)
    assert load_newest(tmp_path).step == 4


def test_unfinished_work_is_discarded(tmp_path, monkeypatch):
    """A new life discards all unfinished saves; on a full disk a writer spares those of later
    generations. A rename comes before the removal, so a writer commits all or nothing."""
    root, parents, rmtree = save(tmp_path, 1), [], shutil.rmtree

    def noting(path, **how):
        parents.append(path.parent.name)
        rmtree(path, **how)

    monkeypatch.setattr(shutil, "rmtree", noting)
    names = [f"step-000000000009.{generation}.{'ab' * 16}" for generation in (1, 2, 3)]
    for name in (*names, "else"):
        (root / ".tmp" / name).mkdir()
    retention.discard_unfinished(tmp_path, upto=2)
    assert os.listdir(root / ".tmp") == [names[2]]
    (root / ".tmp" / names[0]).mkdir()
    retention.discard_unfinished(tmp_path)
    assert os.listdir(root / ".tmp") == []
    retention.prune(tmp_path, 1)
    assert os.listdir(root / ".trash") == [] and set(parents) == {".trash"}


def test_killed_at_every_system_call(tmp_path):
    """After a kill anywhere in set-aside and prune, the remaining checkpoints are whole, only the
    bad one has a checkpoint's name beside them, and the next call does the rest."""
    first, newest = tmp_path / "first", "step-000000000005.1"
    os.truncate(save(first, *range(1, 6)) / newest / "manifest.json", 10)
    for point in range(1, 99):
        root = shutil.copytree(first, run := tmp_path / str(point)) / "checkpoints"
        code = f"set_aside(Path({str(root / newest)!r})); prune({str(run)!r}, 2)"
        crashed = killed(point, "gptddp.checkpoint.retention", code)
        rows = retention.list_checkpoints(run, full=True)
        assert [row.step for row in rows[:3]] == [5, 4, 3]
        assert [row.ok for row in rows] == [False, *[True] * (len(rows) - 1)]
        if (root / newest).exists():
            retention.set_aside(root / newest)
        retention.prune(run, 2)
        assert steps(run) == [(1, 4), (1, 3)] and os.listdir(root / ".trash") == []
        assert os.listdir(root / f"{newest}.bad.1")
        if not crashed:
            break
    assert 10 < point < 98


def test_the_list_has_the_state_of_each_checkpoint(tmp_path):
    """The list has good, torn and set-aside ones, newest first; only `full` finds a flipped bit."""
    root = save(tmp_path, 1, 2, 3, 4)
    shard = root / "step-000000000003.1" / "shard-0-of-1.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    os.truncate(root / "step-000000000002.1" / "manifest.json", 9)
    retention.set_aside(root / "step-000000000001.1")
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
    for name in ("step-1.1", "step-000000000001", "step-٠٠٠٠٠٠٠٠٠٠٠١.1"):
        assert store.order(name) == (0, 0) and not store.is_candidate(name)
    save(tmp_path, 5, 6, 7, keep=1)  # the set-aside checkpoint stays for inspection
    assert [row.state for row in retention.list_checkpoints(tmp_path)] == [
        "complete",
        "quarantined",
    ]


PRUNER = """
import sys
from gptddp.checkpoint.retention import prune
while True:
    prune(sys.argv[1], 2)
"""


def test_pruners_readers_and_a_writer_at_once(tmp_path, forked):
    """Fault 29: beside a writer and pruners that are killed again and again, every read finds a
    checkpoint, and at least two can always be verified."""
    save(tmp_path, 1, 2, 3)
    done, pause = threading.Event(), threading.Lock()

    def write():
        writer, step = Writer(tmp_path, 1, keep=3), 3
        while not done.is_set():
            step += 1
            with pause:
                saved = writer.save(step, {"x": torch.full((50_000,), float(step))}, {})
            assert saved.error is None
            time.sleep(0.002)

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    try:
        for _ in range(4):
            pruners = [forked(PRUNER, str(tmp_path)) for _ in range(2)]
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                loaded = load_newest(tmp_path, set_aside=False)
                assert (loaded.tensors["x"] == loaded.step).all()
                seen.append(loaded.step)
            for pruner in pruners:
                assert pruner.poll() is None
                pruner.kill()
                pruner.wait()
            with pause:
                rows = retention.list_checkpoints(tmp_path, full=True)
            assert [row.state for row in rows[:2]] == ["verified"] * 2
    finally:
        done.set()
        thread.join()
    assert sorted(seen) == seen and len(set(seen)) > 1
    retention.prune(tmp_path, 2)
    assert len(steps(tmp_path)) == 2 and os.listdir(tmp_path / "checkpoints/.trash") == []
