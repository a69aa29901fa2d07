"""Rank 0's tracker: a process of its own feeds it from the log; the loop knows nothing of it."""

import logging
import os
import subprocess
import sys
import time

_END_S = 30.0  # that a finished run waits for the last steps to be sent

log = logging.getLogger(__name__)


class Tracking:
    """Rank 0 only: that process. It ends by itself when this one does, however that is."""

    _process: subprocess.Popen[bytes] | None = None
    _until = 0.0  # monotonic

    def begin(self, run_dir: str, to: str) -> None:
        """Start it; where that cannot be, training goes on without."""
        code, low = "from gptddp.cli import cli; cli()", ["nice", "-n", "19"]  # training goes first
        try:
            self._process = subprocess.Popen(
                [*low, sys.executable, "-P", "-c", code, "track", run_dir, "--to", to, "--follow"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C of a terminal ends it
            )
        except OSError as error:
            log.warning("nothing feeds %s: %s", to, error)

    def end(self) -> None:
        """Nothing follows: it sends what is left."""
        if self._process and self._process.stdin:
            self._process.stdin.close()
            self._until = time.monotonic() + _END_S

    @property
    def busy(self) -> bool:
        """Does it still send what is left, and is there time for that?"""
        going = self._process is not None and self._process.poll() is None
        return going and time.monotonic() < self._until
