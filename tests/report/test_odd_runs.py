"""Every run gives a page, whatever its state; other folders give an error with the fix."""

import json
import os
import re
import shutil
import sys

import pytest
from support.report_pages import Text, draw, figures, points, refused, table, write

from gptddp.run.lease_file import lease_of

ODD = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[31m</title>"


def verdict(page):
    return " ".join(re.search(r'class="lead">(.*?)</p>', page, re.S)[1].split())


def test_a_run_without_a_step_has_a_page(tmp_path, written):
    """The page has its configuration, and no plot."""
    (tmp_path / "new").mkdir()
    start = (written / "ledger.jsonl").read_text().splitlines()[0]
    (tmp_path / "new/ledger.jsonl").write_text(f"{start}\n")
    page = draw(tmp_path / "new", out=tmp_path / "report.html")
    assert "before its first step" in verdict(page) and "No step has been logged yet" in page
    assert not figures(page)
    assert "a run records this from its first step on" in page
    assert ["preset", "tiny"] in [row[:2] for row in table(page, "Environment")]


def test_torn_files_are_reported_and_the_rest_is_drawn(tmp_path, written):
    """A line of the log and one of the ledger are torn; copies such as config.json are not read."""
    log = written / "log.3.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    ledger = written / "ledger.jsonl"
    *events, stop = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join([*events, '{"event": "checkp\n', stop]))
    (written / "config.json").write_text('{"config": ')
    page = draw(written, out=tmp_path / "report.html")
    assert len(points(figures(page)["loss"], "training")) == 59
    told = " ".join(re.findall(r'class="wrong">(.*?)</p>', page, re.S))
    assert re.search(r"a line at byte \d+ that is torn", told) and ">finished<" in page
    assert table(page, "Lives and restarts")[3][0] == "3"


def test_a_gap_in_the_log_is_reported(tmp_path, written):
    """The message is that of `gptddp log`; the proof says that the log has errors."""
    lines = (written / "log.2.jsonl").read_text().splitlines(keepends=True)
    (written / "log.2.jsonl").write_text("".join(lines[:4] + lines[6:]))
    page = draw(written, out=tmp_path / "report.html")
    assert "it lacks steps 25 to 26" in Text(page).text
    assert "has errors, see above" in page


@pytest.mark.parametrize("state", ["running", "stopped", "failed", "lost"])
def test_the_state_follows_from_the_files(tmp_path, written, state):
    """Lease held: running; stopped by a signal: stopped; a trainer error: failed; else lost."""
    *events, stop = (written / "ledger.jsonl").read_text().splitlines()
    if state == "stopped":
        events.append(json.dumps(json.loads(stop) | {"cause": "stopped"}))
    (written / "ledger.jsonl").write_text("\n".join(events) + "\n")
    if state == "running":
        (written / "lease.json").write_text(json.dumps(lease_of("a", "life") | {"space": "other"}))
    if state == "failed":
        (written / "faults").mkdir()
        record = {"error": "ValueError: odd", "rank": 0, "pod": "p-0", "time": 1.0}
        (written / "faults/60.3.0.json").write_text(json.dumps(record | {"traceback": "Trace"}))
    page = draw(written, out=tmp_path / "report.html")
    assert f">{state}<" in verdict(page) and ("ETA" in Text(page).text) == (state == "running")
    assert re.search(r"ETA(<[^>]*>)*\d+\.", page) is None  # whole seconds, as everywhere
    assert ("rank 0 (p-0): ValueError: odd" in verdict(page)) == (state == "failed")


def test_skipped_steps_are_marked(tmp_path, written):
    """A step without a finite loss is a gap in the line, and an event."""
    log = written / "log.2.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines[2] |= {"loss": None, "grad_norm": None}
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = draw(written, out=tmp_path / "report.html")
    assert points(figures(page)["loss"], "training")[23] is None
    assert ["23", "skipped: loss or gradient not finite"] in table(page, "What else happened")


