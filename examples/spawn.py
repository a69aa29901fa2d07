"""Start the processes of a script from Python, as `mp.spawn` does: a small torchrun.

    python examples/spawn.py 2 examples/digits.py --epochs 3

It works on one machine, and shows the job of a launcher. torchrun adds several nodes and restarts.
"""

import os
import runpy
import sys
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def start(local_rank: int, world_size: int, port: int, command: list[str]) -> None:
    """In each process: set the five variables of env://, then run the script."""
    os.environ |= {
        "RANK": str(local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent process has the store, not rank 0
    }
    sys.argv = command
    sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    if len(sys.argv) < 3 or not sys.argv[1].isdigit() or int(sys.argv[1]) < 1:
        raise SystemExit("usage: python examples/spawn.py PROCESSES SCRIPT [ARGUMENTS]")
    world_size, command = int(sys.argv[1]), sys.argv[2:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # like torchrun: otherwise each takes all cores
    # Port 0: the system gives a free port, which stays ours until the end. A fixed port, or a free
    # one that was found and released, could belong to another job.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5)
    )
    try:  # a process that fails ends the others, and this one with an error
        mp.spawn(start, (world_size, store.port, command), nprocs=world_size)
    except mp.ProcessExitedException as error:  # the process has printed the reason
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)  # Ctrl-C has reached the processes, too


if __name__ == "__main__":
    main()
