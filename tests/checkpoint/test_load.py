"""A checkpoint loads exactly as it was written, or not at all."""

import json
import logging
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from support.checkpoints import loaded_step, meta, save
from support.waiting_writer import Writer

from gptddp.checkpoint import retention, shard, store
from gptddp.checkpoint.load import load_newest
from gptddp.errors import CheckpointError


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(shard, "CHUNK_BYTES", 4096)


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def test_round_trip(tmp_path, small_chunks):
    """Every dtype, stride and shape, also empty and 0-d, loads equal, in dtype and shape too."""
    noise = torch.randn(3, 1700)
    tensors = {str(dtype): noise.to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "transposed": noise.t(),
        "strided": noise[::2, ::3],
        "expanded": torch.ones(1, 5).expand(4, 5),
        "parameter": torch.nn.Parameter(noise.clone()),
        "odd": torch.arange(3, dtype=torch.uint8),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }
    meta = {"tokens": 2**60 + 1, "lr": 0.1 + 0.2, "lanes": [[0, 1, 2]], "name": "é", "none": None}
    assert Writer(tmp_path, 3).save(12, tensors, meta).error is None
    loaded = load_newest(tmp_path)
    assert (loaded.step, loaded.generation, loaded.meta) == (12, 3, meta)
    assert loaded.name == "step-000000000012.3"
    assert list(loaded.tensors) == list(tensors)
    for name, tensor in tensors.items():
        back = loaded.tensors[name]
        assert back.dtype == tensor.dtype and back.shape == tensor.shape, name
        assert _bytes(back) == _bytes(tensor.detach()), name


