"""Rank 0's metrics: the effect of each event on a scrape."""

import math
import time
from types import SimpleNamespace

import pytest
import torch

from gptddp.config import Config
from gptddp.run.owners import OF_FAULTS, OWNERS
from gptddp.run.summary import Summary
from gptddp.training import metrics as m
from gptddp.training.clock import PHASES, STATES, PhaseClock, RankSeconds
from gptddp.training.events import Events
from gptddp.training.saves import Saves

LINE = {"step": 41, "loss": 1.0, "grad_norm": 2.0, "lr": 1e-3, "data_wait_s": 0.1, "tok_s": 100.0}
LINE |= {"tokens": 100, "time": 5.0}
STEP = {"event": "step", "line": LINE, "train_s": 9.0, "step_s": 1.0, "slow": {}, "owned": None}
START = {"event": "start", "time": 5.0, "generation": 3, "step": 7, "tokens": 20, "train_s": 0.0}
START |= {"world_size": 4, "nodes": 2, "restarts": 1, "quarantined": 2, "flops_per_token": 6}
SAVED = {"event": "checkpoint", "step": 40, "name": "step-40", "nbytes": 9, "time": 8.0}
SAVED |= {"stall_s": 0.25, "write_s": 0.5}
OWNED = dict.fromkeys(OWNERS, 1.0)
NO_FAULT = OWNED | dict.fromkeys(OF_FAULTS, 0.0)
STALL = {"event": "stall", "seconds": 12.5, "names": ["rank 3 (demo-worker-3)"]}
CONFIG = Config(steps=400, checkpoint_every=60.0)


def two_ranks() -> RankSeconds:
    return RankSeconds(PhaseClock("step"), SimpleNamespace(rank=0, world_size=2, view=None))


def shown(metrics: m.Metrics) -> dict[str, float]:
    """The samples of a scrape: `family{label values}` without the prefix, and its value."""
    found = {}
    for it in (sample for family in metrics.registry.collect() for sample in family.samples):
        labels = "".join(f"{{{value}}}" for value in it.labels.values())
        found[it.name.removeprefix("gptddp_") + labels] = it.value
    return found


def test_the_counter_of_steps_is_never_behind_the_step():
    """The counter is not behind, even if steps are recorded between two families of a scrape."""
    metrics, found = m.Metrics(CONFIG, two_ranks()), {}
    metrics(START)
    for step, family in enumerate(metrics.registry.collect(), 8):
        found |= {it.name: it.value for it in family.samples}
        metrics(STEP | {"line": LINE | {"step": step}})
    assert found["gptddp_step"] - START["step"] <= found["gptddp_steps_total"]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([START], {"step": 7, "tokens_seen": 20, "world_size": 4, "nodes": 2, "nodes_max": 2}),
        ([START], {"incarnation": 3, "agent_restarts": 1, "quarantined_row_groups": 2}),
        ([START], {"checkpoint_every_seconds": 60, "max_steps": 400}),
        ([START], {"last_checkpoint_timestamp_seconds": 5, "storage_trouble": 0}),
        ([START, STEP], {"steps_total": 1, "tokens_total": 80, "step": 41, "tokens_seen": 100}),
        ([START, STEP], {"loss{train}": 1, "grad_norm": 2, "learning_rate": 1e-3}),
        ([START, STEP], {"step_duration_seconds_sum": 1, "data_wait_duration_seconds_sum": 0.1}),
        ([START, STEP], {"loss{val}": math.nan, "last_checkpoint_step": math.nan}),
        ([STEP | {"line": LINE | {"loss": None, "grad_norm": None}}], {"nonfinite_steps_total": 1}),
        ([STEP | {"line": LINE | {"val_loss": 3.0}}], {"loss{val}": 3}),
        ([{"event": "completed", "line": {"val_loss": 3.0}}], {"loss{val}": 3}),
        ([STEP | {"slow": {"rank 3 (pod-3)": 1.4}}], {"straggler_ratio{3}{pod-3}": 1.4}),
        ([STEP | {"slow": {"rank 3": 1.4}}, STEP], {"straggler_ratio{3}{}": None}),
        ([STEP | {"owned": OWNED}], {"run_lost_seconds{data}": 1, "run_goodput_ratio": 1 / 13}),
        ([STEP | {"owned": NO_FAULT}], {"run_goodput_ratio": math.nan}),
        ([START, {"event": "quarantine", "row_groups": [3, 5]}], {"quarantined_row_groups": 4}),
        ([SAVED], {"checkpoints_total{success}": 1, "last_checkpoint_step": 40}),
        ([SAVED], {"last_checkpoint_timestamp_seconds": 8, "checkpoint_size_bytes": 9}),
        ([SAVED], {"checkpoint_duration_seconds_sum{stall}": 0.25}),
        ([SAVED], {"checkpoint_duration_seconds_sum{save}": 0.75}),
        ([SAVED | {"error": "full"}], {"checkpoints_total{failure}": 1}),
        ([SAVED | {"error": "full"}], {"checkpoint_size_bytes": math.nan}),
        ([{"event": "loaded", "step": 4, "seconds": 2.0}], {"last_checkpoint_step": 4}),
        ([{"event": "newest", "step": 3, "since": 2.0}], {"last_checkpoint_timestamp_seconds": 2}),
        ([{"event": "storage", "fails": True}], {"storage_trouble": 1}),
        ([STALL], {"stall_seconds": 12.5, "stuck_rank{3}{demo-worker-3}": 1}),
        ([STALL, {"event": "stall_end"}], {"stall_seconds": 0}),
        ([STALL, {"event": "stall_end"}], {"stuck_rank{3}{demo-worker-3}": None}),
        ([{"event": "last", "owned": OWNED}], {"state{finished}": 1}),
    ],
)  # fmt: skip
def test_an_event_sets_the_metrics_that_it_knows(events, found):
    """An event changes no other metric; unknown values are NaN, and not 0."""
    metrics = m.Metrics(CONFIG, None)
    for event in events:
        metrics(event)
    page = shown(metrics)
    assert {name: page.get(name) for name in found} == pytest.approx(found, nan_ok=True)