def test_a_run_with_too_many_skipped_steps_at_its_end_has_failed(tmp_path, written):
    """The limit is max_skipped (10) in a row; a run that ends with ten is lost."""
    log, ledger = written / "log.3.jsonl", written / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for last, state in ((10, "lost"), (11, "failed")):
        bad = {45, *range(61 - last, 61)}
        skipped = [it | {"loss": None} if it["step"] in bad else it for it in lines]
        log.write_text("".join(json.dumps(line) + "\n" for line in skipped))
        said = verdict(draw(written, out=tmp_path / "report.html"))
        assert f">{state}<" in said and ("the last 11 steps had no finite" in said) == (last == 11)


def test_a_slow_rank_a_stall_and_a_spike_are_listed(tmp_path, written):
    """They have their steps, and the names of the ledger; an invalid value is no error."""
    head = {"time": 1.7e9, "generation": 3}
    slow = {"event": "slow", "step": 50, "rank": 1, "name": "rank 1 (w-1)", "ratio": 1.9}
    stall = {"event": "stall", "step": 55, "seconds": 7.5, "ranks": [1], "names": ["rank 1 (w-1)"]}
    stall["where"] = "rank 1 in next (loader.py:1)"
    spike = {"event": "spike", "step": 52, "field": "loss", "value": 9.5, "usual": 2.25}
    with open(written / "ledger.jsonl", "a") as ledger:
        for event in (slow, stall, spike, {"event": "spike", "step": 53, "value": "x"}):
            ledger.write(json.dumps(head | event) + "\n")
    rows = dict(table(draw(written, out=tmp_path / "report.html"), "What else happened")[1:])
    assert rows["50"] == "rank 1 (w-1) is slow: 1.9 times the median"
    assert "after 7.5 s: rank 1 in next" in rows["55"]
    assert rows["52"] == "loss is 9.5000, but usually 2.2500" and "53" in rows


def test_no_text_of_a_run_becomes_html(tmp_path):
    """Names, causes, machines, versions and errors are shown as text, and no script runs."""
    run = write(tmp_path / "<img src=x onerror=alert(3)>", 30, lives=2, odd=ODD)
    (run / "faults").mkdir()
    record = {"error": ODD, "rank": 0, "pod": ODD, "time": 1.0, "traceback": ODD}
    (run / "faults/60.3.0.json").write_text(json.dumps(record))
    other = shutil.copytree(run, tmp_path / "<img src=x onerror=alert(4)>")
    page = draw(run, other, out=tmp_path / "report.html")
    seen = Text(page)
    assert "<img" not in page and "alert(1)</script>" not in page and not seen.handlers
    assert [it for it in seen.scripts if "nonce" not in it and "type" not in it] == []
    assert "\x1b" not in page and seen.text.count("alert(2)") > 4
    (nonce,) = {it["nonce"] for it in seen.scripts if "nonce" in it}
    assert f"script-src 'nonce-{nonce}';" in page


def test_a_folder_without_a_run_is_refused_with_the_fix(tmp_path, written):
    """A folder above the run and a missing folder are refused, and no page is written."""
    for path in (tmp_path, tmp_path / "none"):
        told = refused(path, written, "--out", tmp_path / "report.html")
        assert "give the folder that was given as --run-dir" in told
    assert not list(tmp_path.glob("report.html"))


def test_a_file_that_is_no_page_is_not_replaced(tmp_path, written):
    """A folder is refused too, and a pipe, on which the command would hang. An older page is
    replaced, so a live run can be drawn again."""
    before = (written / "ledger.jsonl").read_bytes()
    os.mkfifo(tmp_path / "pipe")
    for out in (written / "ledger.jsonl", tmp_path, tmp_path / "pipe"):
        assert "is not a page of gptddp report" in refused(written, "--out", out)
    assert (written / "ledger.jsonl").read_bytes() == before
    for _ in range(2):
        assert "<h1>run</h1>" in draw(written, written / "../run", out=tmp_path / "new/report.html")


def test_without_the_library_the_install_line_is_printed(tmp_path, written, monkeypatch):
    """An installation without plotly gives one message with the command."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    told = refused(written, "--out", tmp_path / "report.html")
    assert "pip install 'gptddp[report]'" in told
