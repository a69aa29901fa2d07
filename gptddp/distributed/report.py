"""The output of a rank: its phases, its lines, a final error."""

import contextlib
import logging
import os
import signal
import sys

from gptddp import errors, live
from gptddp.distributed.environment import is_launched, ranks, verdict
from gptddp.files import write_json_atomic


def shown() -> contextlib.AbstractContextManager[live.Screen]:
    """A context with a screen: a single process draws on it, rank 0 of several prints lines.

    A worker of gptddp's launcher is rank 0 until it knows the others.
    """
    return live.shown(draws=not is_launched(), speaks=lambda: ranks().rank == 0)


def load_torch(launcher: bool = False) -> None:
    """Import torch, and show that. Ctrl-C ends the process: NumPy may swallow it. `launcher`:
    import torchrun's modules too.
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
    """Lines of the log, without control characters in the texts of files and peers."""

    def format(self, record: logging.LogRecord) -> str:
        return errors.visible_lines(super().format(record))


def report(error: errors.GptddpError) -> None:
    """Report a final error once: on rank 0, or on the only rank that met it.

    The launcher gives its workers a file for the verdict, because torchrun would hide exit code and
    reason. The launcher prints the verdict as the last line of the pod's log.
    """
    rank = ranks().rank
    if path := verdict():
        final = {"code": error.exit_code, "rank": rank, "message": str(error)}
        final["shared"] = error.shared
        with contextlib.suppress(OSError):  # a full disk: then the error is printed here
            write_json_atomic(path, final)
            return
    if rank == 0 or not error.shared:
        where = f"[rank {rank}] " if rank else ""
        say(f"{where}gptddp train", error)


def say(who: str, message: object) -> None:
    """Print a line of the pod's log, with its sender and without control characters."""
    print(f"{who}: {errors.visible_lines(message)}", file=sys.stderr, flush=True)
