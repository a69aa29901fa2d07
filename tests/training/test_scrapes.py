"""The last scrape: who is waited for, for how long, and what it shows."""

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
from gptddp.distributed import environment
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
APART_S = 1.0  # two scrapes of one scraper


class Server:
    """A server of metrics, and clients of any address of the loopback."""

    def __init__(self) -> None:
        self.port = free_port()
        self.scrapes = Scrapes(m.Metrics(Config(), None, run_id="r").registry, self.port)
        until(self.connect).close()

    def connect(self, client: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5, (client, 0))

    def ask(self, client: str = "127.0.0.1") -> socket.socket:
        """A request whose answer is still to be read."""
        it = self.connect(client)
        it.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return it

    def scrape(self, client: str = "127.0.0.1") -> None:
        """A scrape that the server knows of."""
        before = time.monotonic()
        with self.ask(client) as it:
            while it.recv(1 << 16):
                pass
        until(lambda: any(began[-1] >= before for began in self.scrapes._began.values()))

    def waits(self, asked=lambda: False) -> tuple[bool, float]:
        """What the wait for the last scrape says, and how many seconds it takes."""
        began = time.monotonic()
        return self.scrapes.wait_for_last(asked), time.monotonic() - began


def later(work, *args) -> None:
    threading.Timer(0.2, work, args).start()


@pytest.fixture
def server() -> Server:
    """One that has been scraped twice."""
    it = Server()
    it.scrape()
    time.sleep(APART_S)
    it.scrape()
    return it


@pytest.mark.parametrize("ago_s", [(1.0,), (30.0, 29.0)])
def test_a_client_that_does_not_scrape_in_intervals_is_not_waited_for(ago_s):
    """It has scraped once, as somebody with curl; or it does no more."""
    server = Server()
    for seconds in ago_s:
        server.scrapes.answered(time.monotonic() - seconds, "127.0.0.1")
    assert not server.scrapes.wait_for_last(lambda: pytest.fail("it waits"))


def test_a_stop_ends_the_wait(server):
    """The grace period is short."""
    found, seconds = server.waits(lambda: True)
    assert not found and seconds < 1


@pytest.mark.alone
def test_a_scrape_that_is_not_read_to_its_end_is_none(server):
    """The client has closed before; the next one is waited for, no longer than an interval."""

    def half() -> None:
        with server.ask() as it:
            it.recv(100)
            time.sleep(0.1)

    later(half)
    found, seconds = server.waits()
    assert not found and APART_S <= seconds < 10 * APART_S
    later(server.scrape)
    assert server.waits()[0]


def test_a_client_that_says_nothing_is_sent_away_and_keeps_nobody(server, monkeypatch):
    """Nor does a connection that was opened before stand for a scrape."""
    with server.connect():
        later(server.scrape)
        assert server.waits()[0]
    monkeypatch.setattr(scrapes, "_SILENT_S", 0.2)
    with Server().connect() as silent:  # whose limit is that
        silent.settimeout(5)
        assert silent.recv(1) == b""


def test_each_of_two_scrapers_is_waited_for():
    """One scrapes shortly after the other: an interval is not the time between the two."""
    server = Server()
    for _ in range(2):
        for client in ("127.0.0.1", "127.0.0.2"):
            server.scrape(client)
        time.sleep(APART_S)
    for client in ("127.0.0.1", "127.0.0.2"):
        later(server.scrape, client)
    found, seconds = server.waits()
    assert found and seconds >= 0.2
    later(server.scrape)
    assert not server.waits()[0]  # the other one does not come


def test_two_scrapers_behind_one_address_are_not_one_in_a_hurry():
    """The longer way between their scrapes counts."""
    server = Server()
    for pause_s in (0.05, APART_S, 0.05):
        server.scrape()
        time.sleep(pause_s)
    time.sleep(0.6)  # more than twice the short way, and a little less than the long one
    later(server.scrape)
    assert server.waits()[0]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_it_is_served_to_ipv6_too(server):
    """A cluster may have nothing else."""
    with urllib.request.urlopen(f"http://[::1]:{server.port}/metrics", timeout=5) as answer:
        assert b"gptddp_step" in answer.read()


def test_an_occupied_port_is_a_warning_and_served_once_it_is_free(caplog, monkeypatch):
    """Said once, and not at every retry; training goes on meanwhile."""
    monkeypatch.setattr(scrapes, "_RETRY_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        Scrapes(m.Metrics(Config(), None).registry, port, "127.0.0.1")
        time.sleep(0.5)
        (record,) = caplog.records
        assert "training goes on" in record.message
    with until(lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")) as answer:
        assert b"gptddp_steps_total 0.0" in answer.read()


def test_all_ranks_stay_until_the_last_numbers_are_read(corpus, tmp_path):
    """They have the whole run: the phases add up to its time, the owners are those of the ledger.

    A rank that left before rank 0 would have the operator delete its pod in the wait.
    """
    port, run = free_port(), tmp_path / "run"
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run), "--metrics-port", str(port)]
    flags += ["--eval-every", "20", "--checkpoint-every", "0.2", "--steps", "60"]
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
    ratio = seconds["training"] / sum(seconds.values())
    assert last["gptddp_run_goodput_ratio"] == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize(("pods_that_leave", "hurries_after", "met"), [(1, 9, 1), (2, 3, 4)])
def test_a_stop_waits_for_a_scrape_only_where_all_pods_leave(
    monkeypatch, pods_that_leave, hurries_after, met
):
    """And no longer than the grace period allows; else the others need the next world at once."""
    meetings: list[list[int]] = []
    state: list[bool] = []

    def all_reduce(mine: torch.Tensor) -> torch.Tensor:
        others = [pods_that_leave - 1] if not meetings and not state else [0] * len(mine)
        if len(mine) > 1:
            meetings.append(mine.tolist())
        return mine + torch.tensor(others)

    def wait(asked) -> None:
        until(asked)

    recorder = SimpleNamespace(last_numbers=state.append, wait_for_scrape=wait)
    world = SimpleNamespace(all_reduce=all_reduce, world_size=2)
    stop = SimpleNamespace(
        pod_leaves=True, asked=True, must_hurry=lambda: len(meetings) >= hurries_after
    )
    monkeypatch.setattr(end, "_SCRAPE_S", 0.01)
    end.wait_for_scrape(recorder, world, stop)
    assert (len(meetings), state) == (met, [False])


def test_a_pod_leaves_when_its_launcher_says_so(tmp_path, monkeypatch):
    """Not when the launcher has stopped its workers for pods that come or go."""
    monkeypatch.delenv("GPTDDP_VERDICT", raising=False)
    assert environment.pod_leaves()  # nobody else has been told
    monkeypatch.setenv("GPTDDP_VERDICT", str(tmp_path / "verdict.json"))
    assert not environment.pod_leaves()
    environment.leaving().touch()
    assert environment.pod_leaves()
