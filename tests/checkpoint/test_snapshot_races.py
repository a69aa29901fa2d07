"""Several ranks of one pod at one snapshot file, and what others may have put in its place."""

import fcntl
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from gptddp import files
from gptddp.checkpoint import snapshot

TENSORS = {"w": torch.arange(1000, dtype=torch.float32)}


def leave(path: Path, step: int, generation: int = 3, run_id: str = "run") -> bool:
    return snapshot.write(
        path,
        {"w": TENSORS["w"] + step},
        run_id=run_id,
        generation=generation,
        meta={"step": step},
        lines=[],
        fault={},
    )


def state(path: Path) -> tuple[int, int] | None:
    """Generation and step of the snapshot, if it is whole, with the tensors of that step."""
    found = snapshot.read(path)
    assert found is None or torch.equal(found.tensors["w"], TENSORS["w"] + found.step)
    return found and (found.generation, found.step)


def test_a_newer_state_is_not_replaced_by_an_older_one(tmp_path):
    """By generation, then step, whoever comes last; another run's is no obstacle."""
    path = tmp_path / "s"
    assert leave(path, 11) and not leave(path, 10) and not leave(path, 99, generation=2)
    assert state(path) == (3, 11)
    assert leave(path, 12) and leave(path, 4, generation=4) and not leave(path, 12)
    assert state(path) == (4, 4)
    assert leave(path, 1, generation=1, run_id="other")
    assert state(path) == (1, 1) and [it.name for it in tmp_path.iterdir()] == ["s"]
    path.write_bytes(path.read_bytes()[:-1])
    assert leave(path, 1, generation=1, run_id="other") and state(path) == (1, 1)


@pytest.mark.parametrize(("late", "wanted"), [(10, 11), (11, 11), (12, 12)])
def test_a_file_that_was_renamed_before_it_was_locked_is_left_alone(
    tmp_path, monkeypatch, late, wanted
):
    """The late rank has opened the unfinished file, and then another finishes it: what it locks
    now is the other's snapshot. It begins again, and the newer state stays."""
    path, real = tmp_path / "s", fcntl.flock

    def other_first(*args):
        monkeypatch.setattr(fcntl, "flock", real)
        assert leave(path, 11)
        real(*args)

    monkeypatch.setattr(fcntl, "flock", other_first)
    assert leave(path, late) == (late > 11)
    assert state(path) == (3, wanted) and [it.name for it in tmp_path.iterdir()] == ["s"]


def test_a_file_that_is_being_written_is_not_removed(tmp_path, monkeypatch):
    """A removal in the middle of a write, and another rank right after it: what gets the name is
    whole, and no file is left over."""
    path, real = tmp_path / "s", snapshot._fill

    def disturbed(*args):
        monkeypatch.setattr(snapshot, "_fill", real)
        snapshot.remove(path)
        assert not leave(path, 12)
        return real(*args)

    monkeypatch.setattr(snapshot, "_fill", disturbed)
    assert leave(path, 11)
    assert state(path) == (3, 11) and [it.name for it in tmp_path.iterdir()] == ["s"]


def test_the_next_unfinished_file_is_another_rank_s(tmp_path, monkeypatch):
    """A rank that begins right after the rename of the one before is not disturbed by it."""
    path, real = tmp_path / "s", os.rename

    def other_begins(*args):
        monkeypatch.setattr(os, "rename", real)
        real(*args)
        (tmp_path / "s.part").write_bytes(b"begun")

    monkeypatch.setattr(os, "rename", other_begins)
    assert leave(path, 11) and state(path) == (3, 11)
    assert (tmp_path / "s.part").read_bytes() == b"begun"


def test_what_a_killed_rank_has_begun_is_removed(tmp_path):
    """The lock goes with its process: the unfinished file goes, and is no obstacle."""
    path = tmp_path / "s"
    (tmp_path / "s.part").write_bytes(b"half")
    assert leave(path, 11)
    (tmp_path / "s.part").write_bytes(b"half")
    snapshot.remove(path)
    assert not list(tmp_path.iterdir())


def test_many_ranks_at_once_leave_the_newest(tmp_path, caplog):
    """Four threads, each with a descriptor of its own: no torn file is ever seen, nor an older
    state after a newer one, and no error is raised."""
    path, failures, last = tmp_path / "s", list[Exception](), 60

    def rank(seed):
        steps = random.Random(seed).sample(range(1, last), last - 1)
        try:
            for step in steps:
                leave(path, step)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=rank, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(state(path))
    steps = [it[1] for it in seen if it]
    assert not failures and not caplog.records and steps == sorted(steps)
    assert state(path) and leave(path, last) and state(path) == (3, last)


def test_a_link_or_a_foreign_file_is_not_followed(tmp_path, monkeypatch, caplog):
    """Its target keeps its content; the error names the user and the fix."""
    victim, path = tmp_path / "victim", tmp_path / "s"
    assert leave(victim, 7)
    before = victim.read_bytes()
    (tmp_path / "s.part").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        leave(path, 11)
    (tmp_path / "s.part").unlink()
    path.symlink_to(victim)
    assert state(path) is None and "symbolic link" in caplog.text
    assert leave(path, 5) and state(path) == (3, 5) and not path.is_symlink()
    assert victim.read_bytes() == before
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="a file of user .*: remove it"):
        leave(path, 12)
    assert state(path) is None and "remove it" in caplog.text


def test_a_glance_takes_no_lock_away(tmp_path):
    """Who looks whether a file is locked has the lock itself for a moment; a launcher looks while
    its workers leave their snapshots."""
    path, over = tmp_path / "s", threading.Event()
    part = path.with_name("s.part")

    def look():
        while not over.is_set():
            files.is_locked(part)
            time.sleep(0.0005)

    lookers = [threading.Thread(target=look) for _ in range(2)]
    for it in lookers:
        it.start()
    try:
        for step in range(1, 400):
            part.touch()
            assert leave(path, step)
            os.close(files.lock(part))
    finally:
        over.set()
        for it in lookers:
            it.join()
