"""Atomic writes, durable folders, and locks."""

import errno
import fcntl
import mmap
import os

import pytest

from gptddp import files

PAGE = mmap.PAGESIZE


def test_absent_is_none_and_garbage_is_named(tmp_path):
    """A missing file is None; one that is not JSON raises an error that names it."""
    assert files.read_json(tmp_path / "no.json") is None
    for garbage in (b"{", b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(garbage)
        with pytest.raises(ValueError, match=r"bad\.json is not valid JSON"):
            files.read_json(tmp_path / "bad.json")


def test_a_new_folder_is_durable_with_its_name(tmp_path, monkeypatch):
    """After a folder is made, its parent is fsynced. The next call does so again, as the first may
    have been killed in between."""
    done, fsync = [], files.fsync
    monkeypatch.setattr(files, "fsync", lambda path: (done.append(path), fsync(path)))
    files.make_folder(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir() and done == [tmp_path, tmp_path / "a"]
    files.make_folder(tmp_path / "a/b")
    assert done[2:] == [tmp_path / "a"]
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(OSError):
            files.make_folder(tmp_path / path)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_failed_write_keeps_the_old_content(tmp_path, monkeypatch, call):
    """An error of any system call leaves the old content and no temporary file."""
    path = tmp_path / "config.json"
    files.write_json_atomic(path, {"old": True})

    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_json_atomic(path, {"old": False})
    monkeypatch.undo()
    assert files.read_json(path) == {"old": True}
    assert os.listdir(tmp_path) == ["config.json"]


def test_a_removed_temporary_file_is_written_again(tmp_path, monkeypatch):
    """A clean-up may remove a temporary file, as it cannot know that the writer is alive."""
    replace = os.replace

    def tidied_away(source, target):
        monkeypatch.setattr(os, "replace", replace)
        os.unlink(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", tidied_away)
    files.write_json_atomic(tmp_path / "a.json", [1])
    assert files.read_json(tmp_path / "a.json") == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_short_writes_are_completed(tmp_path, monkeypatch):
    """All data is written even if the system takes three bytes at a time."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:3])))
    files.write_atomic(tmp_path / "x", b"0123456789")
    assert (tmp_path / "x").read_bytes() == b"0123456789"


@pytest.mark.parametrize(
    ("offset", "nbytes", "bypasses"),
    [(0, 8 * PAGE, True), (0, 5 * PAGE + 7, False), (3, PAGE, False)],
)
def test_writing_past_the_page_cache(tmp_path, offset, nbytes, bypasses):
    """Aligned blocks bypass the page cache; unaligned or incomplete ones are written through it."""
    memory = mmap.mmap(-1, 9 * PAGE)
    memory[:] = os.urandom(9 * PAGE)
    data = memoryview(memory)[offset : offset + nbytes]
    fd = os.open(tmp_path / "x", os.O_WRONLY | os.O_CREAT)
    can = files.bypass_cache(fd) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
    for begin in range(0, nbytes, 2 * PAGE):
        files.write_all(fd, data[begin : begin + 2 * PAGE])
    if can:
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == bypasses
    os.close(fd)
    assert (tmp_path / "x").read_bytes() == data


def test_a_directory_that_cannot_be_synced_is_ignored(tmp_path, monkeypatch):
    """EINVAL from fsync is ignored for a directory, as on some file systems, but not for a file."""
    (tmp_path / "x").touch()

    def refuse(fd):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    files.fsync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        files.fsync(tmp_path / "x")


def test_a_lock_is_held_once_and_may_be_removed_by_its_holder(tmp_path):
    """A second lock fails at once. After the holder removes the file, a new one can be locked."""
    path = tmp_path / "lock"
    held = files.lock(path)
    with pytest.raises(BlockingIOError):
        files.lock(path)
    assert files.is_locked(path)
    path.unlink()
    again = files.lock(path)
    assert files.is_locked(path)
    os.close(held)
    os.close(again)
    assert not files.is_locked(path)


def test_a_lock_on_a_removed_file_is_taken_on_a_new_one(tmp_path, monkeypatch):
    """If the file is removed between its opening and the lock, a new file is locked."""
    path, real = tmp_path / "lock", fcntl.flock

    def late(fd, operation):
        real(fd, operation)
        monkeypatch.setattr(fcntl, "flock", real)
        path.unlink()

    monkeypatch.setattr(fcntl, "flock", late)
    held = files.lock(path)
    assert os.path.samestat(os.fstat(held), path.stat()) and files.is_locked(path)
    os.close(held)
