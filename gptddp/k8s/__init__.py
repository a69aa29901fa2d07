"""The control plane: from a job specification to Kubernetes objects, or to local processes."""

import contextlib
import gc
import os
import sys
from typing import NoReturn


def main() -> None:
    """Run the `gptddp-k8s` command, or say what to install when its packages are absent."""
    gc.disable()  # imports make no garbage, and looking for it is a tenth of a short command
    try:
        from gptddp.k8s.cli.main import cli
    except ModuleNotFoundError as error:
        sys.exit(f"gptddp-k8s needs the package {error.name}: pip install 'gptddp[k8s]'")
    except KeyboardInterrupt:  # before the command could have begun
        sys.exit(130)  # exit_codes.INTERRUPTED, without one more import that can be interrupted
    try:
        cli()
    except SystemExit as end:
        _leave(end.code)


def _leave(code: int | str | None) -> NoReturn:
    """End at once: what Python does at its end is a sixth of a short command."""
    if isinstance(code, str):
        sys.exit(code)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or told already
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code or 0)
