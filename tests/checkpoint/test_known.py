"""A run whose checkpoints are gone never silently begins at step 0 again."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest
from support.toy import trained
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import known, run_state
from gptddp.checkpoint.run_state import why_finished
from gptddp.config import Config
from gptddp.distributed import environment
from gptddp.run.history import read_ledger


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(known, "RETRY_S", (0.01,))


@pytest.fixture(scope="module")
def three_lives(corpus, tmp_path_factory) -> Path:
    """A run of six steps, made in three lives."""
    folder = tmp_path_factory.mktemp("known") / "run"
    for steps in ("2", "4", "6"):
        trained(corpus, folder, "--steps", steps)
    return folder


@pytest.fixture
def root(three_lives, tmp_path) -> Path:
    """The checkpoints of a copy of that run."""
    return shutil.copytree(three_lives, tmp_path / "run") / "checkpoints"


def sources(run_dir: Path) -> list[str]:
    return [event["source"] for event in read_ledger(run_dir) if event["event"] == "start"]


def move_away(root):
    root.rename(root.with_name("elsewhere"))


def empty(root):
    shutil.rmtree(root)
    root.mkdir()


def lose_the_ledger_too(root):
    shutil.rmtree(root)
    (root.parent / "ledger.jsonl").unlink()


def lose_the_end_of_the_ledger_too(root):
    """Cut the ledger before the first commit, as an old backup would be."""
    ledger = root.parent / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes().splitlines(keepends=True)[0])
    shutil.rmtree(root)


BOOKS = {
    move_away: "step-000000000006.3",
    empty: "step-000000000006.3",
    lose_the_ledger_too: "dataset.json, finished.json of a run (6 steps logged)",
    lose_the_end_of_the_ledger_too: "life 3, whose checkpoints ledger.jsonl lacks",
}


@pytest.mark.parametrize("harm", BOOKS)
def test_a_run_whose_checkpoints_are_gone_is_refused(run, root, capsys, harm):
    """The exit code is 4, the error has the recorded names and the fix, and nothing is trained."""
    log = root.with_name("log.3.jsonl").read_bytes()
    harm(root)
    assert run("--steps", "8") == 4
    err = capsys.readouterr().err
    assert BOOKS[harm] in err and "--from-scratch" in err
    assert run("--steps", "8") == 4  # also at the next try
    assert not root.with_name("log.4.jsonl").exists()
    assert root.with_name("log.3.jsonl").read_bytes() == log
    assert run("--steps", "1", "--from-scratch") == 0


def test_from_scratch_begins_at_step_0_again(run, root, tmp_path, caplog):
    """The flag counts for one start: the run does not record it, and the next life does not miss
    the discarded checkpoints, although none has been saved since."""
    move_away(root)
    lose_a_peer(run, "--steps", "8", "--from-scratch")
    assert "as --from-scratch says" in caplog.text
    assert "from_scratch" not in run_state.read(tmp_path / "run").config
    assert run("--steps", "8") == 0
    assert sources(tmp_path / "run")[3:] == ["scratch", "scratch"]


def test_from_scratch_discards_no_existing_checkpoint(run, root, tmp_path):
    """If a checkpoint exists, the run resumes from it."""
    assert run("--steps", "8", "--from-scratch") == 0
    assert sources(tmp_path / "run")[-1] == "step-000000000006.3"


JOB = {"TORCHELASTIC_RUN_ID": "demo-12345678", "PET_RDZV_ENDPOINT": "demo-worker-0:23456"}
STARTS = {
    "the pods of a job": (JOB, JOB, 4),
    "another job": (JOB, JOB | {"TORCHELASTIC_RUN_ID": "demo-87654321"}, 0),
    "torchrun's restart": ({}, {"TORCHELASTIC_RESTART_COUNT": "1"}, 4),
    "a launcher that is alone": ({}, {"GPTDDP_VERDICT": "{}/verdict.json"}, 4),
    "the same command again": ({}, {}, 0),
}


@pytest.mark.parametrize("name", STARTS)
def test_from_scratch_counts_for_one_start(run, root, tmp_path, capsys, monkeypatch, name):
    """If the flag stays in a manifest, a restart of the pods does not discard the run again."""
    first, again, code = STARTS[name]
    shutil.rmtree(root)
    for variable, value in first.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    assert run("--steps", "2", "--from-scratch") == 0
    assert run("--steps", "4", "--from-scratch") == 0  # it resumes
    assert sources(tmp_path / "run")[3:] == ["scratch", "step-000000000002.4"]
    shutil.rmtree(root)
    for variable, value in again.items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    (tmp_path / environment.STARTS).write_text("++")  # a launcher's second start
    capsys.readouterr()
    assert run("--steps", "4", "--from-scratch") == code
    said = "--from-scratch to begin at step 0 again. It counts once in a job"
    err = capsys.readouterr().err
    if verdict := os.environ.get("GPTDDP_VERDICT"):  # from its launcher
        err = Path(verdict).read_text()
    assert (said in err) == (code == 4)


def test_a_run_from_scratch_is_not_finished(run, root, tmp_path):
    """The recorded end of the discarded run ends no job, neither at the start nor later."""
    asked = Config(run_dir=str(tmp_path / "run"), steps=6)
    again = dataclasses.replace(asked, from_scratch=True)
    assert why_finished(asked) and why_finished(again)
    shutil.rmtree(root)
    assert why_finished(asked) and not why_finished(again)
    lose_a_peer(run, "--steps", "6", "--from-scratch")
    assert not why_finished(asked) and not why_finished(again)


def test_resuming_from_an_older_checkpoint_is_reported(run, root, caplog):
    """If the newest commit is missing, a warning names it and the checkpoint that is used."""
    shutil.rmtree(root / "step-000000000006.3")
    lose_a_peer(run, "--steps", "20")
    lacks, goes_on = "lacks step-000000000006.3", "which the ledger has: the run resumes from"
    assert f"{lacks}, {goes_on} step-000000000004.2, step 4" in caplog.text


def test_pruned_checkpoints_are_not_reported_as_missing(run, root, caplog):
    """A pruned checkpoint gives no warning; one that was set aside gives only its own warning."""
    assert run("--steps", "8", "--keep", "1") == 0
    assert len([name for name in os.listdir(root) if name.startswith("step")]) == 1
    assert run("--steps", "10", "--keep", "3") == 0
    assert "lacks" not in caplog.text
    newest = root / "step-000000000010.5/manifest.json"
    os.truncate(newest, 10)
    assert run("--steps", "12", "--keep", "1") == 0
    assert "checkpoint skipped" in caplog.text and "lacks" not in caplog.text


def test_an_older_ledger_does_not_end_a_run(run, root, caplog):
    """If an old backup of the ledger ends with the first life, the run continues from a newer
    checkpoint without a warning, and adds no end of that life. Without checkpoints the run is
    refused."""
    ledger = root.with_name("ledger.jsonl")
    lines = ledger.read_text().splitlines(keepends=True)
    stop = next(i for i, line in enumerate(lines) if '"event": "stop"' in line)
    shutil.rmtree(root / "step-000000000002.1")
    for kept, newest in ((stop + 1, "step-000000000006.3"), (1, "step-000000000008.4")):
        ledger.write_text("".join(lines[:kept]))
        assert run("--steps", "8") == 0
        assert sources(root.parent)[-1] == newest and "lacks" not in caplog.text
        assert "end" not in [event["event"] for event in read_ledger(root.parent)]
    ledger.write_text("".join(lines[: stop + 1]))
    shutil.rmtree(root)
    assert run("--steps", "2") == 4


def test_a_folder_that_comes_back_is_waited_for(run, root, tmp_path, monkeypatch):
    """A listing that is empty for a moment only delays the start."""
    move_away(root)
    back = root.with_name("elsewhere").rename
    monkeypatch.setattr("time.sleep", lambda seconds: root.exists() or back(root))
    assert run("--steps", "8") == 0
    assert sources(tmp_path / "run")[-1] == "step-000000000006.3"


def test_a_checkpoint_missing_from_the_listing_is_looked_up(run, root, tmp_path, monkeypatch):
    """If a network file system lists an old state of the folder, the recorded name is looked up."""
    listdir = os.listdir
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: listdir(path) if Path(path) != root else [])
        assert run("--steps", "8") == 0
    assert sources(tmp_path / "run")[-1] == "step-000000000006.3"


def test_a_run_that_was_never_saved_begins_again(run, tmp_path, caplog):
    """If all pods are killed before the first commit, the log says how many steps are repeated."""
    lose_a_peer(run, "--steps", "8")
    assert run("--steps", "8") == 0
    assert sources(tmp_path / "run") == ["scratch", "scratch"]
    assert "has no checkpoint: the 3 steps in its log are done again" in caplog.text
