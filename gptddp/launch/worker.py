"""The one worker of a launcher, as the launcher sees it: it may hang, crash, or be killed."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

from gptddp.launch.hung import Listener

# A process that dies of one of these has crashed by itself. Not SIGKILL and SIGTERM, which come
# from outside, nor SIGABRT, which may be NCCL's answer to the loss of a peer.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
KILLS = (-signal.SIGKILL, -signal.SIGTERM)  # the exit codes of one that has done nothing wrong
NO_CODE = 255  # multiprocessing: the forkserver is gone, and nobody knows how its children ended


class Worker:
    """The worker, whichever process it is at the time.

    One that hangs though nobody misses it is killed, by its pulse (`hung.py`); a peer that misses
    one is the mesh's business, and the worker's own.
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
        self._listener = Listener(folder, local_rank)
        self._pid = 0

    @property
    def pid(self) -> int:
        """Its process id as long as it lives, else 0."""
        return self._pid if self._pid and Path(f"/proc/{self._pid}").exists() else 0

    def look(self) -> None:
        """To be called in the main thread again and again. Raises what `crashed` raises."""
        self._pid = next((it.pid or 0 for it in multiprocessing.active_children()), 0)
        if not self._pid or (it := self._listener.hanging(self._pid)) is None:
            return
        where = self._listener.where(it.pid)
        self._say(f"no progress for {it.seconds:.0f} s: {self._name()} {where}: it is killed")
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            os.kill(it.pid, signal.SIGKILL)
        if it.step and "SIGSTOP" not in where:  # a volume may hang at the start
            self._crashed(f"it {where}", it.step)

    def ended(self, code: int) -> str:
        """How it has ended, by its exit code. Raises what `crashed` raises."""
        if code == NO_CODE:
            return "it died with the server that it was forked from"
        if code > 0:
            return f"its process ended with exit code {code}"
        try:
            number = signal.Signals(-code)
        except ValueError:  # one without a name
            return f"its process died of signal {-code}"
        how = f"its process died of {number.name}"
        if number in CRASHES:
            self._crashed(how, 0)
        return how
