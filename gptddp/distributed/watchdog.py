"""A thread that handles a signal while the main thread cannot, and ends the process in time.

Python runs a signal's handler in the main thread, after that thread returns from C. In a collective
with a silent peer, a call to a store or a read from a hanging volume it may not return within the
grace period, and the process would be killed with all unsaved state. But C code writes the signal's
number to a pipe at once (`signal.set_wakeup_fd`), and a thread reads it.
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from types import FrameType

from gptddp import live

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.05


class Watchdog:
    """Notes the first signal to stop, and exits with 128 + its number when `must_exit` says so.

    Make it in the main thread. After the first signal the watching thread calls `on_signal` once,
    and `must_exit(seconds since)` again and again.
    A signal in `hurried` exits at once when it comes a second time.
    """

    def __init__(
        self,
        must_exit: Callable[[float], bool],
        on_signal: Callable[[], None] = lambda: None,
        hurried: Collection[int] = (),
    ) -> None:
        self.number = 0  # of the first signal
        self.must_exit, self.on_signal, self.hurried = must_exit, on_signal, hurried
        self._since = math.inf
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._note)
        threading.Thread(target=self._watch, args=(reader,), name="watchdog", daemon=True).start()

    @property
    def waited_s(self) -> float:
        """Seconds since the first signal; 0 before it."""
        return max(0.0, time.monotonic() - self._since)

    def close(self) -> None:
        """From now on a signal is only noted."""
        signal.set_wakeup_fd(-1)
        os.close(self._writer)

    def _note(self, number: int, frame: FrameType | None = None) -> None:
        self.number = self.number or number

    def _watch(self, reader: int) -> None:
        while True:
            signalled = self._since < math.inf
            ready, _, _ = select.select([reader], [], [], POLL_S if signalled else None)
            numbers = os.read(reader, 64) if ready else b""
            if ready and not numbers:  # closed
                return os.close(reader)
            for number in filter(STOPS.__contains__, numbers):
                if self._since == math.inf:
                    self._since = time.monotonic()
                    self._note(number)
                    with contextlib.suppress(Exception):
                        self.on_signal()
                elif number == self.number and number in self.hurried:
                    self._exit(0.0)
            if self._since < math.inf and self.must_exit(self.waited_s):
                self._exit(self.waited_s)

    def _exit(self, waited_s: float) -> None:
        name = signal.Signals(self.number).name
        live.wipe()
        text = f"gptddp: exits {waited_s:.1f} s after {name}: the main thread is busy\n"
        with contextlib.suppress(OSError):  # a full pipe must not block the exit
            if waited_s >= 1.0 and select.select([], [2], [], 0)[1]:
                os.write(2, text.encode())
        os._exit(128 + self.number)
