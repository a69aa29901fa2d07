"""Find a worker that hangs though no peer waits for it, by its pulse, and where it is."""

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

from gptddp.distributed import pulse

STACK_S = 0.2  # for a worker to write its stack
LATER_S = 20.0  # than the worker's own thread, which knows more of it
_NO_BEAT = -1  # the beats of a worker that has no pulse
# As long as it has not asked for SIGUSR1, that signal ends it.
_NOT_BEGUN = "hangs before its trainer has begun"
_WITHOUT_STACK = "does not end ({})"


class Hanging(NamedTuple):
    """A worker that has not come further for so long."""

    pid: int
    seconds: float
    step: int  # 0 before its life has begun


class Listener:
    """The launcher's end of its worker's pulse; `folder` has the file, beside the verdict."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        self.folder, self.local_rank = folder, local_rank
        self._silence = {True: pulse.Silence(), False: pulse.Silence()}  # by: has it no pulse?

    def hanging(self, pid: int) -> Hanging | None:
        """The worker, if it hangs.

        To be called again and again, see `pulse.Silence.listen`. A worker without a pulse of its
        own has not come so far yet: it may take as long as one on the way to its first step.
        """
        from gptddp.distributed import connect  # with torch, for which the launcher does not wait

        it = pulse.read(pulse.path_of(self.folder, self.local_rank))
        if it is None or it.pid != pid:
            it = pulse.Pulse(pid, _NO_BEAT, connect.FIRST_TIMEOUT_S + pulse.MARGIN_S, 0)
        has_none = it.beats == _NO_BEAT
        seconds = self._silence[has_none].listen(pid, it.beats)
        if seconds <= it.limit_s + LATER_S:
            return None
        self._silence[has_none] = pulse.Silence()  # it is told once, and again if it lives on
        return Hanging(pid, seconds, it.step)

    def where(self, pid: int) -> str:
        """Where this worker is, by the stack that it writes on SIGUSR1: `hangs in f (a.py:7)`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_S)
        try:  # see `distributed/process.py`
            whose, *lines = (self.folder / f"stack.{self.local_rank}").read_text().splitlines()
            if whose != f"process {pid}":  # of one before it
                return _NOT_BEGUN
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return _NOT_BEGUN
        except (OSError, ValueError) as error:
            return _WITHOUT_STACK.format(error)
        # '  File "/a/b.py", line 7 in f', the innermost first
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', "\n".join(lines))
        calls = [f"{function} ({file}:{line})" for file, line, function in frames[:4]]
        return "is stopped (SIGSTOP)" if state == "T" else pulse.hangs_in(calls)
