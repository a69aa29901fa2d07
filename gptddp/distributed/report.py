"""How a rank says a final error."""

import contextlib
import sys

from gptddp import errors
from gptddp.distributed.environment import ranks, verdict
from gptddp.files import write_json_atomic


def report(error: errors.GptddpError) -> None:
    """Say a final error once: on rank 0, or on the rank that met it alone.

    Our launcher gives its workers a file for the verdict, because torchrun would hide the exit code
    and the reason. It says what it finds there, as the last line of the pod's log.
    """
    rank = ranks().rank
    if path := verdict():
        final = {"code": error.exit_code, "rank": rank, "message": str(error)}
        with contextlib.suppress(OSError):  # a full disk: then it has to be said here
            write_json_atomic(path, final)
            return
    if rank == 0 or not error.shared:
        where = f"[rank {rank}] " if rank else ""
        print(f"{where}gptddp train: {error}", file=sys.stderr, flush=True)
