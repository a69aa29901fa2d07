"""What the container runs: torchrun, as the pod's environment says, in a process that stays.

    python -m gptddp.launch [trainer flags]

The operator describes the pod in PET_* variables; without them this is a job of one worker on this
machine. torchrun's own `main` runs in this process, again and again: when the rendezvous is lost
(its host was killed) every agent fails, and the next round starts here at once, where an exit of
the container would cost the kubelet's back-off. torchrun itself recovers from single faults.

Exit codes: 0 finished, 2 to 5 a final error of the trainer (`errors.py`), 128 + n stopped by signal
n, 200 anything unexpected: 128 and above may be retried, below must not.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gptddp.checkpoint import run_state
from gptddp.config import Config, check_world_size, with_preset
from gptddp.distributed.report import say
from gptddp.distributed.torch_private import LAUNCHER, TRAINER, check_torch
from gptddp.distributed.watchdog import Watchdog
from gptddp.errors import GptddpError
from gptddp.files import patiently, read_json
from gptddp.flags import from_args
from gptddp.grace import LAUNCHER_S, limit_s
from gptddp.launch.forkserver import start_server
from gptddp.launch.pod_facts import KEY, as_elastic, forget_key, pod_from, torchrun_args
from gptddp.run import crash_loop
from gptddp.run.history import highest_generation, last_step

if TYPE_CHECKING:
    from gptddp.launch.rendezvous import Rendezvous

WORKER = str(Path(__file__).with_name("worker_script.py"))
UNEXPECTED = 200
NO_WORKERS_S = 3.0  # after a signal, for torchrun to end once its workers have
MARKER_S = 1.0  # between two reads of the marker of a finished run
ALIVE_S = 1.0  # between two signs of life for the pod's liveness probe
VOLUME_S = 3600.0  # a volume that hangs is no reason to lose what the pod has in memory
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # between two rounds of the loop that joined no world

# Without the first, torch 2.15 cannot replace an agent; the second spares a round trip at each
# rendezvous, as all pods have the same number of workers; the third keeps CUDA out of this process
# when it only asks whether there is a GPU.
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
# Without the first, torch prints a stack whenever a peer is gone; without the second, torchrun a
# banner about threads, whose number the trainer sets by call.
DEFAULTS = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
_NO_KEY = (
    "whoever reaches the port of the rendezvous can change who is in the job; a Secret of the job's"
    " name gives its pods a key, and `gptddp-k8s submit` makes one: see docs/security.md"
    " of the sources"
)


class Exit(BaseException):
    """Raised through torchrun to end the loop with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


