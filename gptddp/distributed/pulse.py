"""The pulse of a trainer, which shows hangs that no collective notices.

If a rank is alone, or all ranks hang outside of a collective, no peer waits for them. So a rank
beats at each progress, and sets the limit until its next beat. There are two listeners:

- a thread of the process (`Listening`), which can still report where it hangs;
- the launcher (`launch/worker.py`), from outside, for causes that stop every thread: a call with
  the GIL held, or SIGSTOP.

Only the listener's own running time counts. So a machine that is suspended or stopped as a whole is
no hang, and no clock is compared with another.
"""

import contextlib
import math
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gptddp.distributed import storage
from gptddp.distributed.environment import is_launched, ranks, verdict

# Longer than the limit of a collective: peers know more of a silent peer, and name it first.
MARGIN_S = 60.0
POLL_S = 0.5
LAST_WORDS_S = 10.0  # to count the hang, which a hanging volume may prevent
HUNG = 1  # exit code: torchrun starts the ranks again

_LAYOUT = struct.Struct("4d")
_PID, _BEATS, _LIMIT_S, _STEP = range(4)


class Pulse(NamedTuple):
    """The state that a process shares."""

    pid: int
    beats: int
    limit_s: float  # until the next beat
    step: int  # the present step; 0 before its life has begun


# The cells of this process; shared with its launcher as soon as the disk has room.
_cells: "memoryview[float]" = memoryview(bytearray(_LAYOUT.size)).cast("d")


def beat(step: int | None = None) -> None:
    """Note progress of this process; `step`: the present step. Takes 0.1 us."""
    if step is not None:
        _cells[_STEP] = step
    _cells[_BEATS] += 1


def allow(collective_s: float) -> None:
    """Set the limit between beats: a collective's wait for a silent peer, and a margin."""
    _cells[_LIMIT_S] = collective_s + MARGIN_S
    beat()


def step() -> int:
    """The present step of this process."""
    return int(_cells[_STEP])


def path_of(folder: Path, local_rank: int) -> Path:
    """The file of a worker's pulse, beside the file for its final error (`environment.verdict`)."""
    return folder / f"pulse.{local_rank}"


def read(path: Path) -> Pulse | None:
    """The pulse of another process; None if it has no pulse yet."""
    try:
        pid, beats, limit_s, step = _LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Pulse(int(pid), int(beats), limit_s, int(step))


class Silence:
    """Seconds since the last beat of a pulse, counted while the caller was running."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._heard, self._last = (0, -1), time.monotonic()

    def listen(self, pid: int, beats: int) -> float:
        """Call it every POLL_S or more often; a longer pause counts as twice POLL_S."""
        now = time.monotonic()
        same = self._heard == (pid, beats)
        self.seconds = self.seconds + min(now - self._last, 2 * POLL_S) if same else 0.0
        self._heard, self._last = (pid, beats), now
        return self.seconds


class Listening:
    """A thread that ends this process if it hangs, while the context lasts.

    `last_words(where)` is called in another thread first, and returns the exit code. A process at a
    terminal, without a launcher to start it again, is not ended: it may be at a breakpoint.
    """

    def __init__(
        self,
        last_words: Callable[[str], int],
        silent: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`silent` is called every POLL_S, with the seconds without progress."""
        self.last_words, self.silent = last_words, silent
        self._over = threading.Event()
        self._is_shared = False
        self._only_says = not is_launched() and _at_terminal()

    def __enter__(self) -> "Listening":
        _cells[_PID], _cells[_LIMIT_S] = os.getpid(), math.inf  # until `allow`
        self._is_shared = _share(verdict())
        threading.Thread(target=self._listen, name="pulse", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        beat(0)  # from here on only the launcher listens: the exit of a process may hang too

    def _listen(self) -> None:
        silence, patience, said = Silence(), storage.Patience(), False
        while not self._over.wait(POLL_S):
            self._is_shared = self._is_shared or _share(verdict())  # the disk was full
            if patience.lasts():
                beat()
            seconds = silence.listen(0, int(_cells[_BEATS]))
            with contextlib.suppress(Exception):  # after any error the listening continues
                self.silent(seconds)
            if seconds <= _cells[_LIMIT_S]:
                said = False
            elif not said:
                said = self._only_says
                self._give_up(seconds)

    def _give_up(self, seconds: float) -> None:
        """Report where the process hangs, and end it; both may hang too."""
        code = [HUNG]

        def words() -> None:
            where = main_stack()
            end = "it continues if it can" if self._only_says else "it is ended"
            text = f"[rank {ranks().rank}] no progress for {seconds:.0f} s: {where}: {end}"
            print(text, file=sys.stderr, flush=True)
            if not self._only_says:
                code[0] = self.last_words(where)

        thread = threading.Thread(target=words, name="last words", daemon=True)
        thread.start()
        thread.join(LAST_WORDS_S)
        if not self._only_says and not self._over.is_set():
            os._exit(code[0])


def _at_terminal() -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(0)
    return False


def _share(verdict: Path | None) -> bool:
    """Put the cells into memory shared with the launcher; False if a full disk prevents it."""
    global _cells
    if verdict is None:
        return True
    try:
        file = path_of(verdict.parent, ranks().local_rank)
        file.unlink(missing_ok=True)  # another process may still have the last one mapped
        file.write_bytes(_cells)
        with file.open("r+b") as opened:
            _cells = memoryview(mmap.mmap(opened.fileno(), _LAYOUT.size)).cast("d")
    except OSError:  # then only the thread listens
        return False
    return True


def main_stack() -> str:
    """Where the main thread is: `hangs in f (a.py:7), called by g (b.py:3)`."""
    return hangs_in([place(frame) for frame in main_frames()[:4]])


def main_frames() -> list[traceback.FrameSummary]:
    """The frames of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame)[::-1] if frame else []


def in_collective(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Is a thread with these frames in a collective, or in a backward pass, which runs some?"""
    collective = any(
        it.filename.endswith("distributed_c10d.py")
        or (it.filename.endswith("distributed/connect.py") and it.name == "wait")
        for it in frames
    )
    return collective or (bool(frames) and "backward" in frames[0].name)


def of_trainer(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The first of these frames in this package, except wrappers of collectives."""
    package = Path(__file__).parents[1]
    ours = (f for f in frames if Path(f.filename).is_relative_to(package))
    wrappers = ("distributed/connect.py", "distributed/group.py")
    return next((f for f in ours if not f.filename.endswith(wrappers)), None)


def place(frame: traceback.FrameSummary) -> str:
    """`f (a.py:7)`."""
    return f"{frame.name} ({os.path.basename(frame.filename)}:{frame.lineno})"


def hangs_in(calls: Sequence[str]) -> str:
    """The calls of a stack for a message, the innermost first; `calls` may be empty."""
    return f"hangs in {', called by '.join(calls)}" if calls else "does not end"
