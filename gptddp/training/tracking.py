"""Rank 0's tracker: a separate process feeds it from the log, apart from the loop."""

import logging
import os
import subprocess
import sys
import time

_END_S = 30.0  # a finished run waits this long at most until the last steps are sent

log = logging.getLogger(__name__)


class Tracking:
    """Rank 0 only: the process that feeds the tracker. It ends when this process ends."""

    _process: subprocess.Popen[bytes] | None = None
    _until = 0.0  # monotonic
    _run_dir = _to = ""

    def begin(self, run_dir: str, to: str) -> None:
        """Start the process; if that fails, training continues without a tracker."""
        self._run_dir, self._to = run_dir, to
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
            log.warning("the process that feeds %s cannot start: %s", to, error)

    def end(self) -> None:
        """No step follows: let the process send the remaining steps and end."""
        if self._process is None or self._until:
            return
        if self._process.poll() is not None:  # it was killed: another one sends the rest
            if self._process.stdin:
                self._process.stdin.close()
            self.begin(self._run_dir, self._to)
        if self._process.stdin:
            self._process.stdin.close()
        self._until = time.monotonic() + _END_S

    @property
    def busy(self) -> bool:
        """Is the process still sending, within the time limit? Past it, a warning."""
        if self._process is None or self._process.poll() is not None or not self._until:
            return False
        if time.monotonic() < self._until:
            return True
        again = f"gptddp track {self._run_dir} --to {self._to}"
        log.warning("%s does not answer; `%s` sends the missing steps", self._to, again)
        self._process = None
        return False
