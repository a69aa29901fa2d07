"""After damage in a run directory, the next start continues, or names the file and the fix."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.toy import SMALL

from gptddp import train
from gptddp.checkpoint import known, run_state, store
from gptddp.cli import cli
from gptddp.config import Config
from gptddp.flags import from_args
from gptddp.run.history import history, last_step, read_ledger
from gptddp.run.summary import HASH

DEEP = "[" * 100_000


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(known, "RETRY_S", (0.01,))


@pytest.fixture(scope="module")
def begun(corpus, tmp_path_factory) -> Path:
    """A complete run of two steps, and another one beside it."""
    from support.toy import training_here

    folder = tmp_path_factory.mktemp("runs")
    with training_here():
        for name, seed in (("run", "1"), ("other", "2")):
            flags = ["--data", str(corpus), "--run-dir", str(folder / name), "--seed", seed]
            assert not train.main([*SMALL, *flags, "--lr", f"1e-{seed}", "--steps", "2"])
    return folder


@pytest.fixture
def run_dir(begun, tmp_path) -> Path:
    """A copy of the run, to be damaged."""
    shutil.copytree(begun / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def goes_on(run_dir, corpus, train_here):
    """goes_on(): the exit code of a life that is to do one more step."""
    flags = ["--data", str(corpus), "--run-dir", str(run_dir), "--device", "cpu"]
    return lambda *more: train.main([*flags, "--cache-dir", "none", "--steps", "3", *more])


def config(run_dir: Path) -> dict:
    """The content of config.json, without the path, which differs."""
    found = json.loads((run_dir / "config.json").read_text())["config"]
    return {name: value for name, value in found.items() if name != "run_dir"}


@pytest.mark.parametrize("text", [None, '"lr": 0.1 -> "lr": 0.3', DEEP])
@pytest.mark.parametrize("name", ["config.json", "finished.json", "dataset.json"])
def test_lost_or_edited_copies_do_not_matter(run_dir, goes_on, caplog, name, text):
    """With lost, torn or edited copies the run continues from the ledger, and writes them again."""
    before, path = config(run_dir), run_dir / name
    whole = path.read_text()
    path.unlink()
    if text:
        path.write_text(whole.replace(*text.split(" -> ")) if " -> " in text else text)
    assert is_finished(run_dir) and goes_on() == 0
    assert config(run_dir) == before | {"steps": 3}
    assert not [
        e for e in read_ledger(run_dir) if e["event"] == "changed" and e["field"] != "steps"
    ]
    assert json.loads((run_dir / "finished.json").read_text())["step"] == 3
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3]


def is_finished(run_dir: Path) -> bool:
    return run_state.why_finished(from_args(["--run-dir", str(run_dir), "--steps", "2"])) != ""


@pytest.mark.parametrize("name", ["ledger.jsonl", "lease.json"])
@pytest.mark.parametrize("target", ["nowhere", "itself", "elsewhere"])
def test_a_link_in_the_place_of_a_file_is_refused(run_dir, goes_on, capsys, name, target):
    """A link is refused at once, with the file and the fix, without a wait or a restart. A ledger
    that is a link could be read, but is never written."""
    if target == "elsewhere":
        name = "ledger.jsonl"
        shutil.copy(run_dir / name, run_dir / target)
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(name if target == "itself" else target)
    assert goes_on() == 2
    said = capsys.readouterr().err
    assert str(run_dir / name) in said and "move away the symbolic link" in said
    assert last_step(run_dir) == 2


def test_a_ledger_of_another_run_is_refused(run_dir, begun, goes_on, capsys):
    """If the checkpoints are not the ledger's, the exit code is 4, and nothing is changed. With its
    own ledger put back, the run continues."""
    whole = (run_dir / "ledger.jsonl").read_bytes()
    shutil.copy(begun / "other/ledger.jsonl", run_dir / "ledger.jsonl")
    assert goes_on("--seed", "2") == 4
    assert "it belongs to run" in capsys.readouterr().err and not (run_dir / "log.2.jsonl").exists()
    (run_dir / "ledger.jsonl").write_bytes(whole)
    assert goes_on() == 0 and config(run_dir)["lr"] == 0.1


def test_a_quarantine_of_missing_row_groups_is_refused(run_dir, goes_on, capsys):
    """The error names ledger, field, rule and fix, and no life begins. With the ledger put back the
    run continues."""
    table = {
        "row_groups has 1000000000: it must be a number from 0 to ": {"row_groups": [10**9]},
        "row_groups has 1000000000000000000000000000000: it must": {"row_groups": [10**30]},
        "row_groups has -1: it must be a number from 0 to ": {"row_groups": [0, -1]},
    }
    event = {"event": "quarantine", "time": 1.0, "generation": 1, "step": 2, "row_groups": [0]}
    whole = (run_dir / "ledger.jsonl").read_text()
    for said, wrong in table.items():
        ledger = whole + json.dumps(event | wrong) + "\n"
        (run_dir / "ledger.jsonl").write_text(ledger)
        assert goes_on() == 2
        error = capsys.readouterr().err
        assert f"{run_dir / 'ledger.jsonl'}, the event `quarantine` of step 2: {said}" in error
        assert "put the ledger back from a backup" in error
        assert (run_dir / "ledger.jsonl").read_text() == ledger
    (run_dir / "ledger.jsonl").write_text(whole)
    assert goes_on() == 0


LEFT_OUT = {
    '"event": "quarantine"': "a 'quarantine' of generation 1 at byte ",
    '"event": "start", "config": 3': "a 'start' of generation 1 at byte ",
    '"event": "diverged", "names": 3': "a 'diverged' of generation 1 at byte ",
    '"event": "quarantine", "step": 2, "row_groups": ["x"]': "row_groups is ['x']: it must be",
    '"event": "quarantine", "step": -1, "row_groups": [0]': "step is -1: it must be a number",
    '"event": "checkpoint", "write_s": "x"': "a 'checkpoint' of generation 1 at byte ",
    '"event": "checkpoint", "write_s": 1' + "0" * 400: "int too large",
    '"event": "start", "generation": 1' + "0" * 300: " that is torn or not an event",
}


def test_skipped_lines_of_the_ledger_are_reported(run_dir, goes_on, caplog):
    """The start lists each unusable event and torn line with the reason."""
    with (run_dir / "ledger.jsonl").open("a") as ledger:
        for line in LEFT_OUT:
            generation = "" if "generation" in line else '"generation": 1, '
            ledger.write(f'{{{generation}"time": 1.0, {line}}}\n')
    assert goes_on() == 0
    assert f"{run_dir / 'ledger.jsonl'}: entries that cannot be used are skipped: " in caplog.text
    assert [said for said in LEFT_OUT.values() if said not in caplog.text] == []
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3]


def test_without_its_ledger_a_run_follows_its_newest_checkpoint(run_dir, goes_on, caplog):
    """If all of the ledger, or its end, is lost, configuration, id and step are those of the newest
    life, for the launcher too. A warning lists the lost records."""
    old = (run_dir / "ledger.jsonl").read_bytes()
    assert goes_on("--lr", "0.05", "--keep", "9") == 0
    before, run_id = config(run_dir), run_state.read(run_dir).run_id
    for lost, has in ((1, "ends with life 1"), (0, "has no start of a life")):
        (run_dir / "ledger.jsonl").write_bytes(old * lost)
        (run_dir / "config.json").unlink()
        assert run_state.in_force(Config(run_dir=str(run_dir))).lr == 0.05
        caplog.clear()
        assert goes_on("--steps", str(5 - lost)) == 0
        assert config(run_dir) == before | {"steps": 5 - lost}
        assert f"{run_dir / 'ledger.jsonl'} {has}, but the run is at life {3 - lost}" in caplog.text
        assert run_state.read(run_dir).run_id == run_id
    assert [line["step"] for line in history(run_dir)] == [1, 2, 3, 4, 5]


def test_a_run_without_ledger_and_checkpoint_is_refused(run_dir, goes_on, capsys, caplog):
    """The error names the remaining files, and nothing is changed. With --from-scratch it begins at
    step 0, as another run."""
    run_id = run_state.read(run_dir).run_id
    shutil.rmtree(run_dir / "checkpoints")
    kept = {path: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    for left in (["config.json", "log.1.jsonl"], ["config.json"], ["dataset.json"]):
        for path, content in kept.items():
            path.unlink(missing_ok=True)
            if path.name in left:
                path.write_bytes(content)
        there = sorted(run_dir.iterdir())
        assert goes_on() == 4
        said = capsys.readouterr().err
        assert left[-1] in said and "give --from-scratch to begin at step 0 again" in said
        assert sorted(run_dir.iterdir()) == there
    (run_dir / "ledger.jsonl").write_text('{"event": "sta\n')
    assert goes_on("--seed", "5") == 4
    assert goes_on("--seed", "5", "--from-scratch", *SMALL) == 0
    assert run_state.read(run_dir).run_id != run_id and config(run_dir)["seed"] == 5
    assert "as --from-scratch says" in caplog.text


def test_a_life_that_is_killed_before_its_start_leaves_no_run(corpus, tmp_path, train_here):
    """With half a line in its ledger and the other files of a life, the next life begins."""
    run = tmp_path / "run"
    (run / "checkpoints/.tmp").mkdir(parents=True)
    (run / "faults").mkdir()
    (run / "ledger.jsonl").write_text('{"event": "start", "time"')
    flags = ["--data", str(corpus), "--run-dir", str(run), "--steps", "1"]
    assert train.main([*SMALL, *flags]) == 0


def test_a_folder_that_is_something_else_is_refused(corpus, tmp_path, train_here, capsys):
    """Nothing is written into a dataset or a model, and no message suggests to delete a file."""
    data, model = tmp_path / "data", tmp_path / "model"
    shutil.copytree(corpus, data)
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    for folder, said in (
        (data, "is a dataset, not a run"),
        (model, "by `gptddp train --init-from"),
    ):
        there = sorted(folder.rglob("*"))
        assert train.main([*SMALL, "--data", str(corpus), "--run-dir", str(folder)]) == 2
        error = capsys.readouterr().err
        assert said in error and "remove" not in error and sorted(folder.rglob("*")) == there


def test_a_run_without_a_configuration_is_refused(run_dir, goes_on, capsys):
    """No command uses anything of such a run, for example of version 0.1.0."""
    new = (HASH, "sums", "config", "run_id")
    events = [{k: v for k, v in it.items() if k not in new} for it in read_ledger(run_dir)]
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(it) + "\n" for it in events))
    for path in run_dir.glob("checkpoints/step-*"):
        manifest = {k: v for k, v in store.unsealed(path).items() if k not in new}
        (path / store.MANIFEST).write_bytes(store._seal(manifest))
    assert goes_on() == 4 and "none is valid" in capsys.readouterr().err
    wanted = f"{run_dir}: neither ledger.jsonl nor a checkpoint has the configuration of the run"
    for command in (["sample"], ["checkpoints", "--export", str(run_dir / "out")]):
        done = CliRunner().invoke(cli, [command[0], str(run_dir), *command[1:]])
        assert done.exit_code == 2 and wanted in done.stderr


ODD = {
    "text": "x",
    "negative": -1,
    "huge": 10**30,
    "longer than a float": 10**400,
    "null": None,
    "true": True,
    "infinite": float("inf"),
    "list": [10**9],
    "object": {"a": []},
    "deep": json.loads("[" * 500 + "]" * 500),
    "surrogate": "\ud800",
}
IN_BOOKS = ("ledger.jsonl", "log.1.jsonl", "finished.json", "lease.json", "dataset.json")


def oddly(run_dir: Path, odd) -> None:
    """Append the last object of ledger, log and copies again, for each field with this value."""
    lease = dict.fromkeys(("owner", "holder", "host", "space", "pid", "started", "job"), "x")
    (run_dir / "lease.json").write_text(json.dumps(lease))
    for name in IN_BOOKS[:2]:
        path = run_dir / name
        found = [json.loads(line) for line in path.read_text().splitlines()]
        kinds = {it.get("event"): it for it in found}.values()
        more = [it | {field: odd} for it in kinds for field in [*it, "row_groups"]]
        with path.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in more))
    for name in IN_BOOKS[2:]:
        kept = json.loads((run_dir / name).read_text())
        (run_dir / name).write_text(json.dumps(dict.fromkeys(kept, odd)))


@pytest.mark.parametrize("odd", ODD)
def test_no_value_of_a_field_ends_a_command_with_a_traceback(run_dir, begun, corpus, odd):
    """Commands that read the records answer, or name the problem, with documented exit codes."""
    oddly(run_dir, ODD[odd])
    for command in (["log"], ["checkpoints"], ["fingerprints", str(begun / "run")]):
        done = CliRunner().invoke(cli, [command[0], str(run_dir), *command[1:]])
        assert done.exception is None or isinstance(done.exception, SystemExit), command
        assert done.exit_code in (0, 1, 2) and "Traceback" not in done.output


@pytest.mark.parametrize("name", ["ledger.jsonl", "log.1.jsonl", "checkpoints"])
@pytest.mark.parametrize("link", [False, True])
def test_a_folder_or_link_in_place_of_a_file_ends_no_command_with_a_traceback(run_dir, name, link):
    """A folder, or a link to itself, is named with the fix."""
    (run_dir / name).rename(run_dir / "aside")
    (run_dir / name).symlink_to(name) if link else (run_dir / name).mkdir()
    for command in (["log"], ["checkpoints", "--verify"], ["fingerprints", str(run_dir)]):
        done = CliRunner().invoke(cli, [command[0], str(run_dir), *command[1:]])
        assert isinstance(done.exception, SystemExit | None), (command, done.exception)
        assert done.exit_code in (0, 4) or str(run_dir / name) in done.stderr, command


@pytest.mark.parametrize("odd", ["longer than a float", "infinite", "surrogate"])
def test_no_value_of_a_field_ends_a_start_with_a_traceback(
    run_dir, goes_on, capsys, monkeypatch, odd
):
    """The start continues and reports skipped lines, or ends with exit code 2 and the reason."""
    monkeypatch.setattr("gptddp.run.lease.EXPIRY_S", 0.1)
    oddly(run_dir, ODD[odd])
    assert goes_on() in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("line", [{"step": 10**30, "time": 1.0}, {"step": 9}, {"step": -1}])
def test_foreign_lines_of_the_log_end_no_start(run_dir, goes_on, line):
    """Foreign lines do not count as steps to do again."""
    with (run_dir / "log.1.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert goes_on() == 0
    assert [e["redo"] for e in read_ledger(run_dir) if e["event"] == "start"] == [0, 0]
