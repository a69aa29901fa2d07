"""The second half of `torch_private.py`: the parts of torchrun, for the launcher alone.

Read in torch 2.13. Each class gives private members of a class of torch's public names, which a
subclass may use and override. The names are listed, and checked, in `torch_private.NAMES`.
"""

import signal
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
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


class StateHolder(dynamic_rendezvous._BackendRendezvousStateHolder):
    """An agent's copy of the rendezvous' state, which it reads from the store and writes there."""

    def __init__(self, backend: Any, settings: RendezvousSettings, cache_s: float) -> None:
        """`cache_s`: how old a copy may be that `sync` does not read anew."""
        super().__init__(backend, settings, cache_s)  # type: ignore[arg-type]

    @property
    def settings(self) -> RendezvousSettings:
        return self._settings

    def remove_silent(self) -> None:
        """Take out who has been silent for too long; called after each reading of the state."""
        super()._sanitize()

    def _sanitize(self) -> None:
        self.remove_silent()


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
        node = dynamic_rendezvous._NodeDesc(address, 0, 0)
        super().__init__(node, settings, backend, store, holder)

    @property
    def holder(self) -> Any:
        """The agent's copy of the state."""
        return self._state_holder

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
