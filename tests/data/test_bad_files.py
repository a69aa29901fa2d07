"""Damaged, missing and changed files of a dataset are found, named, and skipped if wanted."""

import json
import random
import shutil

import pytest
from support.quarantined_run import Run
from support.rewritten_dataset import rewrite

from gptddp.data import blocks
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.errors import DataError
from gptddp.prepare import shard_writer
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Dataset:
    """About four shards of four row groups, where only page checksums reveal a flipped bit."""
    folder = tmp_path_factory.mktemp("healthy")
    rng = random.Random(5)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 8))) for _ in range(300)]
    lines = [" ".join([str(i), *rng.choices(words, k=rng.randint(5, 60))]) for i in range(320)]
    (folder / "lines.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "_SHARD_BYTES", 13_000)
        made = prepare([folder / "lines.jsonl"], folder / "made", Settings(tokenizer="bytes"))
    return rewrite(made, folder / "data", 20, "none")


@pytest.fixture
def dataset(healthy, tmp_path, monkeypatch) -> Dataset:
    """A copy to damage."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))
    return open_dataset(shutil.copytree(healthy.dir, tmp_path / "data"))


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 3] ^= 1
        path.write_bytes(content)


def test_flipped_bits_are_found(dataset):
    """Wherever a bit flips, the documents are right, or DataError names the row group."""
    path = dataset.dir / dataset.row_groups("train")[0].path
    groups = [g for g in dataset.row_groups("train") if dataset.dir / g.path == path]
    good, expected = path.read_bytes(), [dataset.read(group) for group in groups]
    assert len(groups) > 2
    rng, found = random.Random(1), 0
    for at in sorted(rng.sample(range(len(good)), 150)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
        for group, documents in zip(groups, expected, strict=True):
            try:
                assert dataset.read(group) == documents
            except DataError as error:
                assert f"{path}, row group {group.index}" in str(error)
                found += 1
    assert found > 50  # a flip in one row group does not show in the others


@pytest.mark.parametrize("how", ["missing", "empty", "truncated", "flipped"])
def test_a_bad_file_is_skipped_at_every_world_size(dataset, how):
    """If a file is damaged in a run, 1 to 3 ranks skip the same row groups and have the same rows.

    If the file is already bad when a later life starts, the decision is the same.
    """
    path = dataset.dir / dataset.row_groups("train")[5].path
    good = path.read_bytes()
    ends = []
    for world_size in (1, 2, 3):
        path.write_bytes(good)
        run = Run(dataset, lanes=6, batch=6, seq_len=64).go(world_size, 10)
        damage(path, how)
        run.go(world_size, 60)
        run.dataset = open_dataset(dataset.dir, "quarantine")
        run.go(1 + world_size % 3, 150)
        ends.append((run.fps, run.progress.data))
    assert ends[0] == ends[1] == ends[2]
    groups = dataset.row_groups("train")
    out = {groups[number].path for number in ends[0][1]["quarantined"]}
    assert out == {str(path.relative_to(dataset.dir))}
    assert len(ends[0][1]["quarantined"]) == 1 or how != "flipped"


@pytest.mark.parametrize("how", ["missing", "empty", "truncated"])
def test_a_bad_file_at_the_start_is_refused_or_skipped(dataset, how):
    """on_bad=fail raises an error with the file; on_bad=quarantine opens the dataset and warns."""
    path = dataset.dir / dataset.row_groups("train")[5].path
    said = "No such file" if how == "missing" else "bytes instead of"
    damage(path, how)
    with pytest.raises(DataError, match=f"{path.name}:? .*{said}.*put the files back"):
        open_dataset(dataset.dir)
    (warning,) = open_dataset(dataset.dir, "quarantine").warnings()
    assert path.name in warning and said in warning


def test_validation_and_tokenizer_must_be_whole(dataset):
    """No policy skips validation text: losses would no longer be comparable."""
    damage(dataset.dir / "val/00000.parquet", "truncated")
    with pytest.raises(DataError, match="val/00000.parquet has .* bytes instead of"):
        open_dataset(dataset.dir, "quarantine")


def test_an_absent_volume_is_not_taken_for_bad_files(dataset):
    """Without the manifest no row group is put into quarantine: the error names the volume."""
    run = Run(dataset, lanes=6, batch=6, seq_len=64).go(2, 3)
    dataset.dir.rename(dataset.dir.with_name("away"))
    with pytest.raises(DataError, match="is out of reach .No such file.*bring the storage back"):
        run.go(2, 200)
    assert run.ledger == []
    dataset.dir.with_name("away").rename(dataset.dir)
    assert run.go(3, 20).fps == Run(dataset, lanes=6, batch=6, seq_len=64).go(1, 20).fps
