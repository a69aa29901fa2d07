"""The background writer on full, broken and hanging volumes.

test_writer_crashes.py has the kills.
"""

import errno
import os
import threading

import pytest
from support.checkpoint_saver import loaded_step, state
from support.small_disk import small_disk
from support.waiting_writer import Writer

from gptddp.checkpoint import store
from gptddp.checkpoint.load import load_newest
from gptddp.run.history import RunLog, history

# -- in the background -------------------------------------------------------------------------


class Gate:
    """A volume that hangs until it is opened."""

    def __init__(self):
        self.open = threading.Event()

    def __call__(self):
        assert self.open.wait(60)


def test_training_may_change_the_tensors_at_once(tmp_path):
    """The state at `submit` is saved, whatever happens to the tensors afterwards."""
    gate, tensors = Gate(), state(5)
    writer = Writer(tmp_path, 1, before_commit=gate)
    assert writer.submit(5, tensors, {}) and writer.busy and writer.poll() is None
    assert not writer.submit(6, tensors, {})  # one at a time
    tensors["x"].fill_(-1)
    gate.open.set()
    assert writer.wait() and not writer.busy
    saved = writer.poll()
    assert (saved["step"], saved["nbytes"]) == (5, 4000) and "error" not in saved
    assert saved["stall_s"] > 0 and saved["write_s"] > 0 and writer.poll() is None
    assert loaded_step(tmp_path) == 5


def test_a_committed_step_is_not_saved_again(tmp_path):
    """The last save of a life does nothing if the step is on disk, by this life or the one before.
    Each manifest names its parent, for the first of a life the restored one."""
    gate, parent = Gate(), "step-000000000009.1"
    writer = Writer(tmp_path, 2, parent=parent, before_commit=gate)
    assert writer.save(9, state(9), {}).name == parent and not store.names(tmp_path)
    writer.submit(10, state(10), {})
    threading.Timer(0.1, gate.open.set).start()
    saved = writer.save(10, state(10), {})
    assert (saved.name, saved.error) == ("step-000000000010.2", None)
    assert writer.poll()["step"] == 10 and writer.poll() is None
    assert writer.save(11, state(11), {}).error is None and len(store.names(tmp_path)) == 2
    root = tmp_path / "checkpoints"
    parents = [store.read_manifest(root / store.name_of(it, 2))["parent"] for it in (10, 11)]
    assert parents == [parent, saved.name]


def test_a_hanging_volume_is_reported_and_blocks_nothing(tmp_path):
    """`wait` returns at its timeout, and `trouble` reports the save until it is done."""
    gate = Gate()
    writer = Writer(tmp_path, 1, before_commit=gate)
    assert writer.submit(1, state(1), {}) and not writer.wait(0.05)
    assert writer.trouble(60) is None and "a checkpoint has run for" in writer.trouble(0.01)
    gate.open.set()
    assert writer.save(2, state(2), {}).error is None and writer.trouble(0) is None
    assert loaded_step(tmp_path) == 2


def test_a_hanging_volume_does_not_hang_the_exit(tmp_path, forked):
    """A process whose writer hangs ends with its main thread."""
    code = (
        "import sys, threading, torch; from gptddp.checkpoint.writer import Writer\n"
        "writer = Writer(sys.argv[1], 1, before_commit=threading.Event().wait)\n"
        "assert writer.submit(1, {'x': torch.ones(9)}, {}); assert not writer.wait(0.1)"
    )
    assert forked(code, str(tmp_path)).wait(60) == 0


def test_the_log_is_durable_before_the_checkpoint(tmp_path, monkeypatch):
    """A checkpoint is not committed while the log of its steps cannot be written."""
    log = RunLog(tmp_path, 1)
    writer = Writer(tmp_path, 1, before_commit=log.sync)
    assert writer.save(1, state(1), {}).error is None
    write = os.write

    def fail_log(fd, data):
        if b'"step": 2' in bytes(data[:20]):
            raise OSError(errno.EIO, "Input/output error")
        return write(fd, data)

    monkeypatch.setattr(os, "write", fail_log)
    log.append({"step": 2})
    assert "Input/output error" in writer.save(2, state(2), {}).error
    assert loaded_step(tmp_path) == 1
    monkeypatch.undo()
    assert writer.save(3, state(3), {}).error is None
    assert [line["step"] for line in history(tmp_path)] == [2]