def test_each_step_updates_the_clocks_of_the_ranks():
    """A step sets rank 0's phases, the rank that was busy longest, and the largest memory."""
    spent = two_ranks()
    metrics = m.Metrics(CONFIG, spent)
    assert math.isnan(shown(metrics)["peak_memory_bytes{resident}"])
    time.sleep(0.02)
    rows = spent.mine()
    mine = int(rows[0, -1])
    assert 10 << 20 < mine < 100 << 30
    rows[1, -1] = 3 * mine
    spent.take(rows)
    metrics(STEP)
    page = shown(metrics)
    assert page["phase_seconds_total{step}"] >= 0.02 and page["slowest_rank"] == 0
    assert page["peak_memory_bytes{resident}"] == 3 * mine
    assert page["rank_busy_seconds{max}"] >= 0.02 > page["rank_busy_seconds{min}"] == 0


def test_the_state_follows_the_phase_and_the_end():
    """Exactly one state is 1 at any time: that of rank 0 at the scrape."""
    metrics, clock, stop = m.Metrics(CONFIG, None), PhaseClock(), []
    metrics.state = lambda: clock.state(bool(stop))
    expected = dict.fromkeys(PHASES, "training") | STATES
    for phase in PHASES:
        clock.enter(phase)
        states = {name: value for name, value in shown(metrics).items() if name.startswith("state")}
        assert [name for name, holds in states.items() if holds] == [f"state{{{expected[phase]}}}"]
    stop.append(1)
    assert shown(metrics)["state{draining}"] == 1


def test_mfu_exists_if_the_peak_is_known():
    """MFU is FLOPs a token times tokens a second, divided by the peak, and NaN before a step."""
    assert "mfu_ratio" not in shown(m.Metrics(CONFIG, None))
    metrics = m.Metrics(CONFIG, None, peak=2000.0)
    metrics(START)
    assert math.isnan(shown(metrics)["mfu_ratio"])
    metrics(STEP)
    assert shown(metrics)["mfu_ratio"] == 6 * 100 / 2000


@pytest.mark.parametrize(
    ("source", "commits", "step", "age_s"),
    [
        ("memory", ["step-000000000007.1", "step-000000000009.2"], 9, 5000),
        ("memory", [], math.nan, 9000),
        ("step-000000000009.2", ["step-000000000009.2"], math.nan, 0),
        ("scratch", [], math.nan, 0),
    ],
)
def test_a_life_from_memory_knows_the_newest_checkpoint(tmp_path, source, commits, step, age_s):
    """A life from memory does not reset the age, because short lives must not hide failing saves.
    After a checkpoint was read, only the work of this life can be lost."""
    now = time.time()
    config = Config(steps=20, run_dir=str(tmp_path), checkpoint_every=90.0)
    metrics = m.Metrics(config, None)
    metrics(START | {"time": now})
    origin = {"generation": 3, "step": 9, "config": config, "source": source}
    origin = SimpleNamespace(**origin, run_id="r", parent=None, changes={})
    saved_time = now - 5000 if commits else None
    ledger = Summary(commits=commits, saved_time=saved_time, began_time=now - 9000)
    lease = SimpleNamespace(check=lambda: None)
    log, events = SimpleNamespace(sync=None), Events(3, [], [metrics])
    Saves(origin, lease, log, None, events).begin({"w": torch.zeros(2)}, ledger)
    page = shown(metrics)
    assert page["last_checkpoint_step"] == pytest.approx(step, nan_ok=True)
    assert now - page["last_checkpoint_timestamp_seconds"] == pytest.approx(age_s, abs=60)


def test_every_series_exists_before_the_first_event():
    """A later scrape adds only series of slow or missing ranks."""
    spent = two_ranks()
    metrics = m.Metrics(CONFIG, spent, peak=1.0)
    before = shown(metrics).keys()
    spent.take(spent.mine())
    line = LINE | {"val_loss": 1.0}
    loaded = {"event": "loaded", "step": 1, "seconds": 1.0}
    for event in (START, loaded, STEP | {"line": line, "owned": OWNED}, SAVED):
        metrics(event)
    assert shown(metrics).keys() == before


def test_the_expected_last_step_follows_the_budget_that_ends_the_run():
    """With another budget than steps, the last step is an estimate that follows the run."""
    metrics, found = m.Metrics(Config(steps=400, max_tokens=1000, max_time=0.0), None), []
    for step, tokens in ((0, 0), (12, 140), (20, 200), (30, 1010)):
        metrics(STEP | {"line": LINE | {"step": step, "tokens": tokens}})
        found.append(shown(metrics)["max_steps"])
    assert found == [400, 86, 100, 30]
