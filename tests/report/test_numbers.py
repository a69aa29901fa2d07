"""The page has the values of log, ledger and checkpoints, and no others."""

import numpy as np
import pytest
from support.report_pages import Text, draw, figures, marks, points, table, write

from gptddp.checkpoint.retention import list_checkpoints
from gptddp.report import strip
from gptddp.report.run_record import read
from gptddp.run import summary
from gptddp.run.history import history, read_ledger
from gptddp.run.owners import OWNERS, Owners
from gptddp.units import clock, duration, percent


def test_the_plots_have_the_values_of_the_log(killed, page):
    """They have every value of every step, to the last digit, and all evaluations."""
    lines, drawn = list(history(killed)), figures(page)
    fields = {"loss": "training", "tok_s": "", "world_size": "", "lr": "", "grad_norm": ""}
    for field, name in {**fields, "data_wait_s": ""}.items():
        assert points(drawn[field], name) == {line["step"]: line[field] for line in lines}, field
    for field, of, name in (("val_loss", "loss", "validation"), ("val_bpb", "val_bpb", "")):
        wanted = {line["step"]: line[field] for line in lines if field in line}
        assert points(drawn[of], name) == wanted and wanted


def test_a_restart_is_marked_with_its_ledger_entry(killed, page):
    """Every plot over the steps has the restart's step, cause, cost and the cost's parts."""
    events = read_ledger(killed)
    (end,) = (it for it in events if it["event"] == "end")
    begun = [it for it in events if it["event"] == "start"]
    for figure in (it for it in figures(page).values() if "traces" in it):
        (text,) = marks(figure, "restart")
        assert end["cause"] in text
        assert duration(begun[1]["time"] - end["at"]) in text
        assert f"reload {duration(begun[1]['seconds'])}" in text
        assert f"{begun[1]['redo']} steps done again" in text
        at = [it["x"]["steps"] for it in figure["traces"] if it.get("mark") == "restart"]
        assert at == [[begun[1]["step"]]]


def test_goodput_and_rank_seconds_equal_those_of_the_metrics(killed, page):
    """The page has the rank-seconds and the share of each category."""
    seconds = summary.read(killed).owners.so_far()
    total = sum(seconds.values())
    rows = {row[0]: row[1:] for row in table(page, "Where the time went")[1:]}
    assert rows.keys() == {name for name, it in seconds.items() if it}
    for name, it in seconds.items():
        if it:
            assert rows[name][0] == f"{it:,.1f}" and rows[name][1] == percent(it / total)
    assert f"goodput {percent(seconds['training'] / total)}" in " ".join(Text(page).text.split())


def test_lives_checkpoints_and_proof_equal_those_of_the_files(killed, page):
    """The page has the start and the end of each life, each checkpoint, and both fingerprints."""
    starts = [it for it in read_ledger(killed) if it["event"] == "start"]
    rows = table(page, "Lives and restarts")[1:]
    assert [row[0] for row in rows] == ["1", "2"]
    for row, start in zip(rows, starts, strict=True):
        assert row[1] == clock(start["time"] - start["seconds"])
        assert row[2] == "2" and row[3] == str(start["step"])
    names = [row[0] for row in table(page, "Checkpoints")[1:]]
    assert names == [it.name for it in list_checkpoints(killed)][::-1]
    last = list(history(killed))[-1]
    assert last["chain_fp"] in page and last["state_fp"] in page


def test_the_picture_of_the_ranks_has_the_sums_of_the_ledger(killed, tmp_path):
    """This holds for a real run with a kill, and for a run that was stopped for a day."""
    stopped = write(tmp_path / "stopped", 600, lives=4, ranks=3, stop_s=86_400.0)
    for path in (killed, stopped):
        run = read(path)
        drawn = sum((it.seconds.sum(1) for it in strip.stretches(run)), np.zeros(len(OWNERS)))
        sums = dict(zip(OWNERS, drawn, strict=True))
        assert sums == pytest.approx(owned(path), rel=0.01, abs=0.02)
    assert owned(killed) == pytest.approx(summary.read(killed).owners.so_far(), abs=0.01)


