"""The trainer's worker with slower steps, and with points where a test can have its pod killed.

`FAULTS_DIR/pause` has the seconds that each step takes longer. A file `<worker>.<place>` there is
an order: the launcher of that pod is killed when its worker gets to that place, once.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from pathlib import Path

from gptddp import train
from gptddp.data import blocks
from gptddp.distributed.process import run
from gptddp.run.history import RunLog
from gptddp.training import end, life, worlds

PLACES = [
    (worlds.Worlds, "_form", "form"),  # a world is about to be formed
    (worlds, "compare", "join"),  # a world is formed; a joiner has no state yet
    (RunLog, "sync", "commit"),  # a checkpoint is written and not yet renamed
    (RunLog, "sync", "save"),  # the same place, but only the worker is killed
    (end.Ending, "run", "end"),  # after the last step, before its checkpoint
    (end.Ending, "_record", "finish"),  # then it is committed, but the run not yet marked finished
]
BUSY_S = 10
READ_S = 2
blocks.RETRY_S = (0.01,)


def ordered(name: str) -> Path:
    return Path(os.environ["FAULTS_DIR"], name)


def mine(name: str) -> Path:
    return ordered(f"{os.environ['POD_NAME'].rpartition('-')[2]}.{name}")


def obey(place: str) -> None:
    try:
        mine(place).rename(mine(f"{place}.done"))
    except FileNotFoundError:
        return
    if place == "busy":
        ctypes.PyDLL(None).usleep(BUSY_S * 1_000_000)  # it holds the GIL
        return
    if place == "save":
        os.kill(os.getpid(), signal.SIGKILL)
    hog = [bytearray(1 << 24) for _ in range(500 * (place == "eat"))]  # for the kernel's OOM killer
    launcher = multiprocessing.parent_process()
    assert launcher and launcher.pid
    os.kill(launcher.pid, signal.SIGKILL)
    time.sleep(60 + len(hog))


def stop_at(owner, name, place):
    there = getattr(owner, name)

    def stopping(*args, **kwargs):
        obey(place)
        return there(*args, **kwargs)

    setattr(owner, name, stopping)


def main() -> int | None:
    agree, of_step, me = life.agree, train.of_step, os.environ.get("LOCAL_RANK", "0")
    read = blocks.Source.documents

    def reading(*args):
        if mine("read").exists():
            time.sleep(READ_S)
        return read(*args)

    def obeying(*args, **named):
        mine(f"{me}.rank").write_text(str(args[-1].rank))
        obey("eat")
        obey("busy")
        return agree(*args, **named)

    def slowly(*args, **named):
        """The micro-batches of a step: as a larger model, each takes its part of the pause."""
        parts = list(of_step(*args, **named))
        for part in parts:
            with contextlib.suppress(OSError, ValueError):
                time.sleep(float(ordered("pause").read_text()) / len(parts))
            yield part

    mine(f"{me}.pid").write_text(str(os.getpid()))
    life.agree, train.of_step, blocks.Source.documents = obeying, slowly, reading
    for place in PLACES:
        stop_at(*place)
    return train.main()


if __name__ == "__main__":
    run(main)
