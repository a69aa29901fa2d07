"""A run directory on a disk that fails on demand; as a script, a trainer on such a disk.

DISK_PLAN='{"10": "ENOSPC", "30": null}': the disk's error by first step (0: the start); it may be
"hang" or "slow" too, null is none. DISK_HEAL_S: it works again so long after the last step.
"""

import builtins
import errno
import io
import json
import os
import sys
import threading
import time
from pathlib import Path

from support.waiting_writer import save_in_this_process

from gptddp import train
from gptddp.distributed import connect
from gptddp.distributed.process import run
from gptddp.training import end
from gptddp.training.recorder import Recorder

WRITES = ["write", "fsync", "mkdir", "rename", "replace", "unlink"]
READS = [(os, "listdir"), (os, "stat"), (builtins, "open"), (io, "open")]


class Disk:
    """Lets calls on files below a folder fail, slow down or hang, by patches of Python."""

    def __init__(self, folder: Path, setattr=setattr) -> None:
        self.folder, self.mode, self.works = str(folder), None, threading.Event()
        save_in_this_process(setattr)
        self.seen: list[tuple[int, float]] = []  # each step, and the metric after it
        for name in WRITES:
            setattr(os, name, self._failing(getattr(os, name)))
        for module, name in READS:
            setattr(module, name, self._failing(getattr(module, name), only="hang"))
        setattr(os, "open", self._failing(os.open, flags=os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    def turn(self, mode: str | None) -> None:
        self.mode = mode
        self.works.clear() if mode else self.works.set()

    def _failing(self, real, only=None, flags=0):
        def call(target, *args, **kwargs):
            mode = self.mode
            if mode and only in (None, mode) and (not flags or mode == "hang" or args[0] & flags):
                path = f"/proc/self/fd/{target}" if isinstance(target, int) else target
                path = os.readlink(path) if isinstance(target, int) else os.fspath(path)
                if str(path).startswith(self.folder):
                    self._fail(mode, path, len(args[0]) if real.__name__ == "write" else 0)
            return real(target, *args, **kwargs)

        return call

    def _fail(self, mode, path, nbytes):
        if mode == "hang":
            self.works.wait()
        elif mode == "slow":
            time.sleep(nbytes / 2e5)
        else:
            raise OSError(getattr(errno, mode), os.strerror(getattr(errno, mode)), str(path))

    def plan(self, plan: dict[int, str | None], heal_s: float = 0, setattr=setattr) -> None:
        """Turn to another mode after these steps; heal some seconds after the last one."""
        step, ending = Recorder.step, end.Ending.run

        def turning(recorder, line, progress, step_s):
            if progress.step in plan:
                self.turn(plan[progress.step])
            step(recorder, line, progress, step_s)
            value = recorder.metrics.registry.get_sample_value("gptddp_storage_trouble")
            self.seen.append((progress.step, value))
            time.sleep(0.1 if self.mode else 0)

        def healing(*args):
            if heal_s:
                threading.Timer(heal_s, self.turn, (None,)).start()
            ending(*args)

        setattr(Recorder, "step", turning)
        setattr(end.Ending, "run", healing)
        self.turn(plan.get(0))


if __name__ == "__main__":
    connect.TIMEOUT_S, end.TELL_S = 4.0, 1.0
    end.WAIT_S = float(os.environ.get("DISK_WAIT_S", "60"))
    disk = Disk(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
    plan = {int(step): mode for step, mode in json.loads(os.environ["DISK_PLAN"]).items()}
    disk.plan(plan, float(os.environ.get("DISK_HEAL_S", "0")))
    run(train.main)  # ends as users' processes do: C++ does not take down its threads
