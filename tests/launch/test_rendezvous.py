"""Whether a peer lives does not depend on anybody's time of day."""

import pickle
import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from gptddp.launch import rendezvous

HOUR = timedelta(hours=1)
TIMEOUTS = torchs.RendezvousTimeout(last_call=timedelta(seconds=0.3))
SETTINGS = torchs.RendezvousSettings("id", 1, 4, TIMEOUTS, timedelta(seconds=0.2), 3)
NODES = [torchs._NodeDesc(name, 0, 0) for name in ("me", "ahead", "behind", "dead")]
ME, AHEAD, BEHIND, DEAD = NODES


@pytest.fixture
def backend():
    """A rendezvous that four agents have joined, whose last call is not over."""
    made = C10dRendezvousBackend(HashStore(), "id")

    def join(state):
        state.participants = dict.fromkeys(NODES, 0)
        state.last_heartbeats = dict.fromkeys(NODES, datetime.now(UTC))

    change(made, join)
    return made


def read(backend):
    bits, token = backend.get_state() or (None, None)
    return (pickle.loads(bits) if bits else torchs._RendezvousState()), token


def change(backend, how):
    """Change the state as an agent on another machine would."""
    state, token = read(backend)
    how(state)
    assert backend.set_state(pickle.dumps(state), token)[2]


def read_by_newcomer(backend):
    """The state of an agent that has just begun."""
    holder = rendezvous._StateHolder(backend, SETTINGS, {})
    holder.sync()
    return holder


def test_only_who_falls_silent_is_given_up(backend):
    """Not who is an hour ahead or behind, and not by a newcomer."""

    def beat(state):
        state.last_heartbeats[ME] = datetime.now(UTC)
        state.last_heartbeats[AHEAD] = datetime.now(UTC) + HOUR
        state.last_heartbeats[BEHIND] = datetime.now(UTC) - HOUR

    holder, end = read_by_newcomer(backend), time.monotonic() + 0.9
    assert len(holder.state.participants) == 4
    while time.monotonic() < end:
        change(backend, beat)
        time.sleep(0.11)  # it reads every 0.1 s at most
        holder.sync()
        assert {ME, AHEAD, BEHIND} <= holder.state.participants.keys()
    assert DEAD not in holder.state.participants
    assert DEAD in read_by_newcomer(backend).state.participants
    holder.mark_dirty()
    assert holder.sync()
    written = read(backend)[0].last_heartbeats
    assert written.keys() == {ME, AHEAD, BEHIND}
    assert written[AHEAD] - written[ME] > HOUR / 2 < written[ME] - written[BEHIND]


def test_an_agent_that_begins_anew_does_not_count_anew():
    """Who has been silent before the agent of a launcher failed is given up by the next at once."""
    conf = dict(is_host=1, keep_alive_interval=1, keep_alive_max_attempt=1)
    params = RendezvousParameters("gptddp", "127.0.0.1:0", "id", 1, 4, "me", **conf)
    launcher = rendezvous.Rendezvous(lambda joining: None, print)
    agent = launcher._create(params)
    state = torchs._RendezvousState()
    state.participants, state.last_heartbeats = {DEAD: 0}, {DEAD: datetime.now(UTC) + HOUR}
    C10dRendezvousBackend(agent._store, "id").set_state(pickle.dumps(state))
    agent.refresh()
    assert agent.agents == 1
    time.sleep(1.2)
    agent = launcher._create(params)
    agent.refresh()
    assert agent.agents == 0


@pytest.mark.parametrize("off", [HOUR, -HOUR], ids=["ahead", "behind"])
def test_the_last_call_is_as_long_for_every_clock(backend, off):
    """It is over when we have seen it for that long; who writes keeps it as it was."""
    deadline = datetime.now(UTC) + off
    change(backend, lambda state: setattr(state, "deadline", deadline))
    holder = read_by_newcomer(backend)

    def action():
        context = torchs._RendezvousContext(ME, holder.state, SETTINGS)
        return torchs._RendezvousJoinOp()(context, time.monotonic() + 60)

    assert action() is torchs._Action.SYNC
    holder.mark_dirty()
    assert holder.sync() and read(backend)[0].deadline == deadline
    time.sleep(0.4)
    holder.sync()
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
