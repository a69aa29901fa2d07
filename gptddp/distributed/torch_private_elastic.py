"""The second half of `torch_private.py`: the parts of torchrun, for the launcher alone.

Read in torch 2.15. Each class gives private members of a class of torch's public names, which a
subclass may use and override. The names are listed, and checked, in `torch_private.LAUNCHER`.
"""

import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousStoreInfo, dynamic_rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
)
from torch.distributed.launcher import api as launcher_api
from torch.multiprocessing.spawn import ProcessContext

# -- the agent -------------------------------------------------------------------------------------


class Agent(LocalElasticAgent):
    """torchrun's agent, with public names for its workers, their observation and their end."""

    @property
    def workers(self) -> ProcessContext | None:
        """The worker processes; None before the first are started."""
        context: Any = self._pcontext
        return context._pc if context else None

    def pids(self) -> list[int]:
        """The process ids of the workers, by local rank."""
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def observe_workers(self, group: WorkerGroup) -> RunResult:
        """How the workers are; called once every `--monitor-interval`."""
        result: RunResult = super()._monitor_workers(group)
        return result

    def end_workers(self, number: signal.Signals, limit_s: int) -> None:
        """Send the signal to the workers, wait for that long, and kill those that are left."""
        super()._shutdown(number, limit_s)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.observe_workers(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.end_workers(death_sig, self._shutdown_timeout)  # torch does not always pass it on


def install_agent(
    make_agent: Callable[..., Agent], join_siblings: Callable[[ProcessContext, float], None]
) -> None:
    """Have torchrun, in this process, call these instead of its own.

    `make_agent` makes its agent. `join_siblings` waits for the siblings of a worker that has
    failed; it is given their processes and the most seconds to wait.
    """

    # A plain function: only that becomes a method of ProcessContext.
    def join(context: ProcessContext, timeout: float) -> None:
        join_siblings(context, timeout)

    torchrun: Any = launcher_api
    processes: Any = ProcessContext
    torchrun.LocalElasticAgent, processes._join_procs_with_timeout = make_agent, join


# What torch itself does for `join_siblings`: it waits until all have ended or the seconds are over.
join_processes: Callable[[ProcessContext, float], None] = ProcessContext._join_procs_with_timeout

# -- the rendezvous --------------------------------------------------------------------------------


def install_waiting(delay: Callable[[float | tuple[float, float]], None], clock: object) -> None:
    """Have torch's rendezvous, in this process, call these instead of its own.

    `delay` waits between two attempts to join; it is given seconds, or the least and the most.
    `clock` stands in for the class `datetime`: its `now(tz)` is the time of heartbeats.
    """
    module: Any = dynamic_rendezvous
    module._delay, module.datetime = delay, clock


# What torch reads and writes through a holder: `state`, `sync()`, `mark_dirty()`; see there.
StateHolder = dynamic_rendezvous._RendezvousStateHolder
RendezvousState = dynamic_rendezvous._RendezvousState
Node = dynamic_rendezvous._NodeDesc


def remove_nodes(
    state: RendezvousState, nodes: Iterable[Node], settings: RendezvousSettings
) -> None:
    """Take agents out of a state, with all that torch does when they leave."""
    for node in nodes:
        state.last_heartbeats.pop(node, None)
        state.wait_list.discard(node)
        state.redundancy_list.discard(node)
        if state.participants.pop(node, None) is not None:
            dynamic_rendezvous._remove_participant_epilogue(state, settings)


class Handler(DynamicRendezvousHandler):
    """torch's rendezvous of one agent, which goes by its address, whatever its process."""

    def __init__(
        self,
        address: str,
        settings: RendezvousSettings,
        backend: str,
        store: Store,
        holder: StateHolder,
    ) -> None:
        super().__init__(Node(address, 0, 0), settings, backend, store, holder)

    @property
    def holder(self) -> Any:
        """The agent's copy of the state."""
        return self._state_holder

    def round_store(self, prefix: str, store: Store) -> Store:
        """The store of the present round, whose keys all begin with the prefix."""
        return PrefixStore(prefix, store)

    def forget_round(self, number: int) -> None:
        """Delete what rank 0 has written into the store of that round."""
        store = PrefixStore(self._prefix(number), self._store)
        for key in (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY):
            store.delete_key(key)

    def _prefix(self, number: int) -> str:
        return f"torch.rendezvous.{self._settings.run_id}.{number}"

    def _wrap_store(self, store: Store) -> Store:
        return self.round_store(self._prefix(self._state_holder.state.round), store)

    def withdraw(self) -> None:
        """Leave the world and the wait list. Raises RendezvousError where the host is gone."""
        self._stop_heartbeats()
        deadline = self._get_deadline(self._settings.timeout.heartbeat)
        self._op_executor.run(_withdraw, deadline)


def _withdraw(context: Any, deadline: float) -> Any:
    """torch's own operation to leave, with the wait list."""
    action = dynamic_rendezvous._Action
    if time.monotonic() > deadline:
        return action.FINISH
    if context.node in context.state.participants:
        return action.REMOVE_FROM_PARTICIPANTS
    if context.node in context.state.wait_list:
        return action.REMOVE_FROM_WAIT_LIST
    return action.FINISH
