"""A run never loads, counts or deletes the checkpoints of another run."""

import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.checkpoints import meta, save

from gptddp.checkpoint import known, retention, run_state, store
from gptddp.cli import cli
from gptddp.run.history import read_ledger

MINE, OTHERS, LATER = (f"step-000000000{name}" for name in ("002.1", "003.1", "003.9"))


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(known, "RETRY_S", (0.01,))


@pytest.fixture
def mine(run, tmp_path):
    """A run that did two steps."""
    assert run("--steps", "2") == 0
    return tmp_path / "run"


@pytest.fixture
def others(run, tmp_path):
    """The checkpoints of another run of the same data and seed, after three steps."""
    assert run("--steps", "3", "--run-dir", str(tmp_path / "other")) == 0
    return tmp_path / "other/checkpoints"


def put(others: Path, run: Path) -> None:
    """Copy the checkpoints into a run, as a restore from the wrong backup does."""
    shutil.copytree(others, run / "checkpoints", dirs_exist_ok=True)


def rewrite(path: Path, **fields: object) -> None:
    """Write other values into a manifest, with a valid hash."""
    (path / store.MANIFEST).write_bytes(store._seal(store.unsealed(path) | fields))


def sources(run_dir: Path) -> list[str]:
    return [event["source"] for event in read_ledger(run_dir) if event["event"] == "start"]


def gptddp(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, list(map(str, args)))
    return result.exit_code, result.output


def test_a_newer_checkpoint_of_another_run_is_skipped(run, mine, others, caplog):
    """The run continues from its own checkpoint with a warning, and all readers skip the other."""
    put(others, mine)
    assert "step 2" in gptddp("sample", mine, "--tokens", "1")[1]
    code, listed = gptddp("checkpoints", mine, "--verify")
    assert code == 0 and [line.split()[1] for line in listed.splitlines()[:2]] == [
        "foreign",
        "verified",
    ]
    caplog.clear()
    assert run("--steps", "4") == 0
    assert f"checkpoint skipped: {OTHERS}: it belongs to run" in caplog.text
    assert "in its own --run-dir" in caplog.text
    assert sources(mine) == ["scratch", MINE]
    assert store.names(mine) == ["step-000000000004.2", OTHERS, MINE]


def test_a_run_with_only_checkpoints_of_another_run_is_refused(run, mine, others, capsys):
    """The run ends with exit code 4 and the fix, also with --from-scratch; nothing is trained,
    renamed or exported. With its own checkpoint put back, the run continues."""
    shutil.move(mine / "checkpoints", mine / "kept")
    put(others, mine)
    for flags in ((), ("--from-scratch",)):
        assert run("--steps", "4", *flags) == 4
        err = capsys.readouterr().err
        assert f"{OTHERS}: it belongs to run" in err and "put this run's own checkpoints" in err
    for command in (("checkpoints",), ("sample",), ("checkpoints", "--export", mine / "out")):
        code, said = gptddp(command[0], mine, *command[1:])
        assert code == 4 and "it belongs to run" in said
    assert store.names(mine) == [OTHERS] and sources(mine) == ["scratch"]
    shutil.move(mine / "kept" / MINE, mine / "checkpoints")
    assert run("--steps", "4") == 0 and sources(mine)[-1] == MINE


def test_a_newest_commit_of_another_run_counts_as_missing(run, mine, others, caplog):
    """The steps since the run's own checkpoint are repeated; a warning names the missing one."""
    assert run("--steps", "4") == 0
    path = mine / "checkpoints/step-000000000004.2"
    rewrite(path, run_id="another")
    assert run("--steps", "5") == 0
    assert f"lacks {path.name}, which the ledger has" in caplog.text and path.exists()
    assert sources(mine)[-1] == MINE


def test_a_run_continues_with_only_its_checkpoints(run, mine, tmp_path):
    """A folder with only the checkpoints is enough: they have the run's id and configuration."""
    wanted = run_state.read(mine)
    shutil.copytree(mine / "checkpoints", tmp_path / "copy/checkpoints")
    assert run("--steps", "3", "--run-dir", str(tmp_path / "copy")) == 0
    assert run_state.read(tmp_path / "copy").run_id == wanted.run_id
    assert sources(tmp_path / "copy") == [MINE]


def test_retention_counts_and_deletes_only_the_runs_own(tmp_path):
    """Newer checkpoints of another run do not displace the run's own, an older one replaces no
    milestone, and none of them is ever deleted."""
    theirs = [(step, 1) for step in (1, 101)] + [(step, 9) for step in (400, 500)]
    for step, generation in theirs:
        save(tmp_path, step, generation, meta=meta(step), run_id="theirs", keep=99)
    for step in (90, 110, 120, 210, 220, 230):
        how = {"run_id": "mine", "keep": 2, "keep_every": 100}
        save(tmp_path, step, 2, meta=meta(step), **how)
    left = {store.order(name) for name in store.names(tmp_path)}
    assert left == {(9, 500), (9, 400), (2, 230), (2, 220), (2, 210), (2, 110), (1, 101), (1, 1)}


def test_an_unreadable_checkpoint_is_not_deleted(tmp_path, monkeypatch):
    """An unreadable checkpoint may be another run's: a later call decides whether to delete it."""
    for step in (1, 2):
        path = save(tmp_path, step, meta=meta(step), run_id="mine")
    unsealed = store.unsealed

    def fail(path):
        if path.name.startswith("step-000000000001"):
            raise store.Unusable(path, "Input/output error", damaged=False, transient=True)
        return unsealed(path)

    monkeypatch.setattr(store, "unsealed", fail)
    assert retention.prune(tmp_path, 1, run_id="mine") == []
    monkeypatch.undo()
    assert retention.prune(tmp_path, 1, run_id="mine") == ["step-000000000001.1"]
    assert path.exists() and os.listdir(path)
