"""One event, many readers: each sink gets it, and a new sink is one more function."""

import ast
import contextlib
import inspect
import json
import queue
import threading

import pytest
from support.paths import ROOT
from support.trainer_patches import lose_a_peer

from gptddp.run.history import history, read_ledger
from gptddp.training import console, events, metrics
from gptddp.training.events import IN_LEDGER, OTHERS, Events
from gptddp.training.recorder import Recorder

KINDS = IN_LEDGER.keys() | OTHERS.keys()


class Tracker:
    """A sink for a tracking service: curves by step, notes of what happens, a summary at the end.

    `client` may raise, or be slow: it works in a thread. Events that it has not taken are dropped
    `patience_s` after the end of the life, and also while it is far behind.
    """

    NOTES = ("changed", "end", "quarantine", "slow", "stall", "spike", "stop")

    def __init__(self, client, patience_s=5.0):
        self.client, self.patience_s = client, patience_s
        self.waiting = queue.Queue(maxsize=10_000)
        self.thread = threading.Thread(target=self.work, name="tracker", daemon=True)
        self.thread.start()

    def __call__(self, event):
        kind = event["event"]
        if kind == "start":
            self.put("begin", event["run_id"], event["step"], event.get("config"))
        elif kind in ("step", "completed"):
            line = event["line"]
            numbers = {k: v for k, v in line.items() if isinstance(v, int | float)}
            self.put("log", line["step"], numbers)
        elif kind == "checkpoint" and not event.get("error"):
            self.put("note", event["step"], f"checkpoint {event['name']}")
        elif kind in self.NOTES:
            self.put("note", event["step"], kind)
        elif kind == "ended" and event["results"]:
            self.put("summary", event["results"])
        elif kind == "closed":
            self.put("finish")
            self.thread.join(self.patience_s)

    def put(self, *call):
        with contextlib.suppress(queue.Full):
            self.waiting.put_nowait(call)

    def work(self):
        name = ""
        while name != "finish":
            name, *args = self.waiting.get()
            with contextlib.suppress(Exception):  # the next call may work
                getattr(self.client, name)(*args)


class Client:
    """Records its calls; `fails`: raises or hangs on request."""

    def __init__(self, fails=None):
        self.calls, self.fails, self.over = [], fails, threading.Event()

    def __getattr__(self, name):
        def call(*args):
            if self.fails == "raises":
                raise RuntimeError("no network")
            if self.fails == "hangs" and name == "log":
                self.over.wait()
            self.calls.append((name, *args))

        return call


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


def test_a_new_sink_needs_at_most_sixty_lines(run, tmp_path, track):
    """A tracker gets every step of both lives, the events between them, and the results."""
    assert len(inspect.getsource(Tracker).splitlines()) <= 60
    client = Client()
    track(lambda: Tracker(client))
    lose_a_peer(run, "--steps", "6", "--eval-every", "3")
    assert run("--steps", "6", "--eval-every", "3") == 0
    lines = {line["step"]: line for line in history(tmp_path / "run")}
    logged = {step: numbers for name, step, numbers in of(client, "log")}
    assert logged.keys() == lines.keys()
    for step, numbers in logged.items():
        assert numbers.items() <= lines[step].items() and {"loss", "lr", "tok_s"} <= numbers.keys()
    assert "val_loss" in logged[3] and "val_loss" in logged[6]
    begun = [(run_id, step) for _, run_id, step, _ in of(client, "begin")]
    run_id = read_ledger(tmp_path / "run")[0]["run_id"]
    assert begun == [(run_id, 0), (run_id, 0)]
    notes = [text for _, _, text in of(client, "note")]
    assert notes == ["end", "checkpoint step-000000000006.2", "stop"]
    ((_, results),) = of(client, "summary")
    assert results["num_steps"] == 6 and results["val_bpb"] == lines[6]["val_bpb"]
    assert len(of(client, "finish")) == 2


def of(client: Client, name: str) -> list[tuple]:
    return [call for call in client.calls if call[0] == name]


@pytest.mark.parametrize("fails", ["raises", "hangs"])
def test_a_lost_service_costs_the_run_nothing(run, tmp_path, track, fails):
    """If its calls raise or do not return, all steps are done, and the exit code is 0."""
    client = Client(fails)
    track(lambda: Tracker(client, patience_s=0.1))
    assert run("--steps", "4") == 0
    client.over.set()
    assert [line["step"] for line in history(tmp_path / "run")] == [1, 2, 3, 4]


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


def test_every_kind_is_known_and_used():
    """Each emitted kind has its sentence, and no sink waits for a kind that is never emitted."""
    # emitted by a variable with one of two kinds, and `branch` by go_back.py, before any sink
    emitted = {"stall", "still", "slow", "slow_end", "branch"}
    for path in (ROOT / "gptddp/training").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and "emit" in ast.unparse(node.func):
                emitted |= {getattr(node.args[0], "value", "still")}
    assert emitted == KINDS
    assert console._TEXTS.keys() <= KINDS and metrics._SETS.keys() <= KINDS
    methods = vars(console.Console).keys() | vars(metrics.Metrics).keys()
    assert {it.removeprefix("_on_") for it in methods if it.startswith("_on_")} <= KINDS


def test_the_ledger_has_its_kinds_of_events_and_no_other(run, tmp_path):
    """In an eventful run each event has all its fields, and events are in order of time."""
    lose_a_peer(run, "--steps", "6")
    assert run("--steps", "6", "--lr", "1e-3") == 0
    found = read_ledger(tmp_path / "run")
    kinds = ["start", "end", "changed", "start", "checkpoint", "stop"]
    assert [event["event"] for event in found] == kinds
    assert [event["generation"] for event in found] == [1, 1, 2, 2, 2, 2]
    assert events.IN_LEDGER.keys() >= set(kinds)


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
