"""The pulse of a trainer, by which a hang is noticed that no collective notices.

Where a rank is alone, or all ranks hang outside of a collective, nobody waits for them. So a rank
beats whenever it has come further, and says how long that may take the next time. Two listen:

- a thread of the process (`Listening`), which can still say where it hangs;
- the launcher (`launch/worker.py`), from outside, for what stops every thread: a call that holds
  the GIL, SIGSTOP.

Only the time counts in which the listener itself was running, so a machine that is suspended or
stopped as a whole is no hang, and no clock is compared with another.
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

# Its peers name a silent peer, as they know more; so this waits longer than a collective does.
MARGIN_S = 60.0
POLL_S = 0.5
LAST_WORDS_S = 10.0  # to count the hang; a volume that hangs may never let it
HUNG = 1  # exit code: torchrun starts the ranks again

_LAYOUT = struct.Struct("5d")
_PID, _BEATS, _LIMIT_S, _STEP, _EXPECTED_S = range(5)


class Pulse(NamedTuple):
    """What a process says of itself."""

    pid: int
    beats: int
    limit_s: float  # until the next beat
    step: int  # that it is in; 0 before its life has begun
    expected_s: float = 0.0  # within which the next beat is expected; 0: nobody has said


# Of this process; shared with its launcher as soon as the disk has room.
_cells: "memoryview[float]" = memoryview(bytearray(_LAYOUT.size)).cast("d")


def beat(step: int | None = None) -> None:
    """This process has come further; `step`: it is in this step now. Takes 0.1 us."""
    if step is not None:
        _cells[_STEP] = step
    _cells[_BEATS] += 1


def allow(collective_s: float) -> None:
    """The next beats may each take as long as a collective waits for a silent peer, and more."""
    _cells[_LIMIT_S] = collective_s + MARGIN_S
    beat()


def expect(seconds: float) -> None:
    """The next beats are expected within so long: later than that, a line says so."""
    _cells[_EXPECTED_S] = seconds


def expected_s() -> float:
    """What `expect` was called with last."""
    return _cells[_EXPECTED_S]


def step() -> int:
    """The step that this process is in."""
    return int(_cells[_STEP])


def path_of(folder: Path, local_rank: int) -> Path:
    """The file of a worker's pulse, in the folder of its pod's verdict."""
    return folder / f"pulse.{local_rank}"


def read(path: Path) -> Pulse | None:
    """The pulse of another process; None where it has none yet."""
    try:
        pid, beats, limit_s, step, expected_s = _LAYOUT.unpack(path.read_bytes())
    except (OSError, struct.error):
        return None
    return Pulse(int(pid), int(beats), limit_s, int(step), expected_s)


class Silence:
    """How long a pulse has not beaten, in seconds in which the caller was running itself."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._heard, self._last = (0, -1), time.monotonic()

    def listen(self, pid: int, beats: int) -> float:
        """To be called every POLL_S or more often; a longer pause counts as one of twice that."""
        now = time.monotonic()
        same = self._heard == (pid, beats)
        self.seconds = self.seconds + min(now - self._last, 2 * POLL_S) if same else 0.0
        self._heard, self._last = (pid, beats), now
        return self.seconds


class Listening:
    """A thread that ends this process where it hangs; for as long as the context lasts.

    `last_words(where)` is called in another thread first, and returns the exit code. A process that
    nobody would start again, at a terminal where somebody sees it, is not ended: it may be at a
    breakpoint.
    """

    def __init__(
        self,
        last_words: Callable[[str], int],
        silent: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`silent` is called every POLL_S, with the seconds for which it has not come further."""
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
        beat(0)  # from here on the launcher alone listens: the way out of a process may hang too

    def _listen(self) -> None:
        silence, patience, said = Silence(), storage.Patience(), False
        while not self._over.wait(POLL_S):
            self._is_shared = self._is_shared or _share(verdict())  # the disk was full
            if patience.lasts():
                beat()
            seconds = silence.listen(0, int(_cells[_BEATS]))
            with contextlib.suppress(Exception):  # whatever it is, the listening goes on
                self.silent(seconds)
            if seconds <= _cells[_LIMIT_S]:
                said = False
            elif not said:
                said = self._only_says
                self._give_up(seconds)

    def _give_up(self, seconds: float) -> None:
        """Say where the process hangs, and end it; both may hang too."""
        code = [HUNG]

        def words() -> None:
            where = main_stack()
            end = "it goes on if it can" if self._only_says else "it is ended"
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
    """Put the cells into memory that our launcher reads too; False where a full disk forbids it."""
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
    """Of the main thread, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return traceback.extract_stack(frame)[::-1] if frame else []


def in_collective(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Is a thread with these frames in a collective, or in a backward pass, which has its own?"""
    collective = any(
        it.filename.endswith("distributed_c10d.py")
        or (it.filename.endswith("distributed/connect.py") and it.name == "wait")
        for it in frames
    )
    return collective or (bool(frames) and "backward" in frames[0].name)


def of_trainer(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The first of these that is this package's, but for the wrappers of collectives."""
    package = Path(__file__).parents[1]
    ours = (f for f in frames if Path(f.filename).is_relative_to(package))
    wrappers = ("distributed/connect.py", "distributed/group.py")
    return next((f for f in ours if not f.filename.endswith(wrappers)), None)


def place(frame: traceback.FrameSummary) -> str:
    """`f (a.py:7)`."""
    return f"{frame.name} ({os.path.basename(frame.filename)}:{frame.lineno})"


def hangs_in(calls: Sequence[str]) -> str:
    """The calls of a stack as a message has them, the innermost first; there may be none known."""
    return f"hangs in {', called by '.join(calls)}" if calls else "does not end"