# -- disks -------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MB."""
    with small_disk(tmp_path / "disk", "4m") as mounted:
        yield mounted


def test_full_disk(disk):
    """A save fails with the fix, the previous checkpoint stays, and a later save works."""
    log = RunLog(disk, 1)
    writer = Writer(disk, 1, before_commit=log.sync)
    log.append({"step": 1})
    assert writer.save(1, state(1, 1 << 20), {}).error is None
    (disk / "ballast").write_bytes(bytes(5 << 19))
    log.append({"step": 2})
    saved = writer.save(2, state(2, 1 << 20), {})
    assert "No space left on device" in saved.error and "free space" in saved.error
    assert loaded_step(disk) == 1
    assert os.listdir(disk / "checkpoints" / ".tmp") == []
    (disk / "ballast").unlink()
    assert writer.save(3, state(3, 1 << 20), {}).error is None
    assert loaded_step(disk) == 3
    assert [line["step"] for line in history(disk)] == [1, 2]


def test_disk_full_of_checkpoints(disk):
    """If old checkpoints fill the disk, all but the newest two are deleted for the next save."""
    writer = Writer(disk, 1, keep=9)
    for step in range(1, 9):
        assert writer.save(step, state(step, 1 << 20), {}).error is None
    assert loaded_step(disk) == 8 and len(store.names(disk)) == 3


def fail_at(monkeypatch, point, code, lasting):
    """Let the n-th of these calls fail, and with `lasting` all after it; the calls are counted."""
    calls = []

    def failing(call, real):
        def fail(*args, **kwargs):
            calls.append(call)
            if len(calls) == point or (lasting and len(calls) > point):
                raise OSError(code, os.strerror(code), call)
            return real(*args, **kwargs)

        return fail

    for call in ("mkdir", "open", "write", "fsync", "rename", "replace"):
        monkeypatch.setattr(os, call, failing(call, getattr(os, call)))
    return calls


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
@pytest.mark.parametrize("lasting", [False, True])
def test_every_call_may_fail(tmp_path, monkeypatch, code, lasting):
    """Whichever call of a save fails, once or from then on, there is no exception: the result says
    whether the checkpoint exists, and the next save without errors works."""
    for point in range(1, 100):
        run = tmp_path / str(point)
        writer = Writer(run, 1, keep=2)
        assert writer.save(1, state(1), {}).error is None
        calls = fail_at(monkeypatch, point, code, lasting)
        saved = writer.save(2, state(2), {})
        monkeypatch.undo()
        if saved.error is None:
            assert loaded_step(run) == 2
        else:
            assert os.strerror(code) in saved.error and loaded_step(run) in (1, 2)
        assert writer.save(3, state(3), {}).error is None
        assert loaded_step(run) == 3
        if len(calls) < point:
            break
    assert point > 10


def test_a_failed_save_works_at_the_next_try(tmp_path, monkeypatch):
    """The last step of a run is tried again, even if it failed after it had its name."""
    for point in range(1, 100):
        writer = Writer(tmp_path / str(point), 1)
        calls = fail_at(monkeypatch, point, errno.EIO, False)
        if point == 1:  # the check whether the checkpoint exists may fail too
            monkeypatch.setattr(store, "read_manifest", lambda path: os.stat(path / "absent"))
        writer.save(2, state(2), {})
        monkeypatch.undo()
        assert writer.save(2, state(2), {}).error is None and writer.failure is None
        assert writer.has(2) and loaded_step(tmp_path / str(point)) == 2
        if len(calls) < point:
            break
    assert point > 10


def test_a_bug_in_the_writer_does_not_end_training(tmp_path, caplog):
    """An unexpected exception in the thread is the result's error, with a traceback in the log."""
    saved = Writer(tmp_path, 1, before_commit=lambda: 1 // 0).save(1, state(1), {})
    assert "ZeroDivisionError" in saved.error and "Traceback" in caplog.text
    assert load_newest(tmp_path) is None


def test_a_rename_that_nfs_repeats_is_a_success(tmp_path, monkeypatch):
    """A rename that worked but reports an error is a success; a taken name is an error."""
    rename = os.rename

    def twice(source, target):
        rename(source, target)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "rename", twice)
    assert Writer(tmp_path, 1).save(1, state(1), {}).error is None
    monkeypatch.undo()
    assert "exists already" in Writer(tmp_path, 1).save(1, state(7), {}).error
    assert loaded_step(tmp_path) == 1
