"""`gptddp repack`: the same documents in small row groups."""

import json
import os
import resource
import signal

import pytest
from click.testing import CliRunner
from support.prepared import BYTES, child, contents, texts
from support.rewritten_dataset import rewrite

from gptddp.cli import cli
from gptddp.data import dataset
from gptddp.data.dataset import SPLITS, Dataset, open_dataset
from gptddp.errors import DataError
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
from gptddp.prepare.repack import repack


@pytest.fixture
def lumps(tmp_path) -> Dataset:
    """A dataset whose training split is one row group."""
    lines = [{"text": f"document {n} " * (n % 30 + 1)} for n in range(500)]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = prepare([tmp_path / "lines.jsonl"], tmp_path / "made", Settings(vocab_size=300))
    return rewrite(made, tmp_path / "lumps", 10_000)


def command(*args: object):
    return CliRunner().invoke(cli, ["repack", *map(str, args)])


def test_documents_and_their_order_stay(lumps, tmp_path):
    """Row groups of the size that prepare makes, the same documents, tokenizer and validation."""
    assert len(lumps.row_groups("train")) == 1
    result = command(lumps.dir, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (
        "row groups" in result.stdout and f"gptddp train --data {tmp_path / 'out'}" in result.stdout
    )
    made = open_dataset(tmp_path / "out")
    assert [group.rows for group in made.row_groups("train")][:3] == [2, 2, 2]
    for split in SPLITS:
        assert texts(made, split) == texts(lumps, split)
    assert made.tokenizer().sha256 == lumps.tokenizer().sha256
    assert made.manifest["splits"]["val"]["tokens"] == lumps.manifest["splits"]["val"]["tokens"]


def test_again_does_nothing_and_other_data_is_refused(lumps, tmp_path):
    """The same command is harmless, another dataset in the same place is not overwritten."""
    repack(lumps.dir, tmp_path / "out")
    before = contents(tmp_path / "out")
    repack(lumps.dir, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    result = command(tmp_path / "made", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "already holds another dataset" in result.stderr
    result = command(lumps.dir, "--out", lumps.dir)
    assert result.exit_code == 2 and "choose an --out that holds no source" in result.stderr
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    "moment", ["shard_writer.ShardWriter.add", "repack.fsync", "output.fsync", "output._remove"]
)
def test_killed_at_any_moment_it_starts_cleanly(lumps, tmp_path, moment):
    """SIGKILL leaves no half dataset, and the same command then gives the very same bytes."""
    out = tmp_path / "out"
    repack(lumps.dir, tmp_path / "whole")
    owner, name = f"gptddp.prepare.{moment}".rsplit(".", 1)
    result = child(
        f"""
import os, pydoc, signal
from gptddp.prepare import repack
owner = pydoc.locate({owner!r})
owner.{name} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
repack.repack({str(lumps.dir)!r}, {str(out)!r})
"""
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    repack(lumps.dir, out)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_full_disk_leaves_nothing(lumps, tmp_path):
    """No space: one message, and no folder behind."""
    result = child(
        f"""
import resource, signal
from gptddp.prepare.repack import repack
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, {resource.RLIM_INFINITY}))
try:
    repack({str(lumps.dir)!r}, {str(tmp_path / "out")!r})
except DataError as error:
    print(error)
"""
    )
    assert "no space left for" in result.stdout, result.stderr
    assert not (tmp_path / "out").exists()


def test_damage_is_not_copied(lumps, tmp_path):
    """A flipped bit ends it with the name of the file, and leaves nothing."""
    path = lumps.dir / lumps.row_groups("train")[0].path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"cannot read {path} after row 0"):
        repack(lumps.dir, tmp_path / "out")
    assert not os.path.exists(tmp_path / "out")


def test_huge_row_groups_are_warned_of(lumps, monkeypatch):
    """Training says which file, how large, and what to type; small ones are not mentioned."""
    assert lumps.warnings() == []
    monkeypatch.setattr(dataset, "_HUGE_BYTES", 1 << 16)
    (warning,) = lumps.warnings()
    assert f"`gptddp repack {lumps.dir} --out DIR`" in warning and "00000.parquet" in warning


def test_a_source_of_huge_row_groups_needs_no_repack(lumps, tmp_path):
    """prepare reads the shards of others as sources, row by row."""
    made = prepare([lumps.dir / "train"], tmp_path / "out", BYTES)
    assert len(made.row_groups("train")) > 100
