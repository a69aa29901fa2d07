"""The cache of packed rows: the same rows as without it, whatever happens to its files."""

import contextlib
import json
import logging
import os
import random
import resource
import types

import numpy as np
import pytest
from support.loaders import same

from gptddp.data import blocks
from gptddp.data import cache as cache_module
from gptddp.data.cache import Cache, open_cache
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.loader import Loader
from gptddp.data.packing import Packed
from gptddp.errors import DataError
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    """200 short documents of bytes."""
    rng = random.Random(1)
    texts = [f"{i}: " + "".join(rng.choices("abcd ", k=rng.randint(5, 90))) for i in range(200)]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare([source], tmp_path / "data", Settings(tokenizer="bytes"))


@pytest.fixture
def cache(tmp_path) -> Cache:
    (tmp_path / "cache").mkdir()
    return Cache(tmp_path / "cache", 1 << 20)


def steps(dataset: Dataset, n: int = 60, **changes):
    """The first steps of a loader, and the number of row groups that it read."""
    reads, counted = [], open_dataset(dataset.dir)
    counted.read = lambda group: reads.append(group) or dataset.read(group)
    settings = {"lanes": 4, "batch": 8, "seq_len": 30, "seed": 1, "prefetch": 0} | changes
    with contextlib.closing(Loader(counted, **settings)) as loader:
        return [loader.next() for _ in range(n)], len(reads)


def rows(n: int, seq_len: int, dtype) -> Packed:
    rng = np.random.default_rng(n)
    tokens = rng.integers(0, np.iinfo(dtype).max, (n, seq_len + 1)).astype(dtype)
    return Packed(tokens, rng.random((n, seq_len)) < 0.9)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize(("n", "seq_len"), [(0, 5), (1, 1), (7, 8), (9, 30)])
def test_rows_come_back_as_they_were_put(cache, n, seq_len, dtype):
    """Tokens, validity, shapes and dtypes are equal; another identity finds nothing."""
    given = rows(n, seq_len, dtype)
    cache.put(("a", 1), given)
    back = cache.get(("a", 1), seq_len, dtype)
    assert np.array_equal(back.tokens, given.tokens) and back.tokens.dtype == dtype
    assert np.array_equal(back.valid, given.valid) and back.valid.dtype == bool
    assert cache.get(("a", 2), seq_len, dtype) is None


@pytest.mark.parametrize("pack_as", ["best-fit", "concat"])
def test_a_second_life_reads_no_text(dataset, cache, pack_as):
    """Batches are equal with an empty cache, a full one and none; the full one saves every read."""
    plain, reads = steps(dataset, pack=pack_as)
    assert plain[-1].cursors[:, 0].min() >= 1 and reads
    for expected_reads in (True, False):
        batches, reads = steps(dataset, cache=cache, pack=pack_as)
        same(batches, plain)
        assert bool(reads) == expected_reads


def test_other_ranks_epochs_and_seeds_use_the_same_rows(dataset, cache):
    """After an epoch in one process nothing is read by any rank of four, nor with another seed."""
    steps(dataset, cache=cache)
    for rank in range(4):
        assert steps(dataset, 20, cache=cache, own=[rank])[1] == 0
    assert steps(dataset, 20, cache=cache, seed=2)[1] == 0


# Three rows of 9 tokens and their validity bits take as many bytes as one row of 30.
@pytest.mark.parametrize("other", [dict(seq_len=9), dict(pack="concat")])
def test_rows_of_another_length_or_packing_are_not_used(dataset, cache, other):
    """Another row length or packing finds nothing, and packs the same rows as without a cache."""
    steps(dataset, cache=cache)
    batches, reads = steps(dataset, cache=cache, **other)
    assert reads
    same(batches, steps(dataset, **other)[0])


def test_the_rows_of_another_tokenizer_are_not_used(dataset, cache, monkeypatch):
    """Two datasets of the same text may differ only in their tokenizer."""
    _, reads = steps(dataset, cache=cache)
    monkeypatch.setattr("gptddp.data.tokenizer._Bytes.sha256", "0" * 64)
    assert reads and steps(dataset, cache=cache)[1] == reads


def damage_bit(path):
    data = bytearray(path.read_bytes())
    data[random.Random(path.name).randrange(len(data))] ^= 4
    path.write_bytes(data)


