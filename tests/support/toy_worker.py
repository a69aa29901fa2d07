"""A trainer's skeleton for the launcher's tests: steps of one all-reduce, counted in a file.

Rank 0 appends a line a step to `steps.jsonl` of the run directory. A file `<pod>.<order>` there is
an order to that pod's worker, carried out once; a file `end` makes the present step the last.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as td
from support import ledgers

from gptddp.distributed.process import run
from gptddp.distributed.report import report
from gptddp.errors import DataError, Stopped
from gptddp.files import write_atomic
from gptddp.flags import from_args

STEP_S = 0.05


def ordered(order: str, run_dir: Path) -> bool:
    """Is there this order for this pod? Takes it away."""
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
    config = from_args(sys.argv[1:])
    try:
        train(Path(config.run_dir), config.steps or 1, stop)
    except Stopped as error:
        return error.exit_code
    except DataError as error:
        report(error)
        return error.exit_code
    return 0


def train(run_dir: Path, steps: int, stop: list[int]) -> None:
    log = run_dir / "steps.jsonl"
    write_atomic(run_dir / f"{os.environ.get('POD_NAME')}.pid", str(os.getpid()).encode())
    td.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world_size = td.get_rank(), td.get_world_size()
    step = torch.tensor([last_step(log)])
    td.broadcast(step, 0)  # all ranks
    while step < steps:
        if ordered("raise", run_dir):
            raise RuntimeError("the toy was told to raise")
        if ordered("hang", run_dir):  # as in a collective that never returns
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            time.sleep(600)
        if ordered("final", run_dir):
            raise DataError("the toy was told that its data is bad")
        flags = torch.tensor([len(stop), (run_dir / "end").exists(), 1])
        td.all_reduce(flags)  # all ranks
        assert flags[2] == world_size
        if flags[0]:
            if ordered("spoil", run_dir):
                raise DataError("the toy found bad data at its end")
            raise Stopped("the toy was told to stop")
        time.sleep(STEP_S)
        step += 1
        if rank == 0:
            line = {"step": int(step), "world_size": world_size, "pid": os.getpid()}
            with open(log, "a") as file:
                file.write(json.dumps(line | {"time": time.time()}) + "\n")
        if flags[1]:
            break
    if rank == 0:
        stop = {"event": "stop", "step": steps, "cause": "steps"}
        ledgers.begun(run_dir, {"steps": steps}, stop)
    td.barrier()  # all ranks
    td.destroy_process_group()
    if ordered("vanish", run_dir):
        launcher = multiprocessing.parent_process()
        assert launcher and launcher.pid
        os.kill(launcher.pid, signal.SIGKILL)
        time.sleep(60)


if __name__ == "__main__":
    run(main)
