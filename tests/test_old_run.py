"""A run directory that an older version has made is a run like any other: see its README.md."""

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from support.paths import TESTS

from gptddp import train
from gptddp.checkpoint import snapshot
from gptddp.cli import cli
from gptddp.distributed import hardware
from gptddp.run.directory import config_of
from gptddp.run.history import history, read_ledger

OLD = TESTS / "fixtures/run-0.1.0"
CHECKPOINT, SNAPSHOT, LAST = 13, 18, 40  # their steps, and that of the end
UNDISTURBED = [json.loads(line) for line in (OLD / "undisturbed.jsonl").read_text().splitlines()]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The run directory, copied to where it was not made; its dataset is beside it."""
    for name in ("data", "run"):
        shutil.copytree(OLD / name, tmp_path / name)
    return tmp_path / "run"


@pytest.fixture
def goes_on(old, monkeypatch, train_here):
    """Continue the run to its end, as the next life of its job."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "old")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "pod-0:23456")
    flags = ["--device", "cpu", "--cache-dir", "none"]

    def to_the_end(*more: str):
        data = ["--data", str(old.parent / "data")]
        assert not train.main([*flags, *data, "--run-dir", str(old), *more])

    return to_the_end


def gptddp(*args: object) -> str:
    result = CliRunner().invoke(cli, list(map(str, args)))
    assert result.exit_code == 0, result.output
    return result.stdout


def check_continued(run: Path, step: int) -> None:
    """The third life did the steps after this one, all as the undisturbed run did them."""
    lines = list(history(run))
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    for line, wanted in zip(lines, UNDISTURBED, strict=True):
        for key in ("batch_fp", "chain_fp", "tokens"):
            assert line[key] == wanted[key]
        assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    new = [json.loads(line) for line in (run / "log.3.jsonl").read_text().splitlines()]
    assert {line["step"] for line in new} >= set(range(step + 1, LAST + 1))
    assert json.loads((run / "finished.json").read_text())["step"] == LAST


def test_an_old_run_goes_on_from_its_checkpoint(old, goes_on):
    """The ledger says from which one; rows are bit for bit those of an undisturbed run, losses to
    one millionth."""
    goes_on()
    start = [e for e in read_ledger(old) if e["event"] == "start"][-1]
    assert (start["generation"], start["step"]) == (3, CHECKPOINT)
    assert start["source"] == f"step-{CHECKPOINT:012}.1" and start["redo"] == SNAPSHOT - CHECKPOINT
    check_continued(old, CHECKPOINT)


def test_an_old_run_goes_on_from_memory(old, goes_on, monkeypatch, tmp_path):
    """The snapshot that a life left when it lost a peer is newer than the checkpoint, and used."""
    (tmp_path / "memory").mkdir()
    (left,) = (OLD / "memory").iterdir()
    shutil.copy(left, snapshot.path_of(tmp_path / "memory", old))
    monkeypatch.setenv("GPTDDP_MEMORY", str(tmp_path / "memory"))
    goes_on()
    start = [e for e in read_ledger(old) if e["event"] == "start"][-1]
    assert (start["generation"], start["step"], start["redo"]) == (3, SNAPSHOT, 0)
    assert start["source"].startswith("memory")
    check_continued(old, SNAPSHOT)


def test_an_old_run_multiplies_as_version_0_1_0_did(old, goes_on, monkeypatch):
    """Also where a new run has MKL: in fp32 with oneDNN, if that keeps it, and with the threads of
    each start. To go on fixes neither."""
    monkeypatch.setattr(hardware, "cpu_has_amx", lambda: False)
    monkeypatch.setattr("gptddp.distributed.connect.cpu_quota", lambda: 2)
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        goes_on()
        assert torch.get_num_threads() == 2
        wanted = "medium" if hardware._keeps_fp32() else "highest"
        assert torch.get_float32_matmul_precision() == wanted
        mixed = replace(config_of(old), precision="bf16")  # what is in fp32 beside it: not oneDNN
        hardware.use(mixed, torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == "highest"
        torch.set_float32_matmul_precision("medium")
        monkeypatch.setattr(hardware, "_keeps_fp32", lambda: False)
        hardware.use(config_of(old), torch.device("cpu"))
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_num_threads(threads)
    check_continued(old, CHECKPOINT)
    saved = config_of(old)
    assert saved.as_0_1 and saved.reduce == "fast" and saved.matmul is saved.threads is None


def test_what_an_old_run_has_left_open_is_told_and_recorded_when_it_is_given(old, goes_on, caplog):
    """From then on it is fixed. And a budget that does not move its rate is told, with why."""
    caplog.set_level(logging.INFO)
    goes_on("--threads", "1", "--max-tokens", "1000000")
    assert config_of(old).threads == 1
    events = [it for it in read_ledger(old) if it["event"] == "changed"]
    told = {(it["field"], it["old"], it["new"]) for it in events}
    assert told == {("threads", None, 1), ("max_tokens", 0, 1000000)}
    assert f"changed after step {CHECKPOINT}: threads: None -> 1" in caplog.text
    check_continued(old, CHECKPOINT)


def test_an_old_run_is_read_by_every_command(old, tmp_path):
    """`checkpoints --verify` finds its checkpoint whole, `log` and `fingerprints` all its steps."""
    listed = gptddp("checkpoints", old, "--verify").split()
    assert listed[:2] == [f"step-{CHECKPOINT:012}.1", "verified"]
    lines = [json.loads(line) for line in gptddp("log", old).splitlines()]
    assert [line["step"] for line in lines] == list(range(1, SNAPSHOT + 1))
    other = tmp_path / "undisturbed"
    shutil.copytree(old, other, ignore=shutil.ignore_patterns("log.*"))
    shutil.copy(OLD / "undisturbed.jsonl", other / "log.1.jsonl")
    assert gptddp("fingerprints", other, old).startswith(f"same: {SNAPSHOT} steps")


def test_an_old_run_is_exported(old, tmp_path):
    """The weights of its checkpoint, in the shapes of its configuration."""
    gptddp("checkpoints", old, "--export", tmp_path / "model", "--data", tmp_path / "data")
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        assert file.metadata()["step"] == str(CHECKPOINT)
        assert file.get_slice("transformer.wte.weight").get_shape() == [257, 8]
