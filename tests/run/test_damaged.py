"""Damaged and foreign files in a run directory: the next start goes on, or names file and fix."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.toy import SMALL

from gptddp import train
from gptddp.flags import from_args
from gptddp.run.history import history, read_ledger
from gptddp.run.in_force import is_finished

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def begun(corpus, tmp_path_factory) -> Path:
    """A run of two steps, complete, and another one beside it."""
    from support.toy import training_here

    folder = tmp_path_factory.mktemp("runs")
    with training_here():
        for name, seed in (("run", "1"), ("other", "2")):
            flags = ["--data", str(corpus), "--run-dir", str(folder / name), "--seed", seed]
            assert not train.main([*SMALL, *flags, "--lr", f"1e-{seed}", "--steps", "2"])
    return folder


@pytest.fixture
def run_dir(begun, tmp_path) -> Path:
    """The run, to be damaged."""
    shutil.copytree(begun / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def goes_on(run_dir, corpus, train_here):
    """goes_on(): the exit code of a life that is to do one step more."""
    flags = ["--data", str(corpus), "--run-dir", str(run_dir), "--device", "cpu"]
    return lambda *more: train.main([*flags, "--cache-dir", "none", "--steps", "3", *more])


def config(run_dir: Path) -> dict:
    """What the file says, without the path, which was another."""
    found = json.loads((run_dir / "config.json").read_text())["config"]
    return {name: value for name, value in found.items() if name != "run_dir"}


@pytest.mark.parametrize("text", ["null", "[]", "{}", '{"config": 3}', "7", DEEP, '{"run_id": 3}'])
def test_what_is_no_configuration_is_written_anew(run_dir, goes_on, caplog, text):
    """JSON of another shape as what is torn: kept aside, and the ledger has it."""
    before = config(run_dir)
    (run_dir / "config.json").write_text(text)
    assert goes_on() == 0
    assert config(run_dir) == before | {"steps": 3}
    assert (run_dir / "config.json.bad").read_text() == text
    assert "is torn" in caplog.text and "is gone" not in caplog.text
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl", "lease.json"])
@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_that_leads_nowhere_is_refused(run_dir, goes_on, capsys, name, target):
    """At once, with the file and the fix: no wait for a volume, and no new start after it."""
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(name if target == "itself" else target)
    assert goes_on() == 2
    said = capsys.readouterr().err
    assert str(run_dir / name) in said and "move away the symbolic link" in said
    assert [line["step"] for line in history(run_dir)] == [1, 2]


def test_a_directory_in_the_place_of_the_marker_is_refused(run_dir, goes_on, capsys):
    """At the start: at its end the run would wait for the disk, and again in each new life."""
    (run_dir / "finished.json").unlink()
    (run_dir / "finished.json").mkdir()
    assert goes_on() == 2
    assert "finished.json': move away the directory" in capsys.readouterr().err


def test_a_ledger_that_is_a_link_is_refused(run_dir, goes_on, capsys):
    """It could be read, but is never written: the run would wait for the disk at its end."""
    os.rename(run_dir / "ledger.jsonl", run_dir / "elsewhere")
    (run_dir / "ledger.jsonl").symlink_to("elsewhere")
    assert goes_on() == 2
    assert "ledger.jsonl': move away the symbolic link" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["3", "2"])
def test_damage_to_the_configuration_changes_nothing(run_dir, goes_on, caplog, steps):
    """A digit that flipped, also of a fixed field: the warning has both values."""
    before = config(run_dir)
    path = run_dir / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.1', '"lr": 0.3').replace('n": 32', 'n": 64'))
    assert config(run_dir) != before
    assert goes_on("--steps", steps) == 0
    assert config(run_dir) == before | {"steps": int(steps)}
    assert f"{path} is not what the newest life ran with" in caplog.text
    assert "lr: 0.3 -> 0.1" in caplog.text and "seq_len: 64 -> 32" in caplog.text
    fields = [e["field"] for e in read_ledger(run_dir) if e["event"] == "changed"]
    assert fields == ["steps"] * (steps == "3")


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl"])
def test_a_file_of_another_run_is_refused(run_dir, begun, goes_on, capsys, name):
    """Both are named; without the wrong one the run goes on."""
    shutil.copy(begun / "other" / name, run_dir / name)
    assert goes_on() == 2
    said = capsys.readouterr().err
    assert f"{run_dir / 'config.json'} and {run_dir / 'ledger.jsonl'} are of different" in said
    assert not (run_dir / "log.2.jsonl").exists()
    (run_dir / name).unlink()
    assert goes_on() == 0
    assert config(run_dir)["lr"] == 0.1


def test_the_marker_of_another_run_ends_no_job(run_dir, begun):
    """Else the launcher would take an unfinished run for complete. An old marker has no id."""
    asked = from_args(["--run-dir", str(run_dir), "--steps", "2"])
    assert is_finished(asked)
    marker = json.loads((run_dir / "finished.json").read_text())
    shutil.copy(begun / "other" / "finished.json", run_dir / "finished.json")
    assert not is_finished(asked)
    del marker["run_id"]
    (run_dir / "finished.json").write_text(json.dumps(marker))
    assert is_finished(asked)


def test_foreign_lines_of_the_ledger_are_left_out(run_dir, goes_on):
    """Whatever their fields are."""
    old = {"time": 1.0, "generation": 1}
    events = [
        {"event": "checkpoint", "write_s": "x", "name": "step-000000000002.1"},
        {"event": "quarantine"},
        {"event": "quarantine", "step": "x", "row_groups": [1]},
        {"event": "quarantine", "step": 2, "row_groups": 3},
        {"event": "quarantine", "step": 2, "row_groups": ["x"]},
        {"event": "start", "config": 3},
        {"event": "diverged", "names": 3},
    ]
    with (run_dir / "ledger.jsonl").open("a") as ledger:
        ledger.write("".join(json.dumps(old | event) + "\n" for event in events) + DEEP + "\n")
    assert goes_on() == 0
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3]


@pytest.mark.parametrize("line", [{"step": 10**30, "time": 1.0}, {"step": 9}, {"step": -1}])
def test_foreign_lines_of_the_log_end_no_start(run_dir, goes_on, line):
    """They are no steps that are to be done again."""
    with (run_dir / "log.1.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert goes_on() == 0
    assert [e["redo"] for e in read_ledger(run_dir) if e["event"] == "start"] == [0, 0]
