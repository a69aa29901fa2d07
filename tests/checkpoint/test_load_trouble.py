"""Load a checkpoint from a volume that fails or is read-only."""

import errno
import logging
import os
from pathlib import Path

import pytest
from support.checkpoints import loaded_step, save
from support.failing_volume import Reads

from gptddp import files
from gptddp.checkpoint.load import load_newest


def test_a_bad_checkpoint_that_cannot_be_renamed_is_skipped(tmp_path, monkeypatch, caplog):
    """A bad checkpoint that cannot be renamed is skipped with a warning."""
    save(tmp_path, 1)
    bad = save(tmp_path, 2)
    (bad / "manifest.json").write_text("{")

    def rename(*_paths):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "rename", rename)
    with caplog.at_level(logging.WARNING):
        assert loaded_step(tmp_path) == 1
    assert "Read-only file system" in caplog.text and bad.exists()


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_temporary_read_error_is_not_damage(tmp_path, monkeypatch, code):
    """A checkpoint that cannot be read now is not set aside, and the error is not final."""
    path = save(tmp_path, 1)
    read_bytes = Path.read_bytes

    def fail(self):
        raise OSError(code, os.strerror(code)) if self.name == "manifest.json" else None

    monkeypatch.setattr(Path, "read_bytes", fail)
    monkeypatch.setattr(files, "RETRY_S", (0.01,))
    with pytest.raises(OSError, match="no checkpoint can be read"):
        load_newest(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert path.exists() and loaded_step(tmp_path) == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_an_unreachable_checkpoint_does_not_count_as_deleted(tmp_path, monkeypatch, code):
    """If a checkpoint's directory gives an error, the checkpoint before it is loaded. If there is
    none, the error is not final."""
    path = save(tmp_path, 1)
    monkeypatch.setattr(files, "RETRY_S", (0.0,))
    reads = Reads(tmp_path, setattr=monkeypatch.setattr)
    with reads.failing(code, path=str(path)), pytest.raises(OSError, match="no checkpoint can be"):
        load_newest(tmp_path)
    assert loaded_step(tmp_path) == 1
    newest = save(tmp_path, 2)
    with reads.failing(code, path=str(newest)):
        assert loaded_step(tmp_path) == 1
    assert loaded_step(tmp_path) == 2
