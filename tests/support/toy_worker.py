"""A trainer's skeleton for the launcher's tests: a member of the mesh that computes nothing.

Rank 0 appends a line a step to `steps.jsonl` of the run directory. A file `<pod>.<order>` there is
an order to that pod's worker, carried out once; a file `end` makes the present step the last.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from support import ledgers

from gptddp.distributed.environment import ranks, restarts
from gptddp.distributed.process import run
from gptddp.distributed.report import report
from gptddp.errors import DataError, Stopped
from gptddp.files import write_atomic
from gptddp.flags import from_args

STEP_S = 0.05


class Member:
    """This worker in the mesh; `world` has the members of the newest view with it, by rank."""

    def __init__(self) -> None:
        link = socket.socket(socket.AF_UNIX)
        link.connect(os.environ["GPTDDP_MEMBERS"])
        self._lines, self._out = link.makefile("r"), link.makefile("w")
        self.world: list[str] = []
        self._attach()
        threading.Thread(target=self._read, daemon=True).start()

    def _attach(self) -> None:
        self.me, self.world = uuid.uuid4().hex, []
        self.say(attach={"id": self.me, "pod": os.environ.get("POD_NAME", "")})
        self.say(status="fresh")

    def say(self, **what: Any) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps(what), file=self._out, flush=True)

    def _read(self) -> None:
        for line in self._lines:
            news = json.loads(line)
            if news.get("going") and not self.world:
                self.say(status="warm")
            if "out" in news:
                self._attach()
            if "view" in news:
                self.world = [it["id"] for it in news["view"]["members"]]
                self.say(status="going")


def ordered(order: str, run_dir: Path) -> bool:
    """Is there this order for this pod? Removes it."""
    path = run_dir / f"{os.environ.get('POD_NAME')}.{order}"
    found = path.exists()
    path.unlink(missing_ok=True)
    return found


def last_step(log: Path) -> int:
    lines = log.read_text().splitlines() if log.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def main() -> int:
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
    config, member = from_args(sys.argv[1:]), Member()
    run_dir = Path(config.run_dir)
    own = f"{os.environ.get('POD_NAME')}{f'-{i}' if (i := ranks().local_rank) else ''}"
    write_atomic(run_dir / f"{own}.pid", str(os.getpid()).encode())
    write_atomic(run_dir / f"{own}.start", f"{restarts()} {time.time()}".encode())
    try:
        train(member, run_dir, stop)
    except Stopped as error:
        member.say(leave="it was told to stop")
        return error.exit_code
    except DataError as error:
        report(error)
        return error.exit_code
    member.say(leave="the run is finished")
    return 0


def train(member: Member, run_dir: Path, stop: list[int]) -> None:
    log = run_dir / "steps.jsonl"
    while not (run_dir / "end").exists():
        time.sleep(STEP_S)
        if ordered("raise", run_dir):
            raise RuntimeError("the toy was told to raise")
        if ordered("crash", run_dir):
            os.kill(os.getpid(), signal.SIGSEGV)
        if ordered("final", run_dir):
            raise DataError("the toy was told that its data is bad")
        if stop:
            if ordered("spoil", run_dir):
                raise DataError("the toy found bad data at its end")
            raise Stopped("the toy was told to stop")
        if (world := member.world) and world[0] == member.me:
            line = {"step": 1 + last_step(log), "world_size": len(world), "pid": os.getpid()}
            with open(log, "a") as file:
                file.write(json.dumps(line | {"time": time.time()}) + "\n")
    if member.world and member.world[0] == member.me:
        ledgers.begun(run_dir, {"steps": 1}, {"event": "stop", "step": 1, "cause": "steps"})
    if ordered("vanish", run_dir):
        launcher = multiprocessing.parent_process()
        assert launcher and launcher.pid
        os.kill(launcher.pid, signal.SIGKILL)
        time.sleep(60)


if __name__ == "__main__":
    run(main)
