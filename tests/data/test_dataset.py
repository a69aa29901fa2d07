"""A dataset on disk: opening it, and reading it."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.failing_volume import Reads
from support.prepared import BYTES, all_texts, texts

from gptddp.data.dataset import _FOOTERS, RowGroup, _footer, open_dataset
from gptddp.errors import DataError
from gptddp.prepare import shard_writer
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings


def test_open_dataset_says_what_is_wrong(books: Path, tmp_path: Path) -> None:
    """No dataset, another format or version, and missing or short files have separate messages."""
    out = tmp_path / "out"
    with pytest.raises(
        DataError, match="no such folder; make a dataset with `gptddp prepare.*`gptddp-k8s prep"
    ):
        open_dataset(out)
    prepare([books], out, Settings(vocab_size=300))
    with pytest.raises(DataError, match="the folder holds no prepared dataset"):
        open_dataset(books)
    manifest = json.loads((out / "dataset.json").read_text())
    for content in ("{", "[]", '{"format": "other", "version": 1}'):
        (out / "dataset.json").write_text(content)
        with pytest.raises(DataError, match="is not a dataset of gptddp"):
            open_dataset(out)
    for version in (1, 2, 99):
        (out / "dataset.json").write_text(json.dumps({**manifest, "version": version}))
        with pytest.raises(DataError, match=f"version {version}, .* prepare the data again with"):
            open_dataset(out)
    (out / "dataset.json").write_text(json.dumps(manifest))
    for name in ("tokenizer.json", "train/00000.parquet"):
        content_bytes = (out / name).read_bytes()
        (out / name).write_bytes(content_bytes[:-1])
        with pytest.raises(DataError, match=f"{name} has .* bytes instead of"):
            open_dataset(out)
        (out / name).unlink()
        with pytest.raises(DataError, match=f"{name}: No such file"):
            open_dataset(out)
        (out / name).write_bytes(content_bytes)
    assert len(all_texts(open_dataset(out))) == 40


@pytest.mark.parametrize(
    ("code", "raised"), [("EIO", OSError), ("ESTALE", OSError), ("EACCES", DataError)]
)
def test_an_absent_volume_is_no_mistake_of_the_user(books, tmp_path, monkeypatch, code, raised):
    """An error that may pass is raised as OSError; DataError would be final."""
    dataset = prepare([books], tmp_path / "out", Settings(vocab_size=300))

    def fail(_path):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(Path, "read_bytes", fail)
    for look in (dataset.check_storage, lambda: open_dataset(tmp_path / "out")):
        with pytest.raises(raised, match=os.strerror(getattr(errno, code))):
            look()


def test_a_file_that_cannot_be_read_now_is_an_error(books, tmp_path, monkeypatch):
    """The error is OSError, which may pass; no dataset is returned, as the file may be damaged."""
    prepare([books], tmp_path / "out", Settings(vocab_size=300))
    reads = Reads(tmp_path / "out", setattr=monkeypatch.setattr)
    with reads.failing(errno.EIO):
        open_dataset(tmp_path / "out")
    for at, path in enumerate(reads.seen):
        with reads.failing(errno.EIO, at=at), pytest.raises(OSError, match="Input/output error"):
            open_dataset(tmp_path / "out")
        assert path == reads.seen[at]


def test_read_compares_row_groups_with_the_manifest(books: Path, tmp_path: Path) -> None:
    """A missing row group and a replaced file are errors that name the row group."""
    dataset = prepare([books], tmp_path / "out", BYTES)
    group = dataset.row_groups("train")[0]
    with pytest.raises(DataError, match="row group 999"):
        dataset.read(RowGroup(group.path, 999, 1, 1, 1))
    with pytest.raises(DataError, match="instead of 7: the file has been replaced"):
        dataset.read(RowGroup(group.path, 0, 7, 1, 1))
    assert len(dataset.read(group)) == group.rows


def test_read_notices_that_a_file_was_replaced(tmp_path: Path) -> None:
    """Documents come from the present file, also if another was read at its path before."""
    (tmp_path / "one.jsonl").write_text("".join(f'{{"text": "one {n}"}}\n' for n in range(900)))
    (tmp_path / "two.jsonl").write_text(
        "".join(f'{{"text": "two times {n}"}}\n' for n in range(900))
    )
    one, two = (prepare([tmp_path / f"{n}.jsonl"], tmp_path / n, BYTES) for n in ("one", "two"))
    path, others = one.dir / "train/00000.parquet", texts(two, "train")
    assert all(text.startswith("one") for text in texts(one, "train"))
    good = path.read_bytes()
    os.replace(two.dir / "train/00000.parquet", path)
    assert texts(one, "train") == others
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(DataError, match=r"cannot read .*00000\.parquet, row group 0"):
        texts(one, "train")
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        texts(one, "train")
    path.write_bytes(good)
    assert all(text.startswith("one") for text in texts(one, "train"))


def test_threads_read_every_shard_and_leave_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more shards than cached footers and several threads, all read the right documents."""
    monkeypatch.setattr(shard_writer, "_SHARD_BYTES", 20)
    lines = tmp_path / "many.jsonl"
    lines.write_text("".join(f'{{"text": "document {n:05}"}}\n' for n in range(400)), "utf-8")
    dataset = prepare([lines], tmp_path / "out", BYTES)
    groups = dataset.row_groups("train")
    assert len({group.path for group in groups}) > _FOOTERS
    expected = [
        pq.ParquetFile(dataset.dir / group.path).read_row_group(group.index)["text"].to_pylist()
        for group in groups
    ]
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(dataset.read, [*groups, *reversed(groups)])] == [
            *expected,
            *reversed(expected),
        ]
    assert len(os.listdir("/proc/self/fd")) <= before
    assert _footer.cache_info().currsize <= _FOOTERS


def test_another_tokenizer_is_noticed(books: Path, tmp_path: Path) -> None:
    """A tokenizer.json of the same size but with other merges is refused."""
    dataset = prepare([books], tmp_path / "out", Settings(vocab_size=300))
    path = tmp_path / "out" / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    merges = definition["model"]["merges"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    path.write_text(json.dumps(definition), "utf-8")
    with pytest.raises(DataError, match="not the tokenizer of this dataset.*put the file back"):
        dataset.tokenizer()
