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
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.multiprocessing.spawn import ProcessContext

from gptddp.distributed import torch_private_elastic
from gptddp.files import is_locked
from gptddp.launch.rendezvous import Rendezvous

EXIT_BARRIER_S = 10  # finished agents wait this long for peers that may be dead; torch: 300
# A process that dies of one of these has crashed by itself. Not SIGKILL and SIGTERM, which come
# from outside, nor SIGABRT, which may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
BROKEN_WORLD_S = 2  # for the workers of a broken world to end by themselves; torch: 30
STACK_S = 0.2  # for a worker to write its stack


class Workers:
    """The workers of this pod, whichever of torchrun's agents has them at the time.

    A worker of a world that has lost another has nothing left to agree on or to save together. It
    mostly fails within milliseconds; but gloo forgets to wake some (in `UnboundBuffer::waitSend`,
    torch 2.13; in one recovery of four ranks out of three), NCCL may wait for long, and the one
    that the others miss hangs, or is stopped: those are killed, and the log says where they were.
    One that is writing its snapshot is waited for. A worker of a whole world has the pod's grace
    period, to finish its step and save.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        verdict: Path,
        memory: Path | None,
        crashed: Callable[[int, int], None],
    ) -> None:
        """`verdict`: the file of a worker's final error, with the files of their stacks beside it.

        `memory`: the folder in shared memory for snapshots. `crashed` is told the rank of a worker
        that has crashed, and the number of the signal.
        """
        self.rendezvous, self.verdict, self.memory = rendezvous, verdict, memory
        self.crashed = crashed
        self._agent: _Agent | None = None

    def install(self) -> None:
        """Have torchrun use our agent in this process; once there is a verdict it logs nothing."""
        torch_private_elastic.install_agent(self._make_agent, self.join)
        for logger in (server.logger, multiprocessing.logger):
            logger.addFilter(self._is_logged)

    def pids(self) -> list[int]:
        """The process ids of those that live."""
        pids = self._agent.pids() if self._agent else []
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def join(self, context: ProcessContext, limit_s: float) -> None:
        """Wait for the siblings of a worker that has failed; say where the others hang."""
        wait_for_snapshot(self.memory, limit_s)
        torch_private_elastic.join_processes(context, min(limit_s, BROKEN_WORLD_S))
        for line in describe_living(context.processes, self.verdict.parent):
            self.rendezvous.say(line)

    def _make_agent(self, *args: Any, **kwargs: Any) -> "_Agent":
        self._agent = _Agent(self, *args, **kwargs | {"exit_barrier_timeout": EXIT_BARRIER_S})
        return self._agent

    def _is_logged(self, record: logging.LogRecord) -> bool:
        record.exc_info = None  # the agent's own traceback; the worker has printed its own
        return not self.verdict.exists()


class _Agent(torch_private_elastic.Agent):
    def __init__(self, owner: Workers, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._owner = owner

    def observe_workers(self, group: server.WorkerGroup) -> server.RunResult:
        result = super().observe_workers(group)
        for rank, failure in result.failures.items():
            if -failure.exitcode in CRASHES:
                self._owner.crashed(rank, -failure.exitcode)
        return result

    def end_workers(self, number: signal.Signals, limit_s: int) -> None:
        if self._owner.rendezvous.broken and self.workers is not None:
            for process in self.workers.processes:
                process.terminate()
            self._owner.join(self.workers, limit_s)
            return super().end_workers(signal.SIGKILL, BROKEN_WORLD_S)
        super().end_workers(number, limit_s)


def wait_for_snapshot(memory: Path | None, limit_s: float) -> None:
    """Wait while a worker of this pod writes its snapshot: it locks the unfinished file."""
    end = time.monotonic() + limit_s
    while memory and any(map(is_locked, memory.glob("gptddp-*.part"))) and time.monotonic() < end:
        time.sleep(0.02)


def describe_living(processes: Sequence[BaseProcess], stacks: Path) -> list[str]:
    """A line for each worker that lives: where it is, by the stack that it writes on SIGUSR1.

    `stacks`: the folder of the files, see `distributed/process.py`.
    """
    living = {i: it.pid for i, it in enumerate(processes) if it.pid and it.is_alive()}
    for pid in living.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_S if living else 0)
    return [
        _describe(stacks / f"stack.{i}", Path(f"/proc/{pid}/stat")) for i, pid in living.items()
    ]


def _describe(stack: Path, stat: Path) -> str:
    try:
        rank, *lines = stack.read_text().splitlines()
        stopped = stat.read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, ValueError) as error:
        return f"a worker is killed that does not end ({error})"
    # '  File "/a/b.py", line 7 in f', the innermost first
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', "\n".join(lines))
    calls = [f"{function} ({file}:{line})" for file, line, function in frames[:4]]
    where = f"hangs in {', called by '.join(calls)}" if calls else "does not end"
    return f"{rank} {'is stopped (SIGSTOP)' if stopped else where}: it is killed"
