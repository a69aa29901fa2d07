"""Training in this process: what a run leaves behind, and the errors for mistakes."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from support.prepared import BYTES, flip
from support.toy import SMALL
from support.waiting_writer import Writer

from gptddp import files, train
from gptddp.checkpoint import run_state
from gptddp.checkpoint.load import load_newest
from gptddp.data import blocks, lanes
from gptddp.prepare.build import prepare
from gptddp.run.history import history, read_ledger

pytestmark = pytest.mark.usefixtures("train_here")


def test_a_run_logs_every_step_and_saves_the_last(run, tmp_path):
    """Steps 1 to n are in the log once each, the last one evaluated and in a checkpoint."""
    assert run("--steps", "6", "--eval-every", "4") == 0
    lines = list(history(tmp_path / "run"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    numbers = {"loss", "grad_norm", "lr", "tokens", "tok_s", "data_wait_s", "world_size", "time"}
    assert numbers | {"batch_fp", "chain_fp"} <= lines[0].keys()
    assert len(lines[0]["batch_fp"]) == len(lines[0]["chain_fp"]) == 16
    assert ["val_loss" in line for line in lines] == [False, False, False, True, False, True]
    assert json.loads((tmp_path / "run/finished.json").read_text())["step"] == 6
    assert (tmp_path / "run/checkpoints/step-000000000006.1/manifest.json").exists()
    start, *ends = read_ledger(tmp_path / "run")
    assert [event["event"] for event in (start, *ends)] == ["start", "checkpoint", "stop"]
    assert start["chain_fp"] == "0" * 16
    for event in ends:
        assert [event[key] for key in ("batch_fp", "chain_fp")] == [
            lines[-1][key] for key in ("batch_fp", "chain_fp")
        ]


def test_a_new_run_directory_is_durable(run, tmp_path, monkeypatch):
    """The folder above a new run directory is fsynced before the run directory has a file."""
    done, fsync = [], os.fsync

    def noting(fd):
        fsync(fd)
        done.append((os.readlink(f"/proc/self/fd/{fd}"), os.listdir(tmp_path / "run")))

    monkeypatch.setattr(os, "fsync", noting)
    assert run("--steps", "1") == 0
    assert done[0] == (str(tmp_path), [])


def test_gradients_are_clipped_unless_the_norm_is_0(corpus, tmp_path):
    """With --grad-clip 0 the bits are those of a limit that is never reached."""
    states = {}
    for clip in ("0", "1e9", "0.1"):
        places = ["--data", str(corpus), "--run-dir", str(tmp_path / clip), "--grad-clip", clip]
        assert train.main([*SMALL, *places, "--steps", "3"]) == 0
        states[clip] = list(history(tmp_path / clip))[-1]["state_fp"]
    assert states["0"] == states["1e9"] != states["0.1"]


def test_a_run_of_another_configuration_is_refused(run, tmp_path, capsys):
    """The error has exit code 2, the fields that differ and the fix; the run is unchanged."""
    assert run("--steps", "2") == 0
    before = (tmp_path / "run/config.json").read_bytes()
    assert run("--steps", "4", "--seed", "1", "--n-embd", "64") == 2
    err = capsys.readouterr().err
    assert "seed: 1337 -> 1" in err and "n_embd: 32 -> 64" in err
    assert "to continue it, or give another --run-dir" in err
    assert (tmp_path / "run/config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--run-dir", "r"], "--data is missing"),
        (["--data", "d"], "--run-dir is missing"),
        (["--data", "nowhere", "--run-dir", "r"], "nowhere"),
        (["--data", "d", "--run-dir", "r", "--sted", "3"], "unknown option '--sted'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, monkeypatch, capfd, args, message):
    """A mistake that the user can fix gives no traceback."""
    monkeypatch.chdir(tmp_path)
    assert train.main(args) == 2
    err = capfd.readouterr().err
    assert message in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_an_unavailable_data_volume_ends_a_life_and_not_the_run(run, tmp_path, monkeypatch):
    """The error is not final: the next life tries again, and continues if the volume is back."""
    assert run("--steps", "2") == 0
    read = Path.read_bytes

    def away(path):
        if path.name == "dataset.json" and path.parent != tmp_path / "run":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(Path, "read_bytes", away)
        patch.setattr(files, "RETRY_S", (0.01, 0.01))
        run("--steps", "4")
    assert run("--steps", "4") == 0
    assert [line["step"] for line in history(tmp_path / "run")] == [1, 2, 3, 4]


def test_a_bad_row_group_ends_the_run(books, tmp_path, monkeypatch, capfd):
    """A bad row group gives exit code 2, its name, and the flag to continue without it."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))
    dataset = prepare([books], tmp_path / "data", BYTES)
    sizes = [group.tokens for group in dataset.row_groups("train")]
    number = lanes.blocks(lanes.deal(sizes, 8, 1337)[5], 1337, 5, 0)[1].group
    bad = flip(dataset, number)
    args = [*SMALL, "--data", str(dataset.dir), "--run-dir", str(tmp_path / "run")]
    assert train.main([*args, "--steps", "500"]) == 2
    err = capfd.readouterr().err
    assert bad in err and "--on-bad quarantine" in err and "Traceback" not in err


def test_data_that_changes_between_lives_is_refused_with_its_files(books, tmp_path, capfd):
    """Other data in the same place is an error with each different file; the run is unchanged."""
    dataset = prepare([books], tmp_path / "data", BYTES)
    args = [*SMALL, "--data", str(dataset.dir), "--run-dir", str(tmp_path / "run")]
    assert train.main([*args, "--steps", "2"]) == 0
    manifest = json.loads((dataset.dir / "dataset.json").read_text())
    (shard,) = manifest["splits"]["train"]["files"]
    (dataset.dir / shard["path"]).rename(dataset.dir / "train/one.parquet")
    shard["path"] = "train/one.parquet"
    shutil.copy(dataset.dir / "val/00000.parquet", dataset.dir / "train/two.parquet")
    twin = manifest["splits"]["val"]["files"][0] | {"path": "train/two.parquet"}
    manifest["splits"]["train"]["files"].append(twin)
    (dataset.dir / "dataset.json").write_text(json.dumps(manifest))
    assert train.main([*args, "--steps", "4"]) == 2
    err = capfd.readouterr().err
    assert "train/00000.parquet was removed; train/one.parquet was added; train/two" in err
    assert f"is not the data that run {tmp_path / 'run'} began with" in err
    assert len(list(history(tmp_path / "run"))) == 2


def test_a_state_with_another_fingerprint_is_not_resumed(run, tmp_path, capfd):
    """A checkpoint with intact bytes, but with a wrong number in a tensor, gives exit code 4."""
    assert run("--steps", "4") == 0
    loaded = load_newest(tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints" / loaded.name)
    tensors = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    tensors["model.wte.weight"][3, 3] += 1
    writer = Writer(tmp_path / "run", 1, run_id=run_state.read(tmp_path / "run").run_id)
    assert writer.save(4, tensors, loaded.meta).error is None
    assert run("--steps", "6") == 4
    assert "and was saved with" in capfd.readouterr().err
