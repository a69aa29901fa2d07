"""Rank 0's metrics: a real scrape over HTTP, and a port that is taken."""

import socket
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest

from gptddp.config import Config
from gptddp.run.progress import Progress
from gptddp.training import metrics as m
from gptddp.training import scrapes
from gptddp.training.clock import PhaseClock, RankSeconds
from gptddp.training.scrapes import Scrapes


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
    metrics = m.Metrics(run_id="r")
    spent = RankSeconds(PhaseClock("step"), SimpleNamespace(rank=0, world_size=2))
    time.sleep(0.02)
    spent.take(spent.mine())
    metrics.steps.inc()
    metrics.step.set(41)
    metrics.spent(spent)
    Scrapes(metrics.registry, port, "127.0.0.1")
    lines = dict(
        line.rsplit(" ", 1) for line in scrape(port).splitlines() if not line.startswith("#")
    )
    assert float(lines["gptddp_steps_total"]) == 1
    assert float(lines["gptddp_step"]) == 41
    assert float(lines['gptddp_phase_seconds_total{phase="step"}']) >= 0.02
    assert lines['gptddp_loss{split="val"}'] == "NaN"
    assert lines["gptddp_last_checkpoint_step"] == "NaN"


def test_the_step_at_which_a_run_will_end_is_of_the_budget_that_ends_it():
    """An estimate, which follows the run, where that is not the budget of steps."""
    metrics, config = m.Metrics(run_id="r"), Config(steps=400, max_tokens=1000, max_time=0.0)
    found = []
    for step, tokens in ((0, 0), (12, 140), (20, 200), (30, 1010)):
        metrics.expect(config, Progress(step, tokens, train_s=9.0))
        found.append(metrics.registry.get_sample_value("gptddp_max_steps"))
    assert found == [400, 86, 100, 30]


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
        Scrapes(m.Metrics().registry, port, "127.0.0.1")
        time.sleep(0.5)
        assert [r for r in caplog.records if "training goes on" in r.message]
        assert len(caplog.records) == 1  # said once, not at every retry
    assert "gptddp_steps_total 0.0" in scrape(port)


def test_the_last_scrape_is_waited_for_where_somebody_scrapes(port):
    """One that begins after the wait has; no longer than the scrapes are apart; not without any."""
    found = Scrapes(m.Metrics().registry, port, "127.0.0.1")
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