DAMAGES = {
    "a flipped bit": damage_bit,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(66)),
    "of another block": lambda path: path.write_bytes(
        max(path.parent.iterdir(), key=lambda p: (p != path, p.name)).read_bytes()
    ),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_replaced(dataset, cache, how):
    """Whatever the files contain, the batches are right."""
    plain, _ = steps(dataset, cache=cache)
    for path in sorted(cache.folder.iterdir()):
        DAMAGES[how](path)
    batches, reads = steps(dataset, cache=cache)
    same(batches, plain)
    assert reads
    if how != "a folder":
        assert steps(dataset, cache=cache)[1] == 0


def test_a_touched_file_of_the_dataset_is_read_again(dataset, cache, monkeypatch):
    """Damage in the data is found as without a cache."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))
    steps(dataset, cache=cache)
    [path] = (dataset.dir / "train").iterdir()
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[100:2000] = bytes(1900)
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(DataError):
        steps(dataset, cache=cache)


def test_the_size_is_bounded(tmp_path):
    """The size stays near the limit, the last used files stay, foreign files are not touched."""
    cache = Cache(tmp_path, 100_000)
    (tmp_path / "mine.txt").write_text("not of the cache")
    stale = tmp_path / "dead.tmp"
    stale.write_bytes(bytes(500))
    os.utime(stale, (1, 1))
    for i in range(100):
        cache.put((i,), rows(20, 50, np.uint16))
        assert cache.get((0,), 50, np.uint16) is not None
        assert sum(p.stat().st_size for p in tmp_path.glob("*.*")) < 115_000
    assert cache.get((99,), 50, np.uint16) is not None and cache.get((1,), 50, np.uint16) is None
    assert (tmp_path / "mine.txt").exists() and not stale.exists()


def test_a_full_disk_ends_the_caching_only(dataset, cache, caplog):
    """If files cannot grow there is one warning; batches are right, and no partial file stays."""
    plain, _ = steps(dataset)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60, old[1]))
    try:
        batches, _ = steps(dataset, cache=cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    same(batches, plain)
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "no more rows are cached" in caplog.text
    assert all(path.stat().st_size <= 60 for path in cache.folder.iterdir())
    assert not list(cache.folder.glob("*.tmp"))


def test_a_folder_that_disappears_ends_the_caching_only(dataset, cache):
    """If the cache folder is removed, the batches continue."""
    plain, _ = steps(dataset, cache=cache)
    for path in cache.folder.iterdir():
        path.unlink()
    cache.folder.rmdir()
    same(steps(dataset, cache=cache)[0], plain)


def test_only_a_folder_of_this_user_is_used(tmp_path, caplog, monkeypatch):
    """Other users could put wrong rows into a folder that they can write to: it is not used."""
    assert open_cache("none") is None and not caplog.records
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)  # like an emptyDir
    good = open_cache(str(tmp_path / "volume"))
    assert good.folder.parent == tmp_path / "volume"
    assert good.folder.stat().st_mode & 0o777 == 0o700
    for name in ("open", "link", "file"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / good.folder.name
        if name == "open":
            path.mkdir()
            path.chmod(0o777)
        elif name == "link":
            path.symlink_to(good.folder)
        else:
            path.write_text("")
    for name in ("open", "link", "file", f"file/{good.folder.name}"):
        caplog.clear()
        assert open_cache(str(tmp_path / name)) is None
        assert name in caplog.text
    monkeypatch.setattr(cache_module.tempfile, "gettempdir", lambda: str(tmp_path))
    assert open_cache("auto").folder.parent == tmp_path
    full = types.SimpleNamespace(free=400)
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda path: full)
    assert open_cache("auto").limit_bytes == 100


def test_rows_in_quarantine_are_not_taken_from_the_cache(dataset, cache):
    """A quarantined row group is skipped, even if its rows are cached."""
    steps(dataset, cache=cache)
    with contextlib.closing(Loader(dataset, lanes=4, batch=8, seq_len=30, seed=1)) as loader:
        state = loader.state(np.zeros((4, 3), np.int64)) | {"quarantined": list(range(0, 190, 2))}
    plain, _ = steps(dataset, state=state)
    batches, reads = steps(dataset, state=state, cache=cache)
    same(batches, plain)
    assert not reads
