"""Whether a peer lives does not depend on anybody's time of day, nor on what strangers write."""

import contextlib
import os
import pickle
import threading
import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from gptddp.launch import rendezvous, shared_state
from gptddp.launch.shared_state import SharedState
from gptddp.launch.signing import SignedStore, Signer
from gptddp.launch.state import encode

HOUR = timedelta(hours=1)
TIMEOUTS = torchs.RendezvousTimeout(last_call=timedelta(seconds=0.3))
SETTINGS = torchs.RendezvousSettings("id", 1, 4, TIMEOUTS, timedelta(seconds=0.2), 3)
KEY = "k" * 64
NAMES = ("me", "ahead", "behind", "dead")
NODES = [torchs._NodeDesc(name, 0, 0) for name in NAMES]
ME, AHEAD, BEHIND, DEAD = NODES
STATE = "torch.rendezvous.id"


@pytest.fixture
def store():
    """A real store, on a port of its own."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Agents:
    """Agents of one job at one store, and what they have said."""

    def __init__(self, store, key=KEY):
        self.store, self.key, self.said = store, key, []

    def agent(self, name="me", key=None):
        """An agent that has just begun."""
        signer = Signer(self.key if key is None else key, "id")
        holder = SharedState(self.store, SETTINGS, name, signer, {}, self.said.append)
        holder.sync()
        return holder

    def join(self, *names):
        """Agents that have joined, one after the other."""
        made = [change(self.agent(name), lambda state, n=name: add(state, n)) for name in names]
        for holder in made:
            fresh(holder)
        return made


def add(state, name):
    node = torchs._NodeDesc(name, 0, 0)
    state.participants[node] = 0
    state.last_heartbeats[node] = datetime.now(UTC)


def fresh(holder):
    """Its state, read now."""
    holder._poll_at = 0.0
    holder.sync()
    return holder.state


def change(holder, how):
    """Change the state as torch's operations do: until nobody else was faster."""
    for _ in range(20):
        how(holder.state)
        holder.mark_dirty()
        if holder.sync():
            return holder
    raise AssertionError("another agent was faster twenty times")


def beat(holder, at=None):
    me = holder._me
    change(holder, lambda state: state.last_heartbeats.__setitem__(me, at or datetime.now(UTC)))


def names(holder):
    return {node.addr for node in fresh(holder).participants}


# -- clocks ----------------------------------------------------------------------------------------


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


# -- strangers -------------------------------------------------------------------------------------


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def forgeries(folder):
    """What a stranger who reaches the port may write over the state, by its kind."""
    bomb = pickle.dumps(Touch(folder / "executed"))
    state = torchs._RendezvousState()
    state.participants, state.closed = {DEAD: 0}, True
    text = encode(state, 10**6, None)
    return {
        "pickle": bomb,
        "pickle as torch writes it": b64encode(bomb),
        "a state signed with another key": Signer("x" * 64, "id").sign(STATE, text).encode(),
        "a state signed for another job": Signer(KEY, "other").sign(STATE, text).encode(),
        "a state signed under another name": Signer(KEY, "id").sign("x", text).encode(),
        "a state that is not signed": Signer("", "id").sign(STATE, text).encode(),
        "garbage": b"\xff\x00\xfe" * 100,
        "deep": b"unsigned " + b"[" * 100_000,
        "nothing": b"",
    }


KINDS = list(forgeries(Path("x")))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_signed_is_put_right_and_never_run(store, tmp_path, kind):
    """Those who know the state restore it; a newcomer finds it; nothing of it is executed."""
    agents = Agents(store)
    me, ahead = agents.join("me", "ahead")
    store.set(STATE, forgeries(tmp_path)[kind])
    newcomer = agents.agent("new")
    assert names(newcomer) == set()
    me._read_at = 0.0
    assert names(me) == {"me", "ahead"}
    assert names(newcomer) == names(ahead) == {"me", "ahead"} and not ahead.state.closed
    change(newcomer, lambda state: add(state, "new"))
    assert names(me) == {"me", "ahead", "new"}
    assert not (tmp_path / "executed").exists()
    assert agents.said or kind == "nothing"
    assert all("docs/security.md" in line for line in agents.said)


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_meets_what_is_not_signed(store, tmp_path, kind):
    """Who joins, or leaves, at that very moment does so, and nobody else is forgotten."""
    agents = Agents(store)
    me, ahead = agents.join("me", "ahead")
    store.set(STATE, forgeries(tmp_path)[kind])
    change(ahead, lambda state: state.participants.pop(AHEAD, None))
    assert names(me) == {"me"} == names(agents.agent("new"))


def test_the_newest_state_wins_whoever_is_first_to_mend(store):
    """One who knows an older state writes that first; who knows the newer one mends it again."""
    agents = Agents(store)
    (me,) = agents.join("me")
    change(agents.agent("ahead"), lambda state: add(state, "ahead"))
    (behind,) = agents.join("behind")
    store.set(STATE, b"garbage")
    assert names(me) == {"me"}
    assert names(behind) == {"me", "ahead", "behind"} == names(me)


def test_a_state_of_the_past_is_not_taken_again(store):
    """A state that was signed once, and written again later, is put right as well."""
    agents = Agents(store)
    (me,) = agents.join("me")
    old = store.get(STATE)
    agents.join("ahead")
    assert names(me) == {"me", "ahead"}
    store.set(STATE, old)
    me._read_at = 0.0
    assert names(me) == {"me", "ahead"} == names(agents.agent("new"))


