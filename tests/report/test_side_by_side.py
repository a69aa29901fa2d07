"""`gptddp runs` shows the best run and the differing settings, in whatever state the runs are."""

import csv
import io
import json
import os
import shutil

import pytest
from click.testing import CliRunner
from support.report_pages import write

from gptddp.cli import cli
from gptddp.report.run_record import read_briefly
from gptddp.report.side_by_side import as_text, find, side_by_side
from gptddp.run import summary
from gptddp.run.history import history
from gptddp.run.lease_file import lease_of


def settle(run, factor=1.0, dataset="", **settings):
    """Give a run other settings in its ledger, and other validation losses in its log."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    for start in (it for it in lines if it["event"] == "start"):
        start["config"] |= settings
        start |= {"dataset": dataset} if dataset else {}
        del start[summary.HASH]
        start[summary.HASH] = summary.hash_of(start)
    (run / "ledger.jsonl").write_text("".join(json.dumps(it) + "\n" for it in lines))
    for log in run.glob("log.*"):
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        for it in (it for it in steps if "val_loss" in it):
            it["val_loss"] *= factor
        log.write_text("".join(json.dumps(it) + "\n" for it in steps))
    return run


@pytest.fixture
def sweep(tmp_path):
    """Three learning rates; lr-9 is the best."""
    for number, factor in ((2, 1.2), (9, 1.0), (10, 1.1)):
        run = write(tmp_path / f"sweep/lr-{number}", 40, lives=2)
        settle(run, factor, lr=number / 1000, checkpoint_every=7.0, data=f"data/{number}")
    return tmp_path / "sweep"


def runs(*args):
    result = CliRunner().invoke(cli, ["runs", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_best_run_is_first_and_columns_are_the_differences(sweep):
    """The best has the least validation loss; equal settings and paths are no columns."""
    table = side_by_side(list(find(sweep)))
    assert [it["run"] for it in table.rows] == ["lr-9", "lr-10", "lr-2"]
    assert [it["best"] for it in table.rows] == [True, False, False]
    assert table.settings == ["lr"]
    least = min((line["val_loss"], line["step"]) for line in history(sweep / "lr-9")
                if "val_loss" in line)  # fmt: skip
    assert (table.rows[0]["least"], table.rows[0]["at_step"]) == least
    head, first = runs(sweep).splitlines()[:2]
    assert " ".join(head.split()) == "run best val_loss lr last state step tokens"
    assert first.split()[:2] == ["*", "lr-9"] and "0.009" in first and "40/40" in first


def test_json_and_csv_have_every_digit(sweep):
    """JSON and CSV have full numbers, the field `best`, and a field for each difference."""
    first, *_ = json.loads(runs(sweep, "-o", "json"))
    row, *others = csv.DictReader(io.StringIO(runs(sweep, "-o", "csv")))
    assert first["best"] is True and row["best"] == "True" and len(others) == 2
    assert first["lr"] == float(row["lr"]) == 0.009 and first["state"] == "finished"
    assert str(first["least"]) == row["least"] and first["tokens"] == 40_000


def test_a_csv_table_has_no_formula(sweep, monkeypatch):
    """A run and its path may have any name: formulas and invalid bytes are escaped."""
    names = ["=cmd()", "+1", "-1", "@SUM(A1)"]
    for name in (*names, "\udcff"):
        shutil.copytree(sweep / "lr-2", sweep / name)
    monkeypatch.chdir(sweep)
    found = list(csv.DictReader(io.StringIO(runs("--output", "csv", "--", "\udcff", *names))))
    assert {it["run"] for it in found} == {*(f"'{it}" for it in names), "\\udcff"}
    assert all(it["path"] == it["run"] and float(it["least"]) > 0 for it in found)


@pytest.mark.parametrize("width", [30, 40, 79])
def test_a_narrow_table_cuts_nothing(sweep, width):
    """Columns that do not fit follow below: no line is too wide, and no value is lost."""
    table = side_by_side(list(find(sweep)))
    text = as_text(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert sorted(set(text.split())) == sorted(set(as_text(table).split()))


def test_a_run_in_any_state_has_its_row(sweep, tmp_path):
    """A run that is running, has no evaluation, lost the end of its log or its ledger, or cannot be
    read has a note, and comes after those with a result."""
    new = write(sweep / "new", 10)
    lines = (new / "ledger.jsonl").read_text().splitlines(keepends=True)
    (new / "ledger.jsonl").write_text(lines[0])
    (new / "log.1.jsonl").write_text("")
    (new / "lease.json").write_text(json.dumps(lease_of("a", "life") | {"space": "other"}))
    torn = shutil.copytree(sweep / "lr-2", sweep / "torn")
    (torn / "log.2.jsonl").write_bytes((torn / "log.2.jsonl").read_bytes()[:-20])
    (torn / "ledger.jsonl").write_text((torn / "ledger.jsonl").read_text() + '{"event": "che')
    (torn / "ledger.jsonl").write_text((torn / "ledger.jsonl").read_text() + "\n")
    lost = shutil.copytree(sweep / "lr-2", sweep / "lost")
    (lost / "ledger.jsonl").unlink()
    (sweep / "odd/ledger.jsonl").mkdir(parents=True)
    (sweep / "loop").mkdir()
    (sweep / "loop/ledger.jsonl").symlink_to("ledger.jsonl")
    ledger = shutil.copytree(sweep / "lr-2", sweep / "listed") / "ledger.jsonl"
    starts = [json.loads(line) for line in ledger.read_text().splitlines()]
    ledger.write_text("".join(json.dumps({**it, "config": [1]}) + "\n" for it in starts))
    rows = {it["run"]: it for it in side_by_side(list(find(sweep))).rows}
    assert list(rows)[0] == "lr-9" and len(rows) == 9
    assert (rows["new"]["state"], rows["new"]["note"]) == ("running", "no evaluation yet")
    assert "torn" in rows["torn"]["note"] and "its log ends at step 39" in rows["torn"]["note"]
    assert "from a backup" in rows["lost"]["note"] and rows["lost"]["least"] is not None
    assert rows["loop"]["state"] == "unreadable" and "symbolic link" in rows["loop"]["note"]
    assert rows["listed"]["least"] == rows["lr-2"]["least"]
    assert rows["odd"]["state"] == "unreadable" and "Is a directory" in rows["odd"]["note"]
    text = runs(sweep)
    assert all(name in text for name in rows) and "new: no evaluation yet" in text


def test_bits_per_byte_decide_where_datasets_differ(sweep):
    """If not all runs have bits per byte, no run is the best. The hash of the data is a column."""
    settle(sweep / "lr-2", 0.1, dataset="a" * 64)
    settle(sweep / "lr-9", dataset="b" * 64)
    table = side_by_side(list(find(sweep)))
    assert table.measure == "val_bpb" and "data" in table.settings
    assert "bbbbbbbb  " in as_text(table) and "b" * 9 not in as_text(table)
    for log in (sweep / "lr-2").glob("log.*"):
        log.write_text(log.read_text().replace("val_bpb", "was_bpb"))
    table = side_by_side(list(find(sweep)))
    assert table.measure == "val_loss" and "cannot be compared" in table.caption
    assert not any(it["best"] for it in table.rows)


def test_equal_runs_are_both_the_best(sweep):
    """Two runs may have the same bits, as one with kills and one without."""
    shutil.copytree(sweep / "lr-9", sweep / "again")
    assert sum(it["best"] for it in side_by_side(list(find(sweep))).rows) == 2


def test_runs_are_found_below_a_folder(sweep, tmp_path):
    """Folders inside a run are not searched; without runs the error has the fix."""
    (sweep / "lr-2/checkpoints/step-1").mkdir(parents=True)
    (sweep / "lr-2/checkpoints/ledger.jsonl").touch()
    assert [it.name for it in find(tmp_path)] == ["lr-10", "lr-2", "lr-9"]
    assert [it.name for it in find(sweep / "lr-9")] == ["lr-9"]
    result = CliRunner().invoke(cli, ["runs", str(tmp_path / "none")])
    assert result.exit_code == 2 and "give a folder with run directories" in result.stderr


def test_evaluations_are_those_of_the_history(tmp_path):
    """Each is from the newest life that made it, up to the end of the run; an older life's counts
    if the newer one is not as far. The last lines are read too."""
    run = write(tmp_path / "run", 60, lives=3)
    again = [json.loads(line) for line in (run / "log.2.jsonl").read_text().splitlines()]
    redone = [it | {"val_loss": 9.0} if "val_loss" in it else it for it in again[:10]]
    (run / "log.3.jsonl").write_text("".join(json.dumps(it) + "\n" for it in redone))
    lines = list(history(run))
    found = read_briefly(run)
    wanted = [it["step"] for it in lines if "val_loss" in it or it["step"] >= 20]
    assert list(found.steps) == wanted and found.step == 40
    losses = dict(zip(found.steps, found.series["val_loss"], strict=True))
    assert (losses[24], losses[27]) == (9.0, 9.0)
    assert losses[39] == lines[38]["val_loss"] != 9.0


def test_a_nan_loss_is_never_the_best(sweep):
    """Its run comes last, without a best value; the JSON has no NaN."""
    settle(sweep / "lr-9", float("nan"))
    rows = json.loads(runs(sweep, "-o", "json"), parse_constant=pytest.fail)
    assert [it["run"] for it in rows] == ["lr-10", "lr-2", "lr-9"]
    assert rows[-1]["least"] is None and "no evaluation yet" in rows[-1]["note"]


def test_a_run_is_listed_once_without_control_characters(sweep, tmp_path):
    """A run that is given twice or by a link has one row; its name may be odd. Folders are searched
    three levels deep."""
    (sweep / "link").symlink_to(sweep / "lr-9")
    shutil.copytree(sweep / "lr-2", sweep / "\x1b[2J")
    shutil.copytree(sweep / "lr-2", tmp_path / "1/2/3/4")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/far").symlink_to(shutil.copytree(sweep / "lr-2", tmp_path / ".far"))
    rows = json.loads(runs(tmp_path, sweep, "-o", "json"))
    names = ["lr-9", "lr-10", "lr-2", "\\x1b[2J", ".far"]
    assert sorted(it["run"] for it in rows) == sorted(names)
    assert "\x1b" not in runs(tmp_path, sweep)


def test_an_unreadable_folder_has_a_row(sweep, monkeypatch):
    """Such a folder may hold a run; the other runs have their rows."""
    (sweep / "closed").mkdir()

    def scandir(path, look=os.scandir):  # root may read any folder
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = [it["run"] for it in json.loads(runs(sweep, "-o", "json"))]
    assert found == ["lr-9", "lr-10", "lr-2", "closed"]