def _bytes(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_a_run_without_checkpoints_has_nothing_to_load(tmp_path):
    """`load_newest` gives None for a new run, and for an empty folder or one with foreign names."""
    assert load_newest(tmp_path / "absent") is None
    root = tmp_path / "checkpoints"
    for foreign in (".tmp/step-000000000009.1.ab", ".trash/step-000000000009.1", "notes", "step-9"):
        (root / foreign).mkdir(parents=True)
    assert load_newest(tmp_path) is None
    assert loaded_step(save(tmp_path, 3).parents[1]) == 3


# -- damage ------------------------------------------------------------------------------------


def _truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def _append(path):
    with open(path, "ab") as file:
        file.write(b"\0")


def _loop(path):
    path.unlink()
    path.symlink_to(path)


DAMAGES = [_truncate, _append, Path.unlink, _loop, lambda path: os.truncate(path, 0)]


@pytest.mark.parametrize("file", ["manifest.json", "shard-0-of-1.bin"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_set_aside_and_the_one_before_is_loaded(
    tmp_path, small_chunks, caplog, file, damage
):
    """Any damage gives a warning, the checkpoint is kept as .bad, and the one before loads. A
    reader beside the run does not rename it."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    damage(newest / file)
    assert loaded_step(tmp_path, set_aside=False) == 1
    assert os.path.lexists(newest)
    caplog.clear()
    assert loaded_step(tmp_path) == 1
    assert file in caplog.text and newest.name in caplog.text
    assert not newest.exists() and newest.with_name(newest.name + ".bad.1").exists()


def spoil(data, rng):
    """Flip a bit, zero 4 KB, cut the end, or swap two parts."""
    block = min(4096, len(data) // 3)
    one, two = sorted((rng.randrange(len(data) - block), rng.randrange(len(data) - block)))
    kind = rng.choice(["flip", "flip", "flip", "hole", "cut", "swap"])
    if kind == "flip":
        return data[:one] + bytes([data[one] ^ 1 << rng.randrange(8)]) + data[one + 1 :]
    if kind == "hole":
        return data[:one] + bytes(block) + data[one + block :]
    if kind == "cut":
        return data[:one]
    middle = max(one + block, two)
    first, second = data[one : one + block], data[middle : middle + block]
    return data[:one] + second + data[one + block : middle] + first + data[middle + block :]


def test_hundreds_of_damages_are_found(tmp_path, small_chunks, caplog):
    """300 random bit flips, holes, truncations and swaps in manifest and shard are all found, and
    the restored bytes are accepted."""
    caplog.set_level(logging.ERROR)
    path = save(tmp_path, 5, size=20_000)
    good = {
        path / "manifest.json": lambda: retention.verify(path).ok,
        path / "shard-0-of-1.bin": lambda: retention.verify(path).ok,
    }
    rng, found = random.Random(0), dict.fromkeys(good, 0)
    while sum(found.values()) < 300:
        file = rng.choice(list(good))
        data = file.read_bytes()
        if (bad := spoil(data, rng)) == data:
            continue
        file.write_bytes(bad)
        assert not good[file](), (file.name, sum(found.values()))
        file.write_bytes(data)
        found[file] += 1
    assert min(found.values()) > 90 and all(is_good() for is_good in good.values())


@pytest.mark.parametrize("forge", ["empty", "file", "loop", "dangling", "copy", "garbage"])
def test_a_forged_newest_checkpoint_is_skipped(tmp_path, forge):
    """A file or folder with only the name of a checkpoint, at a higher step, is skipped."""
    good = save(tmp_path, 7)
    forged = good.with_name("step-000000000099.1")
    if forge == "empty":
        forged.mkdir()
    elif forge == "file":
        forged.write_bytes(b"x")
    elif forge in ("loop", "dangling"):
        forged.symlink_to(forged if forge == "loop" else good / "absent")
    elif forge == "copy":
        shutil.copytree(good, forged)
    else:
        forged.mkdir()
        (forged / "manifest.json").write_text(json.dumps({"format": 1, "step": 99}))
    assert loaded_step(tmp_path) == 7


def test_a_run_with_only_invalid_checkpoints_does_not_start(tmp_path):
    """If all checkpoints are invalid, each start ends with exit code 4 and the fix. A second bad
    checkpoint of the same name is set aside beside the first."""
    for number in (1, 2):
        for step in (1, 2):
            os.truncate(save(tmp_path, step) / "shard-0-of-1.bin", 5)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="none is valid.*from a backup") as caught:
                load_newest(tmp_path)
            assert caught.value.exit_code == 4
        assert len(list((tmp_path / "checkpoints").glob(f"*.bad.{number}"))) == 2


# -- choice ------------------------------------------------------------------------------------


def test_the_newer_generation_wins_over_the_higher_step(tmp_path):
    """A branch that a newer generation discarded is not used, whatever the file times are. Both are
    compared as numbers."""
    for step, generation in ((200, 9), (999, 9), (1000, 9), (150, 10)):
        path = save(tmp_path, step, generation)
        os.utime(path, (2_000_000_000 - step, 2_000_000_000 - step))
    assert loaded_step(tmp_path) == 150
    (path / "manifest.json").unlink()
    assert loaded_step(tmp_path) == 1000


def test_a_checkpoint_of_another_run_is_not_renamed(tmp_path, caplog):
    """A checkpoint of another run is skipped with the reason, and not renamed."""
    save(tmp_path, 1, meta=meta(1), run_id="a")
    other = save(tmp_path, 2, meta=meta(2), run_id="b")
    assert loaded_step(tmp_path, run_id="a") == 1
    assert "it belongs to run 'b', and this is run 'a'" in caplog.text and other.exists()
    with pytest.raises(CheckpointError, match="this is run 'c'"):
        load_newest(tmp_path, run_id="c")


def test_a_newer_format_is_not_called_damaged(tmp_path, monkeypatch):
    """A checkpoint of a later version ends the start with a message, and nothing is renamed."""
    monkeypatch.setattr(store, "FORMAT", 2)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="use the version that wrote it"):
        load_newest(tmp_path)
    assert path.exists() and "format 2" in retention.verify(path).reason
