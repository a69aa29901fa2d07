"""torchrun's agent, where it has no flag for what a pod needs."""

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.distributed.launcher import api as launcher
from torch.multiprocessing.spawn import ProcessContext

from gptddp.files import is_locked
from gptddp.launch.rendezvous import Rendezvous

EXIT_BARRIER_S = 10  # finished agents wait this long for peers that may be dead; torch: 300
# Who dies of these has not been killed. SIGABRT may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
HOPELESS_S = 2  # for the workers of a broken world to end by themselves; torch: 30
STACK_S = 0.2  # for one that did not to tell where it is


def install(
    rendezvous: Rendezvous,
    verdict: Path,
    memory: Path | None,
    crashed: Callable[[int, int], None],
) -> Callable[[], list[int]]:
    """Have torchrun use this agent in this process; where there is a verdict, it logs nothing.

    Returns a function that lists the pids of its living workers. `crashed` is told the rank and
    the number of the signal of a worker that has died of its own fault.

    A worker of a world that has lost another has nothing left to agree on or to save together. It
    mostly fails within milliseconds; but gloo forgets to wake some (in `UnboundBuffer::waitSend`,
    torch 2.13; in one recovery of four ranks out of three), NCCL may wait for long, and the one
    that the others miss hangs, or is stopped: those are killed, and the log says where they were.
    One that is writing its state into `memory` is waited for. A worker of a whole world has the
    pod's grace period, to finish its step and save.
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
            workers: Any = getattr(self._pcontext, "_pc", None)
            if rendezvous.broken and workers is not None:
                for process in workers.processes:
                    process.terminate()
                join(workers, self._shutdown_timeout)
                return super()._shutdown(signal.SIGKILL, HOPELESS_S)
            super()._shutdown(death_sig, self._shutdown_timeout)

    def join(self: ProcessContext, timeout: float) -> None:  # the siblings of a failed worker
        wait_for_state(memory, timeout)
        end_by_themselves(self, min(timeout, HOPELESS_S))
        for what in whereabouts(self.processes, verdict.parent):
            rendezvous.say(what)

    end_by_themselves = ProcessContext._join_procs_with_timeout
    names: Any = launcher, ProcessContext
    names[0].LocalElasticAgent, names[1]._join_procs_with_timeout = Agent, join

    def keep(record: logging.LogRecord) -> bool:
        record.exc_info = None  # of the agent; the worker has printed its own
        return not verdict.exists()

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


def whereabouts(processes: Sequence[BaseProcess], stacks: Path) -> list[str]:
    """A line for each worker that lives: where it is, as it tells on SIGUSR1 (`worker.py`)."""
    left = {i: it.pid for i, it in enumerate(processes) if it.pid and it.is_alive()}
    for pid in left.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_S if left else 0)
    return [
        _whereabouts(stacks / f"stack.{i}", Path(f"/proc/{pid}/stat")) for i, pid in left.items()
    ]


def _whereabouts(stack: Path, stat: Path) -> str:
    try:
        rank, *lines = stack.read_text().splitlines()
        stopped = stat.read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, ValueError) as error:
        return f"a worker is killed that does not end ({error})"
    # '  File "/a/b.py", line 7 in f', the innermost first
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', "\n".join(lines))
    places = [f"{function} ({file}:{line})" for file, line, function in frames[:4]]
    where = f"hangs in {', called by '.join(places)}" if places else "does not end"
    return f"{rank} {'is stopped (SIGSTOP)' if stopped else where}: it is killed"
