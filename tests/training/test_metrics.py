"""Rank 0's metrics: a real scrape over HTTP, and a port that is taken."""

import math
import socket
import statistics
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch

from gptddp.config import Config
from gptddp.run.owners import OWNERS
from gptddp.run.summary import Summary
from gptddp.training import metrics as m
from gptddp.training import scrapes
from gptddp.training.clock import PHASES, STATES, PhaseClock, RankSeconds
from gptddp.training.events import Events
from gptddp.training.saves import Saves
from gptddp.training.scrapes import Scrapes
from gptddp.training.stragglers import Stragglers

LINE = {"step": 1, "loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "data_wait_s": 0.1, "tok_s": 100.0}
LINE |= {"tokens": 100, "time": 5.0}
STEP = {"event": "step", "line": LINE, "train_s": 9.0, "step_s": 1.0, "slow": {}, "owned": None}
START = {"event": "start", "time": 5.0, "generation": 1, "step": 0, "tokens": 0, "train_s": 0.0}
START |= {"world_size": 2, "nodes": 2, "restarts": 0, "quarantined": 0, "flops_per_token": 6}
CONFIG = Config(steps=400, checkpoint_every=60.0)


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def scrape(port: int, timeout_s: float = 15.0) -> str:
    """The text of /metrics, as soon as the server answers."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_a_scrape_shows_what_was_recorded(port):
    """Counters, gauges and phases reach the wire; what is not known yet is NaN, not 0."""
    spent = RankSeconds(PhaseClock("step"), SimpleNamespace(rank=0, world_size=2))
    metrics = m.Metrics(CONFIG, spent, run_id="r")
    time.sleep(0.02)
    spent.take(spent.mine())
    metrics(STEP | {"line": LINE | {"step": 41}})
    Scrapes(metrics.registry, port, "127.0.0.1")
    lines = dict(
        line.rsplit(" ", 1) for line in scrape(port).splitlines() if not line.startswith("#")
    )
    assert float(lines["gptddp_steps_total"]) == 1
    assert float(lines["gptddp_step"]) == 41
    assert float(lines['gptddp_phase_seconds_total{phase="step"}']) >= 0.02
    assert lines['gptddp_loss{split="val"}'] == "NaN"
    assert lines["gptddp_last_checkpoint_step"] == "NaN"


def values(metrics: m.Metrics, family: str) -> dict[str, float]:
    """Its samples by the value of their label."""
    (found,) = [it for it in metrics.registry.collect() if it.name == f"gptddp_{family}"]
    return {next(iter(it.labels.values()), ""): it.value for it in found.samples}


def series(metrics: m.Metrics) -> set[tuple[str, ...]]:
    """Names and labels of all that a scrape shows."""
    samples = [it for family in metrics.registry.collect() for it in family.samples]
    return {(it.name, *it.labels.values()) for it in samples}


def test_the_state_is_that_of_the_phase_and_of_the_end():
    """One of them is 1 at any time: what rank 0 does as it is asked."""
    metrics, clock, stop = m.Metrics(CONFIG, None), PhaseClock(), []
    metrics.state = lambda: clock.state(bool(stop))
    seen = []
    for phase in PHASES:
        clock.enter(phase)
        found = values(metrics, "state")
        seen += [state for state, holds in found.items() if holds]
    stop.append(1)
    assert values(metrics, "state")["draining"] == 1
    expected = dict.fromkeys(PHASES, "training") | STATES
    assert seen == [expected[phase] for phase in PHASES]
    assert set(found) == {*seen, "draining", "finished"}


def test_the_peak_of_memory_is_of_the_rank_that_holds_most():
    """As the table of all ranks has it, in bytes; NaN before the first step."""
    spent = RankSeconds(PhaseClock(), SimpleNamespace(rank=0, world_size=2))
    metrics = m.Metrics(CONFIG, spent)
    assert math.isnan(values(metrics, "peak_memory_bytes")["resident"])
    rows = spent.mine()
    mine = int(rows[0, -1])
    assert 10 << 20 < mine < 100 << 30
    rows[1, -1] = 3 * mine
    spent.take(rows)
    metrics(STEP)
    assert values(metrics, "peak_memory_bytes") == {"resident": 3 * mine}


def test_mfu_is_there_where_the_peak_is_known():
    """FLOPs of a token times tokens a second, of what the devices can do; NaN before a step."""
    assert not [name for name, *_ in series(m.Metrics(CONFIG, None)) if "mfu" in name]
    metrics = m.Metrics(CONFIG, None, peak=2000.0)
    metrics(START)
    assert math.isnan(values(metrics, "mfu_ratio")[""])
    metrics(STEP)
    assert values(metrics, "mfu_ratio")[""] == 6 * 100 / 2000


@pytest.mark.parametrize(
    ("source", "commits", "step", "age_s"),
    [
        ("memory", ["step-000000000007.1", "step-000000000009.2"], 9, 5000),
        ("memory", [], math.nan, 9000),
        ("step-000000000009.2", ["step-000000000009.2"], 9, 0),
        ("scratch", [], math.nan, 0),
    ],
)
def test_a_life_knows_the_newest_checkpoint_from_its_first_scrape_on(
    tmp_path, source, commits, step, age_s
):
    """One from memory saves nothing anew: short lives must not hide that nothing is saved.

    After a checkpoint was read, nothing older than this life can be lost.
    """
    now = time.time()
    config = Config(steps=20, run_dir=str(tmp_path), checkpoint_every=90.0)
    metrics = m.Metrics(config, None)
    events = Events(3, [], [metrics])
    origin = {"generation": 3, "step": 9, "config": config, "source": source, "late": None}
    origin = SimpleNamespace(**origin, run_id="r", parent=None, changes={})
    events.emit(**{"kind": "start", **START, "time": now})
    saved_time = now - 5000 if commits else None
    ledger = Summary(commits=commits, saved_time=saved_time, began_time=now - 9000)
    lease = SimpleNamespace(check=lambda: None)
    saves = Saves(origin, lease, None, None, events)
    saves.begin({"w": torch.zeros(2)}, ledger)
    if source.startswith("step-"):
        events.emit("loaded", step=origin.step, seconds=1.0)
    assert values(metrics, "checkpoint_every_seconds")[""] == 90
    assert values(metrics, "last_checkpoint_step")[""] == pytest.approx(step, nan_ok=True)
    when = values(metrics, "last_checkpoint_timestamp_seconds")[""]
    assert now - when == pytest.approx(age_s, abs=60)


def test_every_series_is_there_before_anything_has_happened():
    """With 0 for what is counted and NaN for what is not known: a scrape adds none later."""
    spent = RankSeconds(PhaseClock(), SimpleNamespace(rank=0, world_size=2))
    metrics = m.Metrics(CONFIG, spent, peak=1.0)
    before = series(metrics)
    spent.take(spent.mine())
    saved = {"step": 1, "name": "step-1", "nbytes": 9, "stall_s": 0.1, "write_s": 0.1, "time": 5.0}
    owned = dict.fromkeys(OWNERS, 1.0)
    for event in (
        START,
        {"event": "loaded", "step": 1, "seconds": 1.0},
        STEP | {"line": LINE | {"val_loss": 1.0}, "owned": owned},
        {"event": "checkpoint"} | saved,
        {"event": "storage", "fails": True},
        {"event": "last", "owned": owned, "finished": True},
    ):
        metrics(event)
    assert series(metrics) == before


def test_all_of_it_costs_a_step_next_to_nothing():
    """The calls of one step of rank 0 of four: 0.07 ms measured, of a step of over a second."""
    spent = RankSeconds(PhaseClock(), SimpleNamespace(rank=0, world_size=4))
    metrics, spent_s, judge = m.Metrics(CONFIG, spent), [], Stragglers([""] * 4, [1] * 4)
    for _ in range(100):
        began = time.thread_time()
        for phase in PHASES:
            spent.clock.enter(phase)
        spent.take(spent.mine())
        metrics(STEP)
        judge.add(1.0, spent.busy_s)
        spent_s.append(time.thread_time() - began)
    assert statistics.median(spent_s) < 0.5e-3


def test_the_step_at_which_a_run_will_end_is_of_the_budget_that_ends_it():
    """An estimate, which follows the run, where that is not the budget of steps."""
    metrics, found = m.Metrics(Config(steps=400, max_tokens=1000, max_time=0.0), None), []
    for step, tokens in ((0, 0), (12, 140), (20, 200), (30, 1010)):
        metrics(STEP | {"line": LINE | {"step": step, "tokens": tokens}})
        found.append(metrics.registry.get_sample_value("gptddp_max_steps"))
    assert found == [400, 86, 100, 30]


@pytest.mark.alone
def test_phases_add_up_to_the_elapsed_time():
    """Every second belongs to exactly one phase."""
    begin = time.monotonic()
    clock = PhaseClock()
    for phase in ("step", "data_wait", "eval", "step", "checkpoint"):
        time.sleep(0.005)
        clock.enter(phase)
    clock.enter("other")
    assert sum(clock.seconds.values()) == pytest.approx(time.monotonic() - begin, abs=0.005)


def test_an_occupied_port_is_a_warning_and_served_once_it_is_free(port, caplog, monkeypatch):
    """Training goes on at once; the server comes up by itself when the port is free."""
    monkeypatch.setattr(scrapes, "_RETRY_S", 0.1)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        Scrapes(m.Metrics(CONFIG, None).registry, port, "127.0.0.1")
        time.sleep(0.5)
        assert [r for r in caplog.records if "training goes on" in r.message]
        assert len(caplog.records) == 1  # said once, not at every retry
    assert "gptddp_steps_total 0.0" in scrape(port)


@pytest.mark.alone
def test_the_last_scrape_is_waited_for_where_somebody_scrapes(port):
    """One that begins after the wait has; no longer than the scrapes are apart; not without any."""
    found = Scrapes(m.Metrics(CONFIG, None).registry, port, "127.0.0.1")
    began = time.monotonic()
    assert not found.wait_for_last(lambda: False)
    assert time.monotonic() - began < 0.5
    scrape(port)
    time.sleep(0.4)
    scrape(port)
    time.sleep(0.2)  # the client has all before the server knows that it has
    later = threading.Timer(0.5, scrape, [port])
    later.start()
    assert found.wait_for_last(lambda: False)
    later.join()
    time.sleep(0.2)
    began = time.monotonic()
    assert not found.wait_for_last(lambda: False)  # nobody comes
    assert not found.wait_for_last(lambda: True)  # a stop is asked for
    assert time.monotonic() - began < 10
    for _ in range(3):
        scrape(port)
        time.sleep(0.3)
    time.sleep(1.5)
    began = time.monotonic()
    assert not found.wait_for_last(lambda: False)  # nobody scrapes any more
    assert time.monotonic() - began < 0.3
