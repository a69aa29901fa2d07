"""The container's process: it runs torchrun again and again, by the pod's environment.

    python -m gptddp.launch [trainer flags]

The operator describes the pod in PET_* variables; without them this is a job of one worker on this
machine. A launcher knows the launchers of the other pods (`mesh.py`), and runs one worker under
torchrun, again and again: a lost worker costs a fork of milliseconds, but an exit of the container
would cost the kubelet's back-off. In a pod of several workers each has its own launcher, a child of
this process (`siblings.py`).

Exit codes: 0 finished, 2 to 5 a final error of the trainer (`errors.py`), 128 + n stopped by signal
n, 200 anything unexpected: 128 and above may be retried, below must not.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gptddp.checkpoint import run_state
from gptddp.config import Config, check_world_size, with_preset
from gptddp.distributed.environment import LOCAL, STARTS, pod
from gptddp.distributed.report import load_torch, say
from gptddp.distributed.torch_private import check_torch
from gptddp.distributed.watchdog import STOPS, Watchdog
from gptddp.errors import GptddpError
from gptddp.files import patiently, read_json
from gptddp.flags import from_args
from gptddp.grace import LAUNCHER_S, limit_s
from gptddp.launch import pod_facts, siblings
from gptddp.launch.forkserver import start_server
from gptddp.launch.mesh import Mesh
from gptddp.launch.worker import KILLS, Worker
from gptddp.run import crash_loop
from gptddp.run.history import highest_generation, last_step

SCRIPT = str(Path(__file__).with_name("worker_script.py"))
UNEXPECTED = 200
POLL_S = 0.1
NO_WORKER_S = 3.0  # after a signal, for torchrun to end once its worker has
MARKER_S = 1.0  # between two reads of the marker of a finished run
ALIVE_S = 1.0  # between two signs of life for the pod's liveness probe
VOLUME_S = 3600.0  # a hanging volume must not cost the state in the pod's memory
FIRST_REPORT_S, REPORT_EVERY_S = 15.0, 60.0  # of waiting: first log line, and between two
PEERS_EXIT_S = 3.0  # for the peers to leave at the end of the job
LEAVES_S = 10.0  # for the exit of a worker that has left the world
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # before another worker, which may fail like the last
LIVED_S = 20.0  # in a world; a later failure is not one of the start

CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"  # a query for GPUs must not start CUDA in this process
# Without the first, torch prints a stack at each loss of a peer; without the second, torchrun
# prints a banner about threads, whose number the trainer sets by a call.
DEFAULTS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
_NO_KEY = (
    "any process that reaches the launchers' ports can join the job, and end it; a Secret with the"
    " job's name gives its pods a key, and `gptddp-k8s submit` makes one: see docs/security.md"
    " of the sources"
)


class Exit(BaseException):
    """Raised through torchrun to end the loop with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Launcher:
    """The loop around torchrun, and all that ends it."""

    def __init__(self) -> None:
        self.local_rank = 0  # of its worker
        self.in_torchrun = False  # False: a signal ends this process at once
        self.config = Config()
        self.verdict = Path(os.devnull)
        self.mesh: Mesh
        self.worker = Worker(self.verdict.parent, 0, self._name, _say, self._crashed)
        self.most = 1  # members that the job asks for
        self.next_alive_s = 0.0  # monotonic
        self.next_marker_s = 0.0  # monotonic: next read of the run directory, which may be slow
        self.next_report_s = 0.0  # monotonic: next log line about waiting
        self.rank: int | None = None  # of the worker, in its last view
        self.in_view_s = self.going_s = math.inf  # monotonic: the worker is in a view; trains in it
        self.limit_s = self.last_worker_s = 0.0  # after the signal
        self.signals = Watchdog(self._must_exit, self._pass_on, hurried=[signal.SIGINT])

    def _pass_on(self) -> None:
        """Forward the signal at once: the main thread may be in a call that does not return."""
        if pid := self.worker.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.signals.number)

    def _must_exit(self, waited_s: float) -> bool:
        """Is the time over in which the main thread should have reached `raise_if_over`?"""
        if self.worker.pid:  # it dies with the launcher
            self.last_worker_s = waited_s
        limit_s = min(self.limit_s, self.last_worker_s + NO_WORKER_S)
        return not self.in_torchrun or waited_s > limit_s

    def raise_if_over(self) -> None:
        """Raise to leave torchrun: for a final error, a signal, or a finished run."""
        self.raise_verdict()
        self.say_alive()
        now = time.monotonic()
        # a worker that leaves must not be ended through torchrun before its last messages
        is_idle = not self.mesh.going and now > self.mesh.left_at + LEAVES_S
        if is_idle and now > self.next_marker_s:
            self.next_marker_s = now + MARKER_S
            self.say_alive(VOLUME_S)
            finished = bool(run_state.why_finished(self.config))
            self.say_alive()
            if finished:
                raise Exit(0)
        if self.signals.number:
            from torch.distributed.elastic.multiprocessing import SignalException

            number = signal.Signals(self.signals.number)
            raise SignalException(f"stopped by {number.name}", number)

    def say_alive(self, busy_s: float = 0.0) -> None:
        """Touch the file of the liveness probe; the next turn of the loop may take `busy_s`."""
        path, now = os.environ.get("GPTDDP_ALIVE"), time.monotonic()
        if path and (busy_s or now > self.next_alive_s):
            self.next_alive_s = now + (0.0 if busy_s else ALIVE_S)
            with contextlib.suppress(OSError):  # a missing file is no error
                Path(path).touch()
                os.utime(path, times=(time.time() + busy_s,) * 2)

    def _look(self) -> None:
        """Check everything, every POLL_S while the worker lives."""
        self.raise_if_over()
        if how := self.worker.look():
            self.mesh.end_of_worker(how)
        if self.mesh.rank is not None:
            self.in_view_s = min(self.in_view_s, time.monotonic())
        if self.mesh.going:
            self.going_s, self.rank = min(self.going_s, time.monotonic()), self.mesh.rank
            self.next_report_s = time.monotonic() + FIRST_REPORT_S
        elif time.monotonic() > self.next_report_s:
            self.next_report_s = time.monotonic() + REPORT_EVERY_S
            _say(f"not training yet: {1 + self.mesh.others()} of {self.most} workers are here")

    def _crashed(self, how: str, step: int) -> None:
        """Count a worker's crash, which it cannot record itself; `step`: 0 if unknown.

        Raises CrashLoopError.
        """
        self.say_alive(VOLUME_S)
        run = Path(self.config.run_dir)
        final = crash_loop.final(
            RuntimeError(how),
            run,
            step=step or 1 + last_step(run),
            generation=highest_generation(run),
            rank=self.rank or 0,
            pod=os.environ.get("POD_NAME", ""),
        )
        if final:
            raise final

    def raise_verdict(self) -> None:
        """If the worker has left a final error, print it and exit with its code."""
        if verdict := read_json(self.verdict):
            if not verdict["shared"] or siblings.is_first():
                _say(f"rank {verdict['rank']}: {verdict['message']}")
            raise Exit(verdict["code"])

    def main(self, args: Sequence[str], script: str) -> int:
        """Prepare this process for torchrun and run the loop; return the container's exit code."""
        self.config = patiently(lambda: from_args(args, prog="python -m gptddp.launch"))
        os.environ[CUDA_CHECK] = "1"
        with contextlib.suppress(OSError, KeyError):  # of an earlier launcher
            Path(os.environ["GPTDDP_ALIVE"]).unlink()
        facts = pod_facts.pod_from(os.environ)
        pod_facts.forget_key()
        pod_facts.as_elastic(facts, os.environ)
        os.environ["GPTDDP_GRACE_S"] = str(facts.grace_s)  # for the workers
        self.limit_s = limit_s(facts.grace_s, LAUNCHER_S)
        # without a preset the trainer's hardware decides: here the preset of an accelerator is used
        in_force = patiently(lambda: run_state.in_force(self.config))
        check_world_size(with_preset(in_force, accelerator=True), facts.largest_world)
        if why := run_state.why_finished(self.config):
            _say(f"the run {self.config.run_dir} is finished: {why}")
            return 0
        if not facts.key:
            _say(f"warning: {pod_facts.KEY} is not set: {_NO_KEY}")
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        os.environ.pop("PET_STANDALONE", None)  # the operator's value is not one torchrun can read
        if facts.address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if facts.workers == 1:
            return self._supervise(facts, args, script)
        if facts.endpoint == pod_facts.ALONE:
            facts = replace(facts, endpoint=f"127.0.0.1:{siblings.free_ports(facts.workers)}")
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        self.signals.close()

        def begin(local_rank: int) -> int:
            self.local_rank = local_rank
            self.signals = Watchdog(self._must_exit, self._pass_on, hurried=[signal.SIGINT])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
            return _guarded(lambda: self._supervise(facts, args, script))

        return siblings.run(facts.workers, begin)

    def _supervise(self, facts: pod_facts.PodFacts, args: Sequence[str], script: str) -> int:
        """Run one worker again and again; return the exit code of its launcher."""
        self.most = facts.largest_world
        os.environ[LOCAL] = f"{self.local_rank}/{facts.workers}"
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gptddp-")))
            self.verdict = folder / "verdict.json"
            os.environ["GPTDDP_VERDICT"] = str(self.verdict)
            self.mesh = Mesh(
                facts.key,
                facts.rdzv_id,
                facts.address,
                facts.port and facts.port + self.local_rank,
                pod_facts.seeds(facts),
                facts.nodes[0] * facts.workers,
                self.most,
                folder,
            )
            # before torch: the others see this launcher at once
            os.environ["GPTDDP_MEMBERS"] = self.mesh.start()
            stack.callback(lambda: self.mesh.close("its launcher has ended"))
            load_torch(launcher=True)  # a second or two
            check_torch()
            self.worker = Worker(folder, self.local_rank, self._name, _say, self._crashed)
            start_server(folder)
            try:
                return self._rounds(pod_facts.torchrun_args(facts, script, args))
            except Exception:
                self.raise_verdict()  # it comes before an error of torchrun
                raise

    def _name(self) -> str:
        return f"rank {self.rank} ({pod()})" if self.rank is not None else "the worker"

    def _rounds(self, args: list[str]) -> int:
        """Run torchrun again and again, until the job is done or stopped."""
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.run import main as torchrun

        from gptddp.launch import rendezvous

        rendezvous.register(self._look)
        for name in ("agent.server", "multiprocessing"):
            logging.getLogger(f"torch.distributed.elastic.{name}.api").addFilter(self._is_logged)
        self.in_torchrun, pause_s = True, 0.0
        while True:
            try:
                self._pause(pause_s)
                self.in_view_s = self.going_s = math.inf
                self.next_report_s = time.monotonic() + FIRST_REPORT_S
                with contextlib.suppress(OSError), (self.verdict.parent / STARTS).open("a") as file:
                    file.write("+")
                torchrun(args)
                self._wait_for_exits()
                return 0
            except SignalException as stop:
                self.raise_verdict()  # an error after the signal
                return 128 + stop.sigval
            except (ChildFailedError, DistError, OSError, EOFError) as error:
                code = _exit_code(error)
                how = self.worker.ended(code) if code is not None else _reason(error)
                self.mesh.end_of_worker(how)
                longer_s = min(max(2 * pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                pause_s = 0.0 if self._was_killed(code) else longer_s
                when = f"in {pause_s:g} s" if pause_s else "at once"
                _say(f"the worker is lost ({how}); it is started again {when}")

    def _was_killed(self, code: int | None) -> bool:
        """Has the worker ended for a reason that the next worker will not have?"""
        now = time.monotonic()
        if self.mesh.is_bereaved:  # a worker that loses a peer before its first step ends too
            return now > self.in_view_s
        return now - self.going_s > (0 if code in KILLS else LIVED_S)

    def _is_logged(self, record: logging.LogRecord) -> bool:
        """Drop torchrun's stacks and usual messages of a worker's end: the launcher reports it."""
        closes = bool(self.signals.number) and str(record.msg).startswith("Closing process")
        return not (record.exc_info or self.verdict.exists() or closes)

    def _pause(self, seconds: float) -> None:
        """Sleep; raises as soon as `raise_if_over` does."""
        end = time.monotonic() + seconds
        self.raise_if_over()
        while (rest_s := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, rest_s))
            self.raise_if_over()

    def _wait_for_exits(self) -> None:
        """At the end of the job: the pod of rank 0 exits when all workers have, other pods later.

        When the operator sees the first exited pod, it deletes the running pods with their logs,
        and rank 0's log is the run's. A kubelet polls once a second.
        """
        end = time.monotonic() + PEERS_EXIT_S
        while time.monotonic() < end and not self.signals.number:
            if not self.rank and not self.mesh.others():
                return
            time.sleep(POLL_S)


def _exit_code(error: Exception) -> int | None:
    """The exit code of the failed worker; None if torchrun itself has failed."""
    failures = getattr(error, "failures", {})
    return next((it.exitcode for it in failures.values()), None)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


_say = partial(say, "gptddp.launch")


def _guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`, also for any exception."""
    try:
        return run()
    except Exit as end:
        return end.code
    except GptddpError as error:
        _say(str(error))
        return error.exit_code
    except SystemExit as error:  # --help
        return int(error.code or 0)
    except Exception:
        traceback.print_exc()
        return UNEXPECTED


def main(args: Sequence[str] | None = None, script: str = SCRIPT) -> int:
    """Run this pod until the job is done, and return the container's exit code, as listed above."""
    given = sys.argv[1:] if args is None else list(args)
    return _guarded(lambda: Launcher().main(given, script))
