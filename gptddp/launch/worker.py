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

# A process that dies of one of these has crashed by itself. Not SIGKILL and SIGTERM, which come
# from outside, nor SIGABRT, which may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
KILLS = (-signal.SIGKILL, -signal.SIGTERM)  # the exit codes of one that has done nothing wrong
NO_CODE = 255  # multiprocessing: the forkserver is gone, and nobody knows how its children ended
STACK_S = 0.2  # for a worker to write its stack
LATER_S = 20.0  # than the worker's own thread, which knows more of it
# As long as it has not asked for SIGUSR1, that signal ends it.
_NOT_BEGUN = "hangs before its trainer has begun"
_WITHOUT_STACK = "does not end ({})"


class Worker:
    """The worker, whichever process it is at the time.

    One that hangs though nobody misses it is killed, by its pulse; a peer that misses one is the
    mesh's business, and the worker's own.
    """

    def __init__(
        self,
        folder: Path,
        local_rank: int,
        name: Callable[[], str],
        say: Callable[[str], None],
        crashed: Callable[[str, int], None],
    ) -> None:
        """`folder`: where the worker leaves its verdict; `name`: what a message calls it now.

        `crashed` is told how the worker has crashed or hangs, and its step where that is known,
        else 0.
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
        """To be called in the main thread again and again. Raises what `crashed` raises.

        How it has hung, if it was killed now: it may live on in the kernel, by a disk that hangs.

        A worker without a pulse of its own has not come so far yet: it may take as long as one on
        the way to its first step.
        """
        from gptddp.distributed import connect  # with torch, for which the launcher does not wait

        self._pid = next((it.pid or 0 for it in multiprocessing.active_children()), 0)
        it = pulse.read(pulse.path_of(self._folder, self._local_rank))
        if it is None or it.pid != self._pid:
            it = pulse.Pulse(self._pid, -1, connect.FIRST_TIMEOUT_S + pulse.MARGIN_S, 0)
        seconds = self._silence.listen(it.pid, it.beats)
        if not it.pid or seconds <= it.limit_s + LATER_S:
            return ""
        self._silence = pulse.Silence()  # it is told once, and again if it lives on
        where = self._where(it.pid)
        self._say(f"no progress for {seconds:.0f} s: {self._name()} {where}: it is killed")
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(it.pid, signal.SIGKILL)
        if it.step and "SIGSTOP" not in where:  # a volume may hang at the start
            self._crashed(f"it {where}", it.step)
        return f"it {where}"

    def _where(self, pid: int) -> str:
        """Where it is, by the stack that it writes on SIGUSR1: `hangs in f (a.py:7)`."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        time.sleep(STACK_S)
        try:  # see `distributed/process.py`
            whose, *lines = (self._folder / f"stack.{self._local_rank}").read_text().splitlines()
            if whose != f"process {pid}":  # of one before it
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
        """How it has ended, by its exit code. Raises what `crashed` raises."""
        if code == NO_CODE:
            return "it died with the server that it was forked from"
        how = how_ended(code)
        if -code in CRASHES:
            self._crashed(how, 0)
        return how
