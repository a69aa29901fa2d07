"""What strangers write into the store of a rendezvous, and what many agents cost its host."""

import contextlib
import json
import os
import pickle
import threading
import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.agents import (
    AHEAD,
    BEHIND,
    DEAD,
    KEY,
    SETTINGS,
    STATE,
    Agents,
    add,
    change,
    fresh,
    names,
)
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from gptddp.launch import rendezvous, shared_state
from gptddp.launch.shared_state import SharedState
from gptddp.launch.signing import SignedStore, Signer
from gptddp.launch.state import encode


@pytest.fixture
def store():
    """A real store, on a port of its own."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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


@pytest.mark.parametrize("kind", forgeries(Path("x")))
def test_what_is_not_signed_is_put_right_and_never_run(store, tmp_path, kind):
    """Those who know the state restore it; a newcomer finds it; nothing of it is executed. A change
    that meets it at that very moment is made, and nobody else is forgotten."""
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
    store.set(STATE, forgeries(tmp_path)[kind])
    change(newcomer, lambda state: state.participants.pop(AHEAD, None))
    assert names(me) == {"me", "new"} == names(agents.agent("newer"))
    assert not (tmp_path / "executed").exists()
    assert agents.said or kind == "nothing"
    assert all("docs/security.md" in line for line in agents.said)


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", "9" * 4300),  # one more, and Python writes it no more
        ("round", "9" * 4300),
        ("seq", str(2**62 - 1)),
        ("waiting", '["\\ud800"]'),
        ("participants", '{"\\ud800": 0}'),
        ("participants", '{"me": "0"}'),
    ],
)
def test_an_unsigned_state_that_no_agent_writes_ends_no_agent(store, field, value):
    """Without a key it is read: its numbers can be counted on from, and its addresses encoded."""
    agents = Agents(store, key="")
    (me,) = agents.join("me")
    forged = json.loads(me._text) | {"seq": 10**6, field: "@"}
    store.set(STATE, "unsigned " + json.dumps(forged).replace('"@"', value))
    me._read_at = 0.0
    fresh(me)
    change(me, lambda state: setattr(state, "round", state.round + 1))
    assert names(me) == {"me"} == names(agents.agent("new")) and agents.said


def test_a_key_may_be_any_bytes():
    """A Secret holds bytes, and a variable that is no UTF-8 still is a key."""
    key = os.fsdecode(b"\xff" * 32)
    signed = Signer(key, "id").sign("x", "text").encode()
    assert Signer(key, "id").read("x", signed) == "text"
    assert Signer(KEY, "id").read("x", signed) is None


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
