"""The one worker of a launcher, as the launcher sees it: it may hang, crash, or be killed."""

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

from gptddp.distributed import pulse
from gptddp.distributed.process import how_ended, stat

# A process that dies of one of these signals has crashed by itself. SIGKILL and SIGTERM come from
# outside, and SIGABRT may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
KILLS = (-signal.SIGKILL, -signal.SIGTERM)  # exit codes of a worker that has made no error
NO_CODE = 255  # multiprocessing: the forkserver has died, so the ends of its children are unknown
STACK_S = 0.2  # for a worker to write its stack
LATER_S = 20.0  # than the worker's own thread, which can say more about the hang
# Before the worker has a handler for SIGUSR1, that signal ends it.
_NOT_BEGUN = "hangs before its trainer has begun"
_WITHOUT_STACK = "does not end ({})"


class Worker:
    """The present worker process.

    It is killed if its pulse shows a hang that no peer notices. The mesh and the worker itself
    handle a hang that a peer notices.
    """

    def __init__(
        self,
        folder: Path,
        local_rank: int,
        name: Callable[[], str],
        say: Callable[[str], None],
        crashed: Callable[[str, int], None],
    ) -> None:
        """`folder`: for the worker's verdict; `name`: its present name in messages.

        `crashed` takes how the worker has crashed or hangs, and its step, 0 if unknown.
        """
        self._name, self._say, self._crashed = name, say, crashed
        self._folder, self._local_rank = folder, local_rank
        self._silence = pulse.Silence()
        self._pid = 0

    @property
    def pid(self) -> int:
        """Its process id as long as it lives, else 0."""
        return self._pid if self._pid and Path(f"/proc/{self._pid}").exists() else 0

    def look(self) -> str:
        """Call it in the main thread again and again. Raises the errors of `crashed`.

        Returns how the worker hung if it was killed now; on a hanging disk it may survive the kill.

        A worker without a pulse is still starting: its limit is that of the first step.
        """
        from gptddp.distributed import connect  # with torch, for which the launcher does not wait

        self._pid = next((it.pid or 0 for it in multiprocessing.active_children()), 0)
        it = pulse.read(pulse.path_of(self._folder, self._local_rank))
        if it is None or it.pid != self._pid:
            it = pulse.Pulse(self._pid, -1, connect.FIRST_TIMEOUT_S + pulse.MARGIN_S, 0)
        seconds = self._silence.listen(it.pid, it.beats)
        if not it.pid or seconds <= it.limit_s + LATER_S:
            return ""
        self._silence = pulse.Silence()  # one message, and another if the worker survives
        where = self._where(it.pid)
        self._say(f"no progress for {seconds:.0f} s: {self._name()} {where}: it is killed")
        with contextlib.suppress(ProcessLookupError):  # the worker has ended by itself
            os.kill(it.pid, signal.SIGKILL)
        if it.step and "SIGSTOP" not in where:  # a volume may hang at the start
            self._crashed(f"it {where}", it.step)
        return f"it {where}"

    def _where(self, pid: int) -> str:
        """Where the worker is, by the stack that it writes on SIGUSR1: `hangs in f (a.py:7)`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_S)
        try:  # see `distributed/process.py`
            whose, *lines = (self._folder / f"stack.{self._local_rank}").read_text().splitlines()
            if whose != f"process {pid}":  # of an earlier worker
                return _NOT_BEGUN
        except FileNotFoundError:
            return _NOT_BEGUN
        except (OSError, ValueError) as error:
            return _WITHOUT_STACK.format(error)
        # '  File "/a/b.py", line 7 in f', the innermost first
        frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', "\n".join(lines))
        calls = [f"{function} ({file}:{line})" for file, line, function in frames[:4]]
        return "is stopped (SIGSTOP)" if stat(pid)[:1] == ["T"] else pulse.hangs_in(calls)

    def ended(self, code: int) -> str:
        """How the worker ended, by its exit code. Raises the errors of `crashed`."""
        if code == NO_CODE:
            return "it died with the server that it was forked from"
        how = how_ended(code)
        if -code in CRASHES:
            self._crashed(how, 0)
        return how
