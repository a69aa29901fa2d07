"""`gptddp prepare` after a kill, with a full disk, and beside a second process."""

import errno
import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from support.prepared import child, run

from gptddp.prepare import output
from gptddp.prepare.shard_writer import ShardWriter


def test_two_processes_cannot_prepare_the_same_folder(books: Path, tmp_path: Path) -> None:
    """A second process reports that the folder is in use, and does not disturb the first."""
    out = tmp_path / "out"
    with output.building(out) as scratch:
        result = child(f"prepare([{str(books)!r}], {str(out)!r}, Settings())")
        assert "another process is preparing" in result.stderr
        assert scratch.exists()
        (out / "train").mkdir()
        (out / "dataset.json").touch()
    assert sorted(os.listdir(out)) == ["dataset.json", "train"]


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Two megabytes of incompressible text."""
    random = np.random.RandomState(0)
    lines = (json.dumps({"text": random.bytes(500).hex()}) + "\n" for _ in range(2000))
    (tmp_path / "large.jsonl").write_text("".join(lines))
    return tmp_path / "large.jsonl"


@pytest.mark.parametrize("limit_bytes", [10_000, 100_000, 600_000])
def test_a_full_disk_is_one_message(large: Path, tmp_path: Path, limit_bytes: int) -> None:
    """If a file of the shuffle or of a shard cannot grow, prepare ends with exit code 2."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    args = ["prepare", str(large), "--out", str(tmp_path / "new" / "out"), "--tokenizer", "bytes"]
    result = child(
        f"import sys; from gptddp.cli import cli; sys.argv[1:] = {args}; cli()", preexec_fn=limit
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("Error: no space left for ") == 1 and "free some" in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("owner", "name", "error", "code", "words"),
    [
        (output, "lock", OSError(errno.ENOSPC, "No space left"), 2, "no space left for"),
        (ShardWriter, "_close_file", KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_early_end_leaves_no_folders(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner, name, error, code, words
) -> None:
    """New folders are removed if the lock file cannot be made, or after Ctrl-C while shards are
    written."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, fail)
    result = run(books, "--out", tmp_path / "new" / "out")
    assert result.exit_code == code and words in result.stderr
    assert not (tmp_path / "new").exists()