def test_a_rank_that_is_lost_within_a_life_is_no_restart(tmp_path):
    """The loss is an event with its pause; later sums have only the seconds of the other ranks."""
    path = write(tmp_path / "run", 100, ranks=3, lost=50)
    run, page = read(path), draw(path, out=tmp_path / "report.html")
    drawn = sum((it.seconds.sum(1) for it in strip.stretches(run)), np.zeros(len(OWNERS)))
    assert dict(zip(OWNERS, drawn, strict=True)) == pytest.approx(owned(path), rel=0.01, abs=0.02)
    assert {it.seconds.shape[1] for it in strip.stretches(run)} == {2, 3}
    assert "Ranks were lost or joined once, with a pause of 3.5 s." in page
    (text,) = marks(figures(page)["loss"], "event")
    assert text == "lost rank 2 (job-worker-1): it was killed; 2 ranks go on after 3.50 s"
    assert not marks(figures(page)["loss"], "restart")


def owned(path):
    """The rank-seconds by category, from all events of a ledger."""
    found = Owners()
    for event in read_ledger(path):
        found.add(event)
    return found.so_far()


def test_the_picture_of_the_ranks_has_the_shares_of_the_sums(tmp_path):
    """The shares are counted in pixels, except for a stop, which is cut out."""
    path = write(tmp_path / "run", 600, lives=4, ranks=3, stop_s=86_400.0)
    page = draw(path, out=tmp_path / "report.html")
    (picture,) = (it for it in figures(page).values() if "cells" in it)
    pixels = "".join(picture["cells"])
    wanted = owned(path) | {"stopped": 0.0}
    for number, name in enumerate(picture["owners"]):
        share = pixels.count(f"{number:x}") / len(pixels)
        assert share == pytest.approx(wanted[name] / sum(wanted.values()), abs=0.005), name
    assert len(picture["pieces"]) == 2


def test_runs_are_drawn_over_each_other(killed, tmp_path):
    """Each has its name in every plot, below a table of all; the details of each are closed."""
    other = write(tmp_path / "other", 40)
    page = draw(killed, other, out=tmp_path / "report.html")
    for figure in (it for it in figures(page).values() if "traces" in it):
        names = {it["name"].split(":")[0] for it in figure["traces"]}
        assert names == {"run", "other"}
    assert points(figures(page)["lr"], "other")[40] == 0.0
    rows = table(page.replace("<h1>2 runs</h1>", "<h2>all</h2>"), "all")[1:]
    assert [[it[0], *it[-3:-1]] for it in rows] == [
        ["best other", "finished", "40/40"],
        ["run", "finished", "12/12"],
    ]
    assert page.count("<details><summary><b>") == 2 and 'name="run" checked' in page


def test_every_axis_has_the_position_of_each_step(killed, page):
    """Tokens and time of each step are those of its log."""
    lines, began = list(history(killed)), read(killed).lives[0].began
    x = figures(page)["lr"]["traces"][0]["x"]
    assert x["steps"] == [it["step"] for it in lines]
    assert x["tokens"] == [it["tokens"] for it in lines]
    assert x["time"] == pytest.approx([it["time"] - began for it in lines], abs=0.06)


def test_a_live_run_is_drawn_up_to_its_newest_line(killed, tmp_path):
    """The seconds of the newest life are read from its log, as in the metrics."""
    path = write(tmp_path / "run", 100)
    ledger = (path / "ledger.jsonl").read_text().splitlines()
    (path / "ledger.jsonl").write_text(ledger[0] + "\n")
    told = [line["phases"] for line in history(path) if "phases" in line][-1]
    seconds = read(path).owners.so_far()
    assert seconds["training"] == pytest.approx(sum(told["step"]))