class Launcher:
    """The loop around torchrun, and everything that ends it."""

    def __init__(self) -> None:
        self.in_torchrun = False  # else a signal ends this process at once
        self.config = Config()
        self.verdict = Path(os.devnull)
        self.memory: Path | None = None  # in which workers leave snapshots
        self.poll_late_saves: Callable[[], None] = lambda: None
        self.next_alive_s = 0.0  # monotonic
        self.next_marker_s = 0.0  # monotonic: when the run directory, which may be slow, is read
        self.worker_pids: Callable[[], list[int]] = list  # of those that live
        self.limit_s = self.last_worker_s = 0.0  # after the signal
        self.signals = Watchdog(self._must_exit, self._pass_on, hurried=[signal.SIGINT])

    def _pass_on(self) -> None:
        """Tell the workers: the main thread may wait for a rendezvous that does not answer."""
        for pid in self.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.signals.number)

    def _must_exit(self, waited_s: float) -> bool:
        """Is the time over in which the main thread should have come to `raise_if_over`?"""
        if self.worker_pids():  # they die with the launcher
            self.last_worker_s = waited_s
        limit_s = min(self.limit_s, self.last_worker_s + NO_WORKERS_S)
        return not self.in_torchrun or waited_s > limit_s

    def raise_if_over(self, joining: bool) -> None:
        """Raise to leave torchrun: for a final error, a signal, or at joining the finished run."""
        self.raise_verdict()
        self.poll_late_saves()
        self.say_alive()
        if joining and time.monotonic() > self.next_marker_s:
            self.next_marker_s = time.monotonic() + MARKER_S
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
        """Touch the file of the liveness probe: the loop turns; the next turn may take `busy_s`."""
        path, now = os.environ.get("GPTDDP_ALIVE"), time.monotonic()
        if path and (busy_s or now > self.next_alive_s):
            self.next_alive_s = now + (0.0 if busy_s else ALIVE_S)
            with contextlib.suppress(OSError):  # without the file nothing is wrong
                Path(path).touch()
                os.utime(path, times=(time.time() + busy_s,) * 2)

    def _crashed(self, rank: int, how: str, step: int) -> None:
        """Count a worker's crash, which it cannot record itself; `step`: 0 where none is known.

        Raises CrashLoopError.
        """
        self.say_alive(VOLUME_S)
        run = Path(self.config.run_dir)
        final = crash_loop.final(
            RuntimeError(how),
            run,
            step=step or 1 + last_step(run),
            generation=highest_generation(run),
            rank=rank,
            pod=os.environ.get("POD_NAME", ""),
        )
        if final:
            raise final

    def rescue(self, over: bool = False) -> None:
        """Save a worker's snapshot as a checkpoint, before it goes with the pod.

        `over`: no life follows; else one has been stopped between two lives.
        """
        if self.memory is None:
            return
        from gptddp.launch.rescue import rescue

        self.last_worker_s = self.limit_s  # the whole grace period may be used
        what = "the newest state was in memory" if over else "stopped between two lives of the run"
        try:
            if name := rescue(self.config, self.memory, over):
                _say(f"{what}: checkpoint {name} is saved")
        except (OSError, GptddpError) as error:
            _say(f"the state left in memory is not saved: {error}")

    def raise_verdict(self) -> None:
        """Where a worker has left a final error, print it for the worker and exit with its code."""
        if verdict := read_json(self.verdict):
            self.say_alive(VOLUME_S)
            with contextlib.suppress(Exception):  # the code of a final error counts
                self.rescue(over=True)
            _say(f"rank {verdict['rank']}: {verdict['message']}")
            raise Exit(verdict["code"])

    def main(self, args: Sequence[str], script: str) -> int:
        """Prepare this process for torchrun and run the loop; the container's exit code."""
        self.config = patiently(lambda: from_args(args, prog="python -m gptddp.launch"))
        os.environ.update(ENVIRONMENT)
        if alive := os.environ.get("GPTDDP_ALIVE"):  # of a launcher before this one
            with contextlib.suppress(OSError):
                Path(alive).unlink()
        pod = pod_from(os.environ)
        forget_key()
        as_elastic(pod, os.environ)
        os.environ["GPTDDP_GRACE_S"] = str(pod.grace_s)  # for the workers
        self.limit_s = limit_s(pod.grace_s, LAUNCHER_S)
        # without a preset the hardware decides, of which the trainer knows: the most that may be
        in_force = patiently(lambda: run_state.in_force(self.config))
        check_world_size(with_preset(in_force, accelerator=True), pod.largest_world)
        if why := run_state.why_finished(self.config):
            _say(f"the run {self.config.run_dir} is finished: {why}")
            return 0
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        os.environ.pop("PET_STANDALONE", None)  # the operator's value is not one torchrun can read
        if pod.address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch.distributed.run  # noqa: F401  # a second or two, and nothing to clean up yet

        check_torch(TRAINER, LAUNCHER)
        with tempfile.TemporaryDirectory(prefix="gptddp-") as folder:
            self.verdict = Path(folder) / "verdict.json"
            os.environ["GPTDDP_VERDICT"] = str(self.verdict)
            start_server(Path(folder))
            try:
                return self._loop(torchrun_args(pod, script, args), pod.key)
            except Exception:
                self.raise_verdict()  # whatever has happened to torchrun
                raise

    def _loop(self, args: list[str], key: str) -> int:
        from gptddp.distributed.environment import shared_memory
        from gptddp.launch.agent import Workers
        from gptddp.launch.rendezvous import Rendezvous
        from gptddp.launch.rescue import LateSaves

        if not key:
            _say(f"warning: {KEY} is not set: {_NO_KEY}")
        rendezvous = Rendezvous(self.raise_if_over, _say, key, self.say_alive)
        rendezvous.register()
        self.memory = memory = shared_memory()
        workers = Workers(rendezvous, self.verdict, memory, self._crashed)
        workers.install()
        self.worker_pids = workers.pids
        with contextlib.ExitStack() as stack:
            if memory is not None:
                saves = LateSaves(self.config, memory, self.verdict.parent)
                self.poll_late_saves = saves.poll
                stack.callback(saves.stop)
            return self._rounds(args, rendezvous)

    def _rounds(self, args: list[str], rendezvous: "Rendezvous") -> int:
        """torchrun again and again, until the job is done or stopped."""
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.run import main as torchrun

        self.in_torchrun, pause_s = True, 0.0
        while True:
            try:
                rendezvous.pause(pause_s)
                torchrun(args)
                rendezvous.wait_for_exits(lambda: bool(self.signals.number))
                return 0
            except SignalException as stop:
                rendezvous.withdraw()
                self.raise_verdict()  # one that came after the signal
                self.rescue()
                return 128 + stop.sigval
            except (RendezvousError, ChildFailedError, DistError, OSError, EOFError) as error:
                longer_s = FIRST_PAUSE_S if rendezvous.joined else 2 * pause_s
                pause_s = min(max(longer_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                _say(f"the group is lost ({_reason(error)}); joining again in {pause_s:g} s")


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(error).__name__}: {' '.join(str(cause).split())[:200]}"


_say = partial(say, "gptddp.launch")


def main(args: Sequence[str] | None = None, script: str = WORKER) -> int:
    """Run this pod until the job is done, and return the container's exit code, as listed above."""
    try:
        launcher = Launcher()
        return launcher.main(sys.argv[1:] if args is None else list(args), script)
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
