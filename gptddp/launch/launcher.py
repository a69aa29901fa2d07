"""What the container runs: the pod's facts -> torchrun with warm workers, in a process that stays.

    python -m gptddp.launch [trainer flags]

The operator describes the pod in PET_* variables; without them this is a job of one worker on this
machine. torchrun's own `main` runs in this process, again and again: when the rendezvous is lost
(its host was killed) every agent fails, and the next round starts here at once, where an exit of
the container would cost the kubelet's back-off. Recovery from single faults is torchrun's.

Exit codes: 0 finished, 2 to 5 a final error of the trainer (`errors.py`), 128 + n stopped by signal
n, 200 anything unexpected: 128 and above may be retried, below must not.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from gptddp.config import Config, check_world_size, differences, from_args, with_preset
from gptddp.distributed.watchdog import LAUNCHER_S, Watchdog, limit_s
from gptddp.errors import GptddpError
from gptddp.files import read_json
from gptddp.launch.forkserver import start_server
from gptddp.launch.pod import pod_from, torchrun_args
from gptddp.run import crash_loop
from gptddp.run.history import highest_generation, history

WORKER = str(Path(__file__).with_name("worker_script.py"))
UNEXPECTED = 200
LEAVE_S = 3.0  # after a signal, without workers: then the rendezvous does not answer
LOOK_S = 1.0  # between two looks for the marker of the finished run
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0  # between two rounds of the loop that joined no world

# Without the first, torch 2.13 cannot replace an agent; the second spares a round trip at each
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


class Leave(BaseException):
    """Raised through torchrun to end the loop with this exit code."""

    def __init__(self, code: int) -> None:
        self.code = code


def finished(config: Config) -> bool:
    """Is the run complete, as the marker in its directory says, and nothing else asked for?

    A run of another configuration is not this one: the trainer will refuse it, with the difference.
    """
    try:
        run = Path(config.run_dir) if config.run_dir else None
        if run is None or (marker := read_json(run / "finished.json")) is None:
            return False
        given = {name: v for name, v in dataclasses.asdict(config).items() if v is not None}
        if differences((read_json(run / "config.json") or {}).get("config", {}), given):
            return False
        steps = config.steps or int(marker["steps"])
        out_of_time = 0 < config.max_time <= marker.get("max_time", 0)
        return bool(marker["step"] >= steps or out_of_time)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # torn or foreign: the trainer will see


class Launcher:
    """The loop around torchrun, and everything that ends it."""

    def __init__(self) -> None:
        self.in_torchrun = False  # is there anything that a signal has to put in order?
        self.config = Config()
        self.verdict = Path(os.devnull)
        self.next_look_s = 0.0  # at the run directory, which may be far away
        self.workers: Callable[[], list[int]] = list  # the pids of those that live
        self.limit_s = self.last_worker_s = 0.0
        self.signals = Watchdog(self._over, self._pass_on, hurried=True)

    def _pass_on(self) -> None:
        """Tell the workers: the main thread may wait for a rendezvous that does not answer."""
        for pid in self.workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.signals.number)

    def _over(self, waited_s: float) -> bool:
        """`check` leaves in good order, where the main thread comes to it; else this."""
        if self.workers():  # they die with the launcher
            self.last_worker_s = waited_s
        return not self.in_torchrun or waited_s > min(self.limit_s, self.last_worker_s + LEAVE_S)

    def check(self, joining: bool) -> None:
        """Raise to leave torchrun: for a final error, a signal, or at joining the finished run."""
        self.heed_verdict()
        if joining and time.monotonic() > self.next_look_s:
            self.next_look_s = time.monotonic() + LOOK_S
            if finished(self.config):
                raise Leave(0)
        if self.signals.number:
            from torch.distributed.elastic.multiprocessing import SignalException

            number = signal.Signals(self.signals.number)
            raise SignalException(f"stopped by {number.name}", number)

    def _crashed(self, rank: int, number: int) -> None:
        """Count a worker that has died of its own fault: it cannot do so. Raises CrashLoopError."""
        run = Path(self.config.run_dir)
        error = RuntimeError(f"its process has died of {signal.Signals(number).name}")
        if final := crash_loop.final(
            error, run, step=1 + max((line["step"] for line in history(run)), default=0),
            generation=highest_generation(run), rank=rank, pod=os.environ.get("POD_NAME", ""),
        ):  # fmt: skip
            raise final

    def rescue(self, memory: Path | None) -> None:
        """Save what a worker has left in memory, before that goes with the pod."""
        if memory is None:
            return
        from gptddp.launch.rescue import rescue

        self.last_worker_s = self.limit_s  # the whole grace period may be used
        try:
            if name := rescue(self.config, memory):
                _say(f"stopped between two lives of the run: checkpoint {name} is saved")
        except (OSError, GptddpError) as error:
            _say(f"the state left in memory is not saved: {error}")

    def heed_verdict(self) -> None:
        """Say a worker's final error, which the worker has not done, and leave with its code."""
        if verdict := read_json(self.verdict):
            _say(f"rank {verdict['rank']}: {verdict['message']}")
            raise Leave(verdict["code"])

    def main(self, args: Sequence[str], script: str) -> int:
        self.config = from_args(args, prog="python -m gptddp.launch")
        os.environ.update(ENVIRONMENT)
        pod = pod_from(os.environ)
        os.environ["GPTDDP_GRACE_S"] = str(pod.grace_s)  # for the workers
        self.limit_s = limit_s(pod.grace_s, LAUNCHER_S)
        # Every preset has the same lanes, so this needs no look at the hardware.
        check_world_size(with_preset(self.config, accelerator=False), pod.largest_world)
        if finished(self.config):
            _say(f"the run {self.config.run_dir} is finished")
            return 0
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        os.environ.pop("PET_STANDALONE", None)  # the operator's value is not one torchrun can read
        if pod.address.startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch.distributed.run  # noqa: F401  # a second or two, before anything is left behind

        from gptddp.launch.torch_private import check_torch

        check_torch()
        with tempfile.TemporaryDirectory(prefix="gptddp-") as folder:
            self.verdict = Path(folder) / "verdict.json"
            os.environ["GPTDDP_VERDICT"] = str(self.verdict)
            start_server(Path(folder))
            try:
                return self._loop(torchrun_args(pod, script, args))
            except Exception:
                self.heed_verdict()  # whatever has happened to torchrun
                raise

    def _loop(self, args: list[str]) -> int:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.run import main as torchrun

        from gptddp.distributed.environment import shared_memory
        from gptddp.launch import agent
        from gptddp.launch.rendezvous import Rendezvous

        rendezvous = Rendezvous(self.check, _say)
        rendezvous.register()
        memory = shared_memory()
        self.workers = agent.install(rendezvous, self.verdict, memory, self._crashed)
        self.in_torchrun, pause_s = True, 0.0
        while True:
            try:
                rendezvous.pause(pause_s)
                torchrun(args)
                rendezvous.see_off(lambda: bool(self.signals.number))
                return 0
            except SignalException as stop:
                rendezvous.leave()
                self.heed_verdict()  # one that came after the signal
                self.rescue(memory)
                return 128 + stop.sigval
            except (RendezvousError, ChildFailedError, DistError, OSError, EOFError) as error:
                longer_s = FIRST_PAUSE_S if rendezvous.joined else 2 * pause_s
                pause_s = min(max(longer_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                _say(f"the group is lost ({_reason(error)}); joining again in {pause_s:g} s")


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(error).__name__}: {' '.join(str(cause).split())[:200]}"


def _say(message: str) -> None:
    print(f"gptddp.launch: {message}", file=sys.stderr, flush=True)


def main(args: Sequence[str] | None = None, script: str = WORKER) -> int:
    """Run this pod until the job is done, and return the container's exit code."""
    try:
        launcher = Launcher()
        return launcher.main(sys.argv[1:] if args is None else list(args), script)
    except Leave as leave:
        return leave.code
    except GptddpError as error:
        _say(str(error))
        return error.exit_code
    except SystemExit as error:  # --help
        return int(error.code or 0)
    except Exception:
        traceback.print_exc()
        return UNEXPECTED
