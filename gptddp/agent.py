"""torchrun's agent, where it has no flag for what a pod needs."""

import logging
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.launcher import api as launcher
from torch.multiprocessing.spawn import ProcessContext

from gptddp.files import is_locked
from gptddp.rendezvous import Rendezvous

EXIT_BARRIER_S = 10  # finished agents wait this long for peers that may be dead; torch: 300
# Who dies of these has not been killed. SIGABRT may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
HOPELESS_S = 2  # for the workers of a broken world to end by themselves; torch: 30


def install(
    rendezvous: Rendezvous,
    quiet: Callable[[], bool],
    memory: Path | None,
    crashed: Callable[[int, int], None],
) -> Callable[[], list[int]]:
    """Have torchrun use this agent in this process; while `quiet`, it logs nothing.

    Returns a function that lists the pids of its living workers. `crashed` is told the rank and
    the number of the signal of a worker that has died of its own fault.

    A worker of a world that has lost another has nothing left to agree on or to save together. It
    mostly fails within milliseconds; but gloo forgets to wake some (in `UnboundBuffer::waitSend`,
    torch 2.13; in one recovery of four ranks out of three), and NCCL may wait for long. One that is
    writing its state into `memory` is waited for. A worker of a whole world has the pod's grace
    period, to finish its step and save.
    """

    agents: list[Any] = []  # at most one

    class Agent(LocalElasticAgent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"exit_barrier_timeout": EXIT_BARRIER_S})
            agents[:] = [self]

        def _monitor_workers(self, worker_group: server.WorkerGroup) -> server.RunResult:
            result: server.RunResult = super()._monitor_workers(worker_group)
            for rank, failure in result.failures.items():
                if -failure.exitcode in CRASHES:
                    crashed(rank, -failure.exitcode)
            return result

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            most = self._shutdown_timeout
            if rendezvous.broken:
                wait_for_state(memory, most)
                most = min(HOPELESS_S, most)
            super()._shutdown(death_sig, most)

    def join(self: ProcessContext, timeout: float) -> None:  # the siblings of a failed worker
        wait_for_state(memory, timeout)
        siblings(self, min(timeout, HOPELESS_S))

    siblings = ProcessContext._join_procs_with_timeout
    names: Any = launcher, ProcessContext
    names[0].LocalElasticAgent, names[1]._join_procs_with_timeout = Agent, join

    def keep(record: logging.LogRecord) -> bool:
        record.exc_info = None  # of the agent; the worker has printed its own
        return not quiet()

    for logger in (server.logger, multiprocessing.logger):
        logger.addFilter(keep)

    def workers() -> list[int]:
        pids = agents[0]._pcontext.pids().values() if agents and agents[0]._pcontext else []
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    return workers


def wait_for_state(memory: Path | None, limit_s: float) -> None:
    """Wait while a worker of this pod writes its state: it holds a lock on the unfinished file."""
    end = time.monotonic() + limit_s
    while memory and any(map(is_locked, memory.glob("gptddp-*.part"))) and time.monotonic() < end:
        time.sleep(0.02)
