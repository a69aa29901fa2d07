"""torchrun's agent, where it has no flag for what a pod needs."""

import contextlib
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import api as server
from torch.distributed.elastic.multiprocessing import api as multiprocessing
from torch.multiprocessing.spawn import ProcessContext

from gptddp.distributed import pulse, torch_private_elastic
from gptddp.distributed.environment import pod
from gptddp.files import is_locked
from gptddp.launch.hung import Hanging, Pulses, describe, is_stopped
from gptddp.launch.rendezvous import Rendezvous

EXIT_BARRIER_S = 10  # finished agents wait this long for peers that may be dead; torch: 300
# A process that dies of one of these has crashed by itself. Not SIGKILL and SIGTERM, which come
# from outside, nor SIGABRT, which may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
NO_CODE = (
    255  # multiprocessing: the forkserver is gone, and nobody knows how its children have ended
)
BROKEN_WORLD_S = 2  # for the workers of a broken world to end by themselves; torch: 30
SNAPSHOT_S = 60.0  # for a worker that hangs to leave its state


class Workers:
    """The workers of this pod, whichever of torchrun's agents has them at the time.

    A worker of a world that has lost another has nothing left to agree on or to save together. It
    mostly fails within milliseconds; but gloo forgets to wake some (in `UnboundBuffer::waitSend`,
    torch 2.13; in one recovery of four ranks out of three), NCCL may wait for long, and the one
    that the others miss hangs, or is stopped: those are killed, and the log says where they were.
    One that is writing its snapshot is waited for. A worker of a whole world has the pod's grace
    period, to finish its step and save.

    A worker that hangs though nobody misses it is killed too, by its pulse (`launch/hung.py`).
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        verdict: Path,
        memory: Path | None,
        crashed: Callable[[int, str, int], None],
    ) -> None:
        """`verdict`: the file of a worker's final error; beside it, their stacks and pulses.

        `memory`: the folder in shared memory for snapshots. `crashed` is told the rank of a worker
        that has crashed or hangs, how, and its step where that is known, else 0.
        """
        self.rendezvous, self.verdict, self.memory = rendezvous, verdict, memory
        self.crashed, self.pulses = crashed, Pulses(verdict.parent, self._tell_stopped)
        self.first_rank = 0  # of this pod's
        self._agent: _Agent | None = None

    def install(self) -> None:
        """Have torchrun use our agent in this process; once there is a verdict it logs nothing."""
        torch_private_elastic.install_agent(self._make_agent, self.join)
        for logger in (server.logger, multiprocessing.logger):
            logger.addFilter(self._is_logged)

    def pids(self) -> list[int]:
        """The process ids of living workers."""
        pids = self._agent.pids() if self._agent else []
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def join(self, context: ProcessContext, limit_s: float) -> None:
        """Wait for the siblings of a worker that has failed; say where the others hang."""
        wait_for_snapshot(self.memory, limit_s)
        torch_private_elastic.join_processes(context, min(limit_s, BROKEN_WORLD_S))
        living = {i: p.pid for i, p in enumerate(context.processes) if p.pid and p.is_alive()}
        for line in describe(living, self.verdict.parent):
            self.rendezvous.say(line)

    def end_hanging(self, pids: list[int], first_rank: int) -> None:
        """Kill the workers that hang; a snapshot that one is leaving is waited for.

        `first_rank`: of this pod's. Raises what `crashed` raises.
        """
        self.first_rank = first_rank
        for it in self.pulses.hanging(pids):
            wait_for_snapshot(self.memory, SNAPSHOT_S)
            if Path(f"/proc/{it.pid}").exists():
                self._end(it, first_rank + it.local_rank)

    def _tell_stopped(self, local_rank: int, step: int, seconds: float) -> None:
        what = f"rank {self.first_rank + local_rank} ({pod()}) is stopped (SIGSTOP)"
        self.rendezvous.say(f"step {step} has not moved for {seconds:.0f} s: {what}")

    def _end(self, it: Hanging, rank: int) -> None:
        line = describe({it.local_rank: it.pid}, self.verdict.parent)[0]
        self.rendezvous.say(f"no progress for {it.seconds:.0f} s: {line}")
        with contextlib.suppress(OSError):  # it has ended by itself
            stopped = is_stopped(it.pid)
            os.kill(it.pid, signal.SIGKILL)
            if it.step and not stopped:  # a volume may hang at the start; a stop is from outside
                how = re.sub(r"^rank \d+ |: it is killed$", "", line)
                self.crashed(rank, f"it {how}", it.step)

    def died(self, local_rank: int, pid: int | None, code: int | None) -> None:
        """A worker has ended: if it was killed, that is noted for the next life, which names it.

        Not before its own life has begun.
        """
        it = pulse.read(pulse.path_of(self.verdict.parent, local_rank))
        if it and it.pid == pid and it.step and code is not None:
            if code == NO_CODE:
                pass
            elif code < 0:
                with contextlib.suppress(ValueError):  # a signal without a name
                    pass

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
        self._seen_to_fail: ProcessContext | None = None

    def observe_workers(self, group: server.WorkerGroup) -> server.RunResult:
        self._owner.end_hanging(self.pids(), group.workers[0].global_rank)
        result = super().observe_workers(group)
        for rank, failure in result.failures.items():
            self._owner.died(failure.local_rank, failure.pid, failure.exitcode)
            self._seen_to_fail = self.workers
            if -failure.exitcode in CRASHES:
                name = signal.Signals(-failure.exitcode).name
                self._owner.crashed(rank, f"its process has died of {name}", 0)
        return result

    def end_workers(self, number: signal.Signals, limit_s: int) -> None:
        if self._owner.rendezvous.broken and self.workers is not None:
            if self._seen_to_fail is not self.workers:  # other pods have seen it earlier
                for i, process in enumerate(self.workers.processes):
                    self._owner.died(i, process.pid, process.exitcode)
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
