"""The frame of a worker process around the trainer: its exit, and its tie to the launcher.

torchrun runs `launch/worker_script.py` in a process forked from the launcher's forkserver
(`launch/forkserver.py`). This module handles four problems of that combination:

- A worker that ends by `sys.exit(None)` or `os._exit(0)` never reports success, and its agent
  waits for ever: success must return from the script.
- A worker spends seconds in the interpreter's shutdown (threads, the process group's destructor)
  while its peers wait, or never leaves it (see `connect`): it ends at once.
- A worker that hangs cannot report the place. On SIGUSR1 it writes its stack into a file for the
  launcher, in any state of its main thread.
- The forkserver and its workers outlive a killed launcher, and train on unnoticed: the worker asks
  the kernel to end it then.
"""

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gptddp.distributed import torch_private
from gptddp.distributed.environment import LOCAL
from gptddp.distributed.watchdog import STOPS

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
FAILED = 1  # not an error of the user: torchrun starts the workers again


def run(main: Callable[[], int | None]) -> None:
    """Call `main`, and end the process with its code at once.

    An exception is printed with its traceback, and gives code 1. If multiprocessing waits for the
    script to return, this function returns for 0 and None.
    """
    die_with_launcher()
    if local := os.environ.get(LOCAL):  # torchrun knows only one worker
        os.environ["LOCAL_RANK"], _, os.environ["LOCAL_WORLD_SIZE"] = local.partition("/")
    write_stack_on_signal()
    try:
        code: Any = main()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        rank = os.environ.get("RANK", "0")
        print(f"[rank {rank}] {traceback.format_exc()}", file=sys.stderr, end="")
        code = FAILED
    if code and not isinstance(code, int):  # as in sys.exit("message")
        print(code, file=sys.stderr)
        code = FAILED
    if code or multiprocessing.parent_process() is None:
        exit_now(code or 0)
    for number in STOPS:  # since its end the trainer only notes them: see `Watchdog.close`
        signal.signal(number, lambda number, frame: exit_now(128 + number))


def exit_now(code: int) -> NoReturn:
    """End the process without any cleanup."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed: the code stays
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def stat(task: int | str) -> list[str]:
    """Fields of /proc/TASK/stat from the state on; empty without such a process or thread."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    return []


def how_ended(code: int) -> str:
    """How a process ended, by its exit code: -n if it died of signal n."""
    if code >= 0:
        return f"its process ended with exit code {code}" if code else "its process ended"
    named = -code in {*signal.Signals}
    return f"its process died of {signal.Signals(-code).name if named else f'signal {-code}'}"


def die_with_launcher() -> None:
    """Let the kernel kill this process as soon as the launcher has ended, for any reason.

    The forkserver ends when no process holds its `alive` pipe any more: neither the launcher nor a
    worker with an inherited end. So this process closes its end, and asks for SIGKILL at the
    server's death. A watching thread would need the GIL, which a hung worker may never release.
    Does nothing without a launcher.
    """
    launcher = multiprocessing.parent_process()
    if launcher is None or sys.platform != "linux":
        return
    if (alive_fd := torch_private.take_forkserver_alive_fd()) is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(alive_fd)
    if not launcher.is_alive():  # the launcher died before the lines above
        exit_now(FAILED)


def write_stack_on_signal() -> None:
    """Let SIGUSR1 write the main thread's stack to `stack.<local rank>` beside the verdict.

    faulthandler writes from the signal handler itself, so also while the GIL is held.
    """
    if verdict := os.environ.get("GPTDDP_VERDICT"):
        with contextlib.suppress(OSError):  # a full disk: the place of a hang stays unknown
            file = Path(verdict).with_name(f"stack.{os.environ.get('LOCAL_RANK', '0')}").open("w")
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
            print(f"process {os.getpid()}", file=file, flush=True)
