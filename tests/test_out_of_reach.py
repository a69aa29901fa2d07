"""An error of the volume is not taken for a missing file, whatever the version of Python."""

import ast
import errno
import os
import stat
from dataclasses import replace

import pytest
from support.checkpoints import save
from support.failing_volume import Reads, answer_as_python_3_14
from support.paths import ROOT
from support.prepared import BYTES

from gptddp import files
from gptddp.checkpoint import retention, store
from gptddp.data.dataset import MANIFEST, SCRATCH, is_dataset, open_dataset
from gptddp.errors import DataError
from gptddp.prepare.build import prepare
from gptddp.prepare.output import building

CODES = [errno.EIO, errno.ESTALE]


@pytest.fixture
def reads(tmp_path, monkeypatch):
    answer_as_python_3_14(monkeypatch.setattr)
    return Reads(tmp_path, setattr=monkeypatch.setattr)


@pytest.mark.parametrize("code", [*CODES, errno.EACCES, errno.ELOOP])
def test_exists_raises_if_the_answer_is_unknown(tmp_path, reads, code):
    """Only ENOENT and ENOTDIR mean that a file is missing; other errors are raised."""
    path = tmp_path / "file"
    path.touch()
    assert files.exists(path) and files.exists(path, stat.S_ISREG)
    assert not files.exists(path, stat.S_ISDIR) and files.exists(tmp_path, stat.S_ISDIR)
    assert not files.exists(tmp_path / "none") and not files.exists(path / "below")
    with reads.failing(code, path=str(path)), pytest.raises(OSError) as caught:
        files.exists(path)
    assert caught.value.errno == code


@pytest.mark.parametrize("code", CODES)
def test_a_checkpoint_missing_from_a_listing_is_not_ignored(tmp_path, monkeypatch, reads, code):
    """If the listing lacks the ledger's newest checkpoint, and its path gives an I/O error, that
    temporary error is raised; the previous checkpoint is not used."""
    save(tmp_path, 1)
    newest, listdir = save(tmp_path, 2), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [n for n in listdir(path) if n != newest.name])
    with reads.failing(code, path=str(newest)), pytest.raises(OSError) as caught:
        store.names(tmp_path, [newest.name])
    assert files.may_pass(caught.value)
    assert store.newest(tmp_path, None, known=[newest.name]) == newest.name


def test_nothing_is_removed_if_trash_may_be_a_link(tmp_path, reads):
    """If .trash may be a symbolic link, the files in its target are not removed."""
    theirs, trash = tmp_path / "theirs", tmp_path / ".trash"
    theirs.mkdir()
    (theirs / "file").touch()
    trash.symlink_to(theirs)
    with reads.failing(errno.EIO, at=0):
        retention._remove_inside(trash)
    retention._remove_inside(trash)
    assert os.listdir(theirs) == ["file"]


def test_a_failed_read_never_replaces_a_whole_dataset(tmp_path, books, reads):
    """A failed read keeps the dataset, even after a kill between last write and clean-up."""
    out = tmp_path / "out"
    whole = prepare([books], out, BYTES)
    for at in range(100):
        (out / SCRATCH).mkdir(exist_ok=True)
        reads.folders = (str(out),)
        with reads.failing(errno.EIO, at=at):
            try:
                prepare([books], out, BYTES)
            except (DataError, OSError) as error:
                assert os.strerror(errno.EIO) in str(error), (at, error)
            number = len(reads.seen)
        assert open_dataset(out).sha256 == whole.sha256, at
        if number <= at:
            break
    assert 3 < at < 99
    assert SCRATCH not in os.listdir(out)  # and the lock is released
    (out / SCRATCH).mkdir()
    fails = reads.failing(errno.EIO, path=str(out / MANIFEST))
    with fails, pytest.raises(DataError), building(out):
        pass  # another process made it after the check of this one
    assert open_dataset(out).sha256 == whole.sha256


@pytest.mark.parametrize("code", [*CODES, errno.EACCES])
def test_an_unreadable_source_is_not_taken_for_a_broken_link(tmp_path, books, reads, code):
    """An unreadable file or folder is a DataError with its name, and is not left out."""
    (books / "done").mkdir()
    (books / "done/dataset.json").write_text('{"format": "gptddp-dataset"}')
    (books / "done/a.txt").write_text("a text")
    settings = replace(BYTES, include=("*.txt",))
    for path in (books / "0.txt", books / "more", books / "done/dataset.json"):
        with reads.failing(code, path=str(path)), pytest.raises(DataError, match=str(path.parent)):
            prepare([books], tmp_path / "out", settings)
    with reads.failing(code, path=str(path)), pytest.raises(OSError):
        is_dataset(path.parent)  # otherwise its shards would count as sources
    assert not (tmp_path / "out").exists()


def test_a_folder_is_made_or_the_volumes_own_error_is_raised(tmp_path, reads):
    """The volume's error is raised, not one that says that a file is in the folder's place."""
    (tmp_path / "a").mkdir()
    with reads.failing(errno.ESTALE, path=str(tmp_path / "a")), pytest.raises(OSError) as caught:
        files.make_folder(tmp_path / "a/b")
    assert caught.value.errno == errno.ESTALE


# Modules that may ask pathlib or os.path: for a message, before a call that would fail as well, to
# clean up, or for this machine's own files.
FORGIVING = {
    *("checkpoint/retention", "checkpoint/store", "data/dataset", "demo"),
    *("distributed/hardware", "inference/export", "k8s/local/act"),
    *("k8s/local/container", "k8s/local/run", "k8s/local/screen", "k8s/login", "k8s/render/code"),
    *("launch/launcher", "launch/overlay", "launch/worker", "prepare/output", "prepare/recipe"),
    *("prepare/walk", "run/lease_file"),
}
_ASKS = {"exists", "is_dir", "is_file", "is_symlink", "lexists", "isdir", "isfile", "islink"}


def test_modules_ask_for_files_with_files_exists():
    """Only listed modules ask pathlib or os.path, where a wrong answer loses nothing."""
    found = set()
    for path in sorted((ROOT / "gptddp").rglob("*.py")):
        calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        if any(isinstance(f, ast.Attribute) and f.attr in _ASKS for f in calls):
            found.add(str(path.relative_to(ROOT / "gptddp").with_suffix("")))
    assert found == FORGIVING
