"""One event, many readers: each sink gets it."""

import ast
import json
import re

import pytest
from support.paths import ROOT
from support.trainer_patches import lose_a_peer

from gptddp.run.history import history, read_ledger
from gptddp.training import console, metrics
from gptddp.training.events import IN_LEDGER, Events
from gptddp.training.recorder import Recorder


@pytest.fixture
def track(monkeypatch):
    """track(sink): add the sink to all later lives."""
    init = Recorder.__init__

    def use(sink):
        def with_sink(self, *args):
            init(self, *args)
            self.events.views.append(sink())

        monkeypatch.setattr(Recorder, "__init__", with_sink)

    return use


def test_a_failing_view_is_reported_once_and_the_others_get_the_event(run, tmp_path, track, caplog):
    """Training continues, and log, ledger and console have every event."""

    def broken(event):
        raise ValueError("a mistake in the sink")

    track(lambda: broken)
    assert run("--steps", "3") == 0
    assert caplog.text.count("training continues, but broken has failed on `start`") == 1
    assert caplog.text.count("ValueError: a mistake in the sink") == 1
    assert [line["step"] for line in history(tmp_path / "run")] == [1, 2, 3]
    assert read_ledger(tmp_path / "run")[-1]["event"] == "stop"


def test_an_error_of_a_record_reaches_the_loop():
    """Training does not continue from a step that cannot be recorded; views do not see it."""
    seen = []
    with pytest.raises(TypeError):
        Events(1, [lambda event: event["step"] + "x"], [seen.append]).emit("step", step=1)
    assert seen == []


def test_every_kind_that_a_sink_names_is_emitted():
    """No sink waits for a kind that is never emitted; the page of the ledger has all its kinds."""
    # emitted by a variable with one of two kinds, and `branch` by go_back.py, before any sink
    emitted = {"stall", "still", "slow", "slow_end", "branch"}
    for path in (ROOT / "gptddp/training").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and "emit" in ast.unparse(node.func):
                emitted |= {getattr(node.args[0], "value", "still")}
    methods = vars(console.Console).keys() | vars(metrics.Metrics).keys()
    named = {it.removeprefix("_on_") for it in methods if it.startswith("_on_")}
    assert IN_LEDGER | console._TEXTS.keys() | metrics._SETS.keys() | named <= emitted
    page = (ROOT / "docs/internals.md").read_text()
    rows = page.split("### The ledger")[1].split("\n- ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == IN_LEDGER


def test_the_ledger_has_its_kinds_of_events_and_no_other(run, tmp_path):
    """In an eventful run each event has all its fields, and events are in order of time."""
    lose_a_peer(run, "--steps", "6")
    assert run("--steps", "6", "--lr", "1e-3") == 0
    found = read_ledger(tmp_path / "run")
    kinds = ["start", "end", "changed", "start", "checkpoint", "stop"]
    assert [event["event"] for event in found] == kinds
    assert [event["generation"] for event in found] == [1, 1, 2, 2, 2, 2]
    assert set(kinds) <= IN_LEDGER


def test_the_life_before_ended_with_its_own_last_step(run, tmp_path):
    """If the life before repeated only some steps of an older life, its end has the time of its own
    last step."""
    lose_a_peer(run, "--steps", "12", at=10)
    for path in (tmp_path / "run").glob("log.1.jsonl"):  # ten minutes ago
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line | {"time": line["time"] - 600} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lose_a_peer(run, "--steps", "12", at=4)
    assert run("--steps", "12") == 0
    events = read_ledger(tmp_path / "run")
    end, start = (
        [event for event in events if event["event"] == it][-1] for it in ("end", "start")
    )
    assert (end["generation"], end["step"]) == (2, 3)
    assert start["time"] - end["at"] < 300
