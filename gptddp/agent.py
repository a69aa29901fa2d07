"""torchrun's agent, where it has no flag for what a pod needs."""

import logging
import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.launcher import api as launcher
from torch.multiprocessing.spawn import ProcessContext

from gptddp.rendezvous import Rendezvous

EXIT_BARRIER_S = 10  # finished agents wait this long for peers that may be dead; torch: 300
HOPELESS_S = 5  # for the workers of a broken world to end by themselves; torch: 30


def install(rendezvous: Rendezvous, quiet: Callable[[], bool]) -> None:
    """Have torchrun use this agent in this process; while `quiet`, it logs nothing.

    A worker of a world that has lost another has nothing left to agree on or to save together. It
    nearly always fails within milliseconds; but gloo forgets to wake one in some hundred (in
    `UnboundBuffer::waitSend`, torch 2.13), and NCCL may wait for long. A worker of a whole world
    has the pod's grace period, to finish its step and save.
    """

    class Agent(LocalElasticAgent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"exit_barrier_timeout": EXIT_BARRIER_S})

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            most = HOPELESS_S if rendezvous.broken else self._shutdown_timeout
            super()._shutdown(death_sig, min(most, self._shutdown_timeout))

    def join(self: ProcessContext, timeout: float) -> None:
        siblings(self, min(timeout, HOPELESS_S))  # of a worker that has failed

    siblings = ProcessContext._join_procs_with_timeout
    names: Any = launcher, ProcessContext
    names[0].LocalElasticAgent, names[1]._join_procs_with_timeout = Agent, join

    def keep(record: logging.LogRecord) -> bool:
        record.exc_info = None  # of the agent; the worker has printed its own
        return not quiet()

    for logger in (server.logger, multiprocessing.logger):
        logger.addFilter(keep)
