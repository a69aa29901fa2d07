"""The last scrape: the wait for it, and its numbers."""

import math
import os
import socket
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from support.forked import ranks
from support.owned import owned
from support.processes import free_port
from support.toy import SMALL
from support.waiting import until

from gptddp.config import Config
from gptddp.run.history import read_ledger
from gptddp.training import end, scrapes
from gptddp.training import metrics as m
from gptddp.training.scrapes import Scrapes

SLOWLY = """
import sys, time
from gptddp import train
step = train.forward_backward
train.forward_backward = lambda *args: time.sleep(0.1) or step(*args)
sys.exit(train.main(sys.argv[1:]))
"""


class Server:
    """A server of metrics."""

    def __init__(self) -> None:
        self.port = free_port()
        self.scrapes = Scrapes(m.Metrics(Config(), None, run_id="r").registry, self.port)
        until(lambda: socket.create_connection(("127.0.0.1", self.port), 5)).close()

    def scrape(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            answer.read()

    def waits(self) -> tuple[bool, float]:
        """Does the run wait for the last scrape, and for how many seconds?"""
        began = time.monotonic()
        self.scrapes.expect_last()
        while self.scrapes.awaited:
            time.sleep(0.01)
        return max(self.scrapes._newest) > began, time.monotonic() - began


def server(*ago_s: float) -> Server:
    """A server that was last scraped so long ago."""
    it = Server()
    it.scrapes._newest.extend(time.monotonic() - seconds for seconds in ago_s)
    return it


@pytest.mark.parametrize("ago_s", [(), (1.0,), (30.0, 29.0)])
def test_the_run_does_not_wait_without_regular_scrapes(ago_s):
    """The run ends at once without scrapes, after a single one, or after they have stopped."""
    it = server(*ago_s)
    it.scrapes.expect_last()
    assert not it.scrapes.awaited


def test_the_wait_for_the_last_scrape_is_about_an_interval():
    """The wait is a fifth and half a second longer than an interval; an answered scrape ends it."""
    it = server(2.0, 1.0)
    found, seconds = it.waits()
    assert not found and seconds > 1.5
    assert it.scrapes._until - it.scrapes._last == pytest.approx(1.7, abs=0.2)
    it = server(21.0, 1.0)
    threading.Timer(1.0, it.scrape).start()
    found, seconds = it.waits()
    assert found and seconds < 8.0


def test_two_scrapers_in_turn_do_not_count_as_a_fast_one():
    """The longer interval between their scrapes counts."""
    it = server(11.0, 1.0, 0.95)
    threading.Timer(1.0, it.scrape).start()
    assert it.waits()[0]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_metrics_are_served_over_ipv6():
    """The server answers over IPv6, because a cluster may have nothing else."""
    with urllib.request.urlopen(f"http://[::1]:{Server().port}/metrics", timeout=5) as answer:
        assert b"gptddp_step" in answer.read()


def test_the_number_of_open_connections_is_limited():
    """Of a stranger's many connections the oldest are closed, and a new one gets an answer.

    They are accepted at once: with wsgiref's own backlog of 5 they took 6 s, and a scrape as long.
    """
    it, began = Server(), time.monotonic()
    held = [socket.create_connection(("127.0.0.1", it.port), 30) for _ in range(40)]
    try:
        assert time.monotonic() - began < 3
        assert [held[i].recv(1) for i in range(8)] == [b""] * 8  # 32 stay
        it.scrape()
    finally:
        for one in held:
            one.close()


def test_an_occupied_port_is_a_warning_and_served_once_it_is_free(caplog, monkeypatch):
    """The warning comes once, not at every retry; training continues meanwhile."""
    monkeypatch.setattr(scrapes, "_RETRY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Scrapes(m.Metrics(Config(), None).registry, port, "127.0.0.1")
        time.sleep(0.5)
        (record,) = caplog.records
        assert "training continues" in record.message
    with until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")) as answer:
        assert b"gptddp_steps_total 0.0" in answer.read()


def test_all_ranks_stay_until_the_last_numbers_are_read(corpus, tmp_path):
    """The numbers cover the whole run: phases add up to its time, owners equal the ledger's.
    Without a fault there is no goodput.

    A rank that left before rank 0 would have the operator delete its pod in the wait.
    """
    port, run = free_port(), tmp_path / "run"
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run), "--metrics-port", str(port)]
    flags += ["--eval-every", "20", "--checkpoint-every", "0.2", "--steps", "40"]
    first, second = ranks(2, *flags, code=SLOWLY, env=os.environ | {"POD_ADDRESS": "127.0.0.1"})

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            lines = [it for it in answer.read().decode().splitlines() if it[0] != "#"]
        return {name: float(value) for name, _, value in (it.rpartition(" ") for it in lines)}

    until(scrape, timeout_s=60)
    newest = until(lambda: read_ledger(run)) and time.monotonic()
    while read_ledger(run)[-1]["event"] != "stop":
        if time.monotonic() - newest > 1.5:
            newest = time.monotonic()
            scrape()
        time.sleep(0.02)
    assert (first.poll(), second.poll()) == (None, None)
    time.sleep(0.3)
    last = scrape()
    assert [it.wait(30) for it in (first, second)] == [0, 0]
    start, *_, stop = read_ledger(run)
    elapsed = stop["time"] - start["time"] + start["seconds"]
    phases = sum(it for name, it in last.items() if name.startswith("gptddp_phase_seconds"))
    assert phases == pytest.approx(elapsed, rel=0.01, abs=0.05)
    seconds = owned(run)
    for cause in ("evaluation", "checkpoint", "waiting", "data"):
        found = last[f'gptddp_run_lost_seconds{{cause="{cause}"}}']
        assert found == pytest.approx(seconds[cause], abs=0.01)
    assert math.isnan(last["gptddp_run_goodput_ratio"])


def test_a_stop_ends_the_wait_on_all_ranks():
    """A stop of any rank ends the wait of all, because the next world needs them."""
    met = []

    def all_reduce(mine: torch.Tensor) -> torch.Tensor:
        met.append(mine.tolist())
        return mine + torch.tensor([0, len(met) == 3])

    recorder = SimpleNamespace(last_numbers=lambda: met.append("last"), awaits_readers=True)
    world, stop = SimpleNamespace(all_reduce=all_reduce), SimpleNamespace(asked=False)
    end.wait_for_readers(recorder, world, stop)
    assert met == ["last", [1, 0], [1, 0]]
