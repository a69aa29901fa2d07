"""What a rank says, and how: its phases, its lines, a final error."""

import contextlib
import logging
import os
import signal
import sys

from gptddp import errors, live
from gptddp.distributed.environment import is_launched, ranks, verdict
from gptddp.files import write_json_atomic


def shown() -> contextlib.AbstractContextManager[live.Screen]:
    """Within it a trainer has a screen: one process draws on it, of several rank 0 has plain lines.

    A worker of our launcher is rank 0 until it knows the others.
    """
    return live.shown(draws=not is_launched(), speaks=lambda: ranks().rank == 0)


def load_torch(launcher: bool = False) -> None:
    """Import torch, and say so. Ctrl-C ends the process: NumPy may swallow it. launcher: torchrun's
    modules too.
    """
    with shown():
        live.phase("loading torch")
        if (old := signal.getsignal(signal.SIGINT)) is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda *_: (live.wipe(), os._exit(130)))  # type: ignore[func-returns-value]
        import torch  # noqa: F401

        if launcher:
            import torch.distributed.run  # noqa: F401
        signal.signal(signal.SIGINT, old)


class VisibleFormatter(logging.Formatter):
    """Lines of the log, in which what files and peers say has no control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return errors.visible_lines(super().format(record))


def report(error: errors.GptddpError) -> None:
    """Say a final error once: on rank 0, or on the rank that met it alone.

    Our launcher gives its workers a file for the verdict, because torchrun would hide the exit code
    and the reason. It says what it finds there, as the last line of the pod's log.
    """
    rank = ranks().rank
    if path := verdict():
        final = {"code": error.exit_code, "rank": rank, "message": str(error)}
        final["shared"] = error.shared
        with contextlib.suppress(OSError):  # a full disk: then it has to be said here
            write_json_atomic(path, final)
            return
    if rank == 0 or not error.shared:
        where = f"[rank {rank}] " if rank else ""
        say(f"{where}gptddp train", error)


def say(who: str, message: object) -> None:
    """Print a line of the pod's log: its sender, and no character that moves a cursor."""
    print(f"{who}: {errors.visible_lines(message)}", file=sys.stderr, flush=True)