def test_a_state_that_is_deleted_comes_back(store):
    """Nobody waits for it, and who knows it writes it again."""
    agents = Agents(store)
    me, ahead = agents.join("me", "ahead")
    store.delete_key(STATE)
    change(ahead, lambda state: state.wait_list.add(BEHIND))
    assert BEHIND in fresh(me).wait_list and names(me) == {"me", "ahead"}


def test_two_groups_with_different_keys_form_no_smaller_world(store, monkeypatch):
    """Pods with another key, or none, are not taken in, and neither group goes on without them."""
    monkeypatch.setattr(torchs, "_delay", lambda seconds: time.sleep(0.05))
    monkeypatch.setattr(torchs, "get_method_name", lambda depth=2: "")  # reads sources: slow
    agents, formed = Agents(store), []
    holders = agents.join("me"), [agents.agent("stranger", key="")]

    def join(holder):
        run = torchs._DistributedRendezvousOpExecutor(holder._me, holder, SETTINGS).run
        with contextlib.suppress(torchs.RendezvousTimeoutError):
            run(torchs._RendezvousJoinOp(), time.monotonic() + 1.5)  # far beyond the last call
            formed.append(holder)

    threads = [threading.Thread(target=join, args=(holder,)) for (holder,) in holders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not formed
    assert any("this pod has no key" in line for line in agents.said)


@pytest.mark.parametrize("kind", ["pickle", "garbage", "nothing"])
def test_without_a_key_nothing_is_unpickled_either(store, tmp_path, kind):
    """A job that has no key writes JSON too, and garbage does not end it."""
    agents = Agents(store, key="")
    me, ahead = agents.join("me", "ahead")
    store.set(STATE, forgeries(tmp_path)[kind])
    change(ahead, lambda state: add(state, "behind"))
    assert names(me) == {"me", "ahead", "behind"} and not (tmp_path / "executed").exists()


def test_where_rank_0_is_found_is_signed_too(store, monkeypatch):
    """A forged address is waited over; where it stays, the round fails, and not the job."""
    monkeypatch.setattr("gptddp.launch.signing.FORGED_S", 0.3)
    signer = Signer(KEY, "id")
    round_1, round_2 = (SignedStore(f"round.{i}", store, signer) for i in (1, 2))
    round_1.set("MASTER_ADDR", b"10.0.0.1")
    assert round_1.get("MASTER_ADDR") == b"10.0.0.1"
    store.set("round.2/MASTER_ADDR", store.get("round.1/MASTER_ADDR"))
    with pytest.raises(rendezvous.RendezvousError, match="security.md"):
        round_2.get("MASTER_ADDR")


def test_the_log_says_once_that_a_stranger_writes():
    """A line for each forged state would fill the log."""
    said = []
    owner = rendezvous.Rendezvous(lambda joining: None, said.append, KEY)
    owner._warn("first")
    owner._warn("second")
    assert said == ["warning: first"]


# -- many agents -----------------------------------------------------------------------------------


class Counted:
    """A store that counts the bytes of keys and values, both ways."""

    def __init__(self, store):
        self.store, self.nbytes = store, 0

    def __getattr__(self, method):
        def call(*args):
            result = getattr(self.store, method)(*args)
            values = result if isinstance(result, list) else [result]
            for it in [*(k for a in args for k in (a if isinstance(a, list) else [a])), *values]:
                self.nbytes += len(it) if isinstance(it, str | bytes) else 8
            return result

        return call


def traffic(store, agents, monkeypatch, seconds=1):
    """Bytes a second between the store and this many agents of a world, by their own calls."""
    counted, now = Counted(store), [time.monotonic()]
    monkeypatch.setattr(shared_state, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=id))
    settings = torchs.RendezvousSettings(
        f"job-{agents}-1a2b3c4d", 1, agents, torchs.RendezvousTimeout(), timedelta(seconds=1), 5
    )
    state = torchs._RendezvousState()
    all_names = [f"pretrain-worker-{i}" for i in range(agents)]
    state.participants = {torchs._NodeDesc(name, 0, 0): i for i, name in enumerate(all_names)}
    state.complete = True
    signer, key = Signer(KEY, settings.run_id), f"torch.rendezvous.{settings.run_id}"
    store.set(key, signer.sign(key, encode(state, 1, None)))
    holders = [SharedState(counted, settings, n, signer, {}, print) for n in all_names]
    for holder in holders:
        holder.sync()
    counted.nbytes = 0
    for tick in range(10 * seconds):
        now[0] += 0.1
        for i, holder in enumerate(holders):
            if tick % 10 == i % 10:
                holder.state.last_heartbeats[holder._me] = datetime.now(UTC) + timedelta(0, tick)
                holder.mark_dirty()
            holder.sync()
    return counted.nbytes / seconds


def test_what_the_host_sends_grows_no_faster_than_the_agents(store, monkeypatch):
    """Four times as many agents: at most five times the bytes, and few of them."""
    few, many = (traffic(store, n, monkeypatch) for n in (32, 128))
    assert many < 5 * few
    assert many < 128 * 20_000


def test_the_store_does_not_grow_with_the_rounds(monkeypatch):
    """Hundred rounds of a world leave no more keys than ten."""
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
