"""Whether a peer lives does not depend on anybody's time of day, nor on when an agent began."""

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from support.agents import KEY, ME, NAMES, SETTINGS, Agents, add, beat, change, fresh, names
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from gptddp.launch import rendezvous
from gptddp.launch.state import encode

HOUR = timedelta(hours=1)


@pytest.fixture
def store():
    """A real store, on a port of its own."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_only_who_falls_silent_is_given_up(store):
    """Not who is an hour ahead or behind, and not by a newcomer."""
    agents = Agents(store)
    me, ahead, behind, _ = agents.join(*NAMES)
    end = time.monotonic() + 0.9
    assert names(me) == set(NAMES)
    while time.monotonic() < end:
        beat(me)
        beat(ahead, datetime.now(UTC) + HOUR)
        beat(behind, datetime.now(UTC) - HOUR)
        time.sleep(0.11)  # it reads every 0.1 s at most
        assert {"me", "ahead", "behind"} <= names(me)
    assert names(agents.agent("new")) == {"me", "ahead", "behind"}  # a write has taken it out
    assert names(me) == {"me", "ahead", "behind"}


def test_a_newcomer_gives_nobody_up(store):
    """Who has said nothing for long may have said it just before the newcomer began to look."""
    agents = Agents(store)
    agents.join("dead")
    time.sleep(0.9)
    newcomer = agents.agent("new")
    assert names(newcomer) == {"dead"}
    time.sleep(0.9)
    assert names(newcomer) == set()


def test_who_comes_back_is_not_given_up_again(store):
    """One sign of life after a long silence counts at once."""
    agents = Agents(store)
    me, late = agents.join("me", "late")
    for _ in range(8):
        beat(me)
        names(me)
        time.sleep(0.11)
    beat(me)
    assert names(me) == {"me"}
    assert names(late) == {"me"}
    change(late, lambda state: add(state, "late"))
    for _ in range(3):
        assert names(me) == {"me", "late"}


def test_an_agent_that_begins_anew_does_not_count_anew():
    """Who has been silent before the agent of a launcher failed is given up by the next at once."""
    conf = dict(is_host=1, keep_alive_interval=1, keep_alive_max_attempt=1)
    params = RendezvousParameters("gptddp", "127.0.0.1:0", "id", 1, 4, "me", **conf)
    launcher = rendezvous.Rendezvous(lambda joining: None, print, KEY)
    agent = launcher._create(params)
    Agents(agent._store).join("dead")
    agent.refresh()
    assert agent.agents == 1
    time.sleep(1.2)
    agent = launcher._create(params)
    agent.refresh()
    assert agent.agents == 0


@pytest.mark.parametrize("off", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_the_last_call_is_as_long_for_every_clock(store, off):
    """It is over when we have seen it for that long; who writes keeps it as it was."""
    deadline = datetime.now(UTC) + off
    agents = Agents(store)
    (holder,) = agents.join("me")
    change(holder, lambda state: setattr(state, "deadline", deadline))

    def action():
        context = torchs._RendezvousContext(ME, holder.state, SETTINGS)
        return torchs._RendezvousJoinOp()(context, time.monotonic() + 60)

    assert action() is torchs._Action.SYNC
    change(holder, lambda state: add(state, "ahead"))
    assert encode(holder.state, holder._seq, deadline) == holder._text
    time.sleep(0.4)
    fresh(holder)
    assert action() is torchs._Action.MARK_RENDEZVOUS_COMPLETE


@pytest.mark.parametrize("jump", [HOUR, -HOUR], ids=["on", "back"])
def test_heartbeats_go_on_when_our_clock_is_set(monkeypatch, jump):
    """One is due after the interval, and not before."""
    system = SimpleNamespace(now=datetime.now)
    for module in (rendezvous, torchs):
        monkeypatch.setattr(module, "datetime", system)
    monkeypatch.setattr(torchs, "_delay", torchs._delay)
    monkeypatch.setattr(rendezvous.rendezvous_handler_registry, "_registry", {})
    rendezvous.Rendezvous(lambda joining: None, print).register()
    state = torchs._RendezvousState()
    state.last_heartbeats[ME] = torchs.datetime.now(UTC)
    context = torchs._RendezvousContext(ME, state, SETTINGS)
    system.now = lambda tz: datetime.now(tz) + jump
    assert not torchs._should_keep_alive(context)
    time.sleep(0.25)
    assert torchs._should_keep_alive(context)


def test_the_log_says_once_that_a_stranger_writes():
    """A line for each forged state would fill the log."""
    said = []
    owner = rendezvous.Rendezvous(lambda joining: None, said.append, KEY)
    owner._warn("first")
    owner._warn("second")
    assert said == ["warning: first"]


def test_a_host_that_does_not_answer_is_no_reason_to_end_its_peers(monkeypatch):
    """torch waits for one that is stopped: the liveness probe is told before each such call."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    monkeypatch.setattr(torchs, "_delay", torchs._delay)
    monkeypatch.setattr(torchs, "datetime", torchs.datetime)
    monkeypatch.setattr(rendezvous.rendezvous_handler_registry, "_registry", {})
    monkeypatch.setattr(torchs, "get_method_name", lambda depth=2: "")  # reads sources: slow
    conf = dict(is_host=1, keep_alive_interval=1, keep_alive_max_attempt=5, last_call_timeout=1)
    params = RendezvousParameters("gptddp", "127.0.0.1:0", "id", 1, 2, "me", **conf)
    said: list[float] = []  # at each turn, as the launcher does, and by the rendezvous
    launcher = rendezvous.Rendezvous(lambda joining: said.append(0.0), print, KEY, said.append)
    launcher.register()
    agent, asked = launcher._create(params), []
    sync = agent.holder.sync
    monkeypatch.setattr(agent.holder, "sync", lambda: asked.append(said[-1]) or sync())
    agent.next_rendezvous()
    agent._stop_heartbeats()
    agent.num_nodes_waiting()
    assert set(asked) == {rendezvous.HOST_S} and said[-1] == 0.0 and len(asked) > 3


def test_the_store_does_not_grow_with_the_rounds(monkeypatch):
    """Hundred rounds of a world leave no more keys than ten."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the launcher does
    monkeypatch.setattr(torchs, "get_method_name", lambda depth=2: "")  # reads sources: slow
    conf = dict(is_host=1, keep_alive_interval=1, keep_alive_max_attempt=5, last_call_timeout=1)
    params = RendezvousParameters("gptddp", "127.0.0.1:0", "id", 1, 1, "me", **conf)
    launcher = rendezvous.Rendezvous(lambda joining: None, print, KEY)
    agent = launcher._create(params)
    keys = []
    for _ in range(100):
        agent.next_rendezvous()
        keys.append(agent._store.num_keys())
    assert agent.holder.state.round >= 99
    assert keys[-1] == keys[10] < 30
