"""Agents of one job at one store, in this process, as torch's operations use them."""

from datetime import UTC, datetime, timedelta

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from gptddp.launch.shared_state import SharedState
from gptddp.launch.signing import Signer

TIMEOUTS = torchs.RendezvousTimeout(last_call=timedelta(seconds=0.3))
SETTINGS = torchs.RendezvousSettings("id", 1, 4, TIMEOUTS, timedelta(seconds=0.2), 3)
KEY = "k" * 64
STATE = "torch.rendezvous.id"
NAMES = ("me", "ahead", "behind", "dead")
NODES = [torchs._NodeDesc(name, 0, 0) for name in NAMES]
ME, AHEAD, BEHIND, DEAD = NODES


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
