"""Find workers that hang though no peer waits for them, by their pulse, and where they are."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from gptddp.distributed import connect, pulse

STACK_S = 0.2  # for a worker to write its stack
LATER_S = 20.0  # than the worker's own thread, which can leave the state
_NO_BEAT = -1  # the beats of a worker that has no pulse
# As long as it has not asked for SIGUSR1, that signal ends it.
_NOT_BEGUN = "a worker (process {}) hangs before its trainer has begun: it is killed"
_WITHOUT_STACK = "a worker is killed that does not end ({})"


class Hanging(NamedTuple):
    """A worker that has not come further for so long."""

    local_rank: int
    pid: int
    seconds: float
    step: int  # 0 before its life has begun


class Pulses:
    """The pulses of this pod's workers; `folder` has their files, beside the verdict."""

    def __init__(
        self, folder: Path, tell: Callable[[int, int, float], None] = lambda *stopped: None
    ) -> None:
        """`tell`: called with local rank, step and seconds of a worker that is stopped."""
        self.folder, self.tell = folder, tell
        # by local rank, and whether it has no pulse
        self._silence: dict[tuple[int, bool], pulse.Silence] = {}
        self._said: dict[int, int] = {}  # by local rank: the beats after which it was stopped

    def hanging(self, pids: Iterable[int]) -> list[Hanging]:
        """The workers that hang, of these process ids in the order of their local ranks.

        To be called again and again, see `pulse.Silence.listen`. A worker without a pulse of its
        own has not come so far yet: it may take as long as one on the way to its first step.
        """
        found = []
        for local_rank, pid in enumerate(pids):
            it = pulse.read(pulse.path_of(self.folder, local_rank))
            if it is None or it.pid != pid:
                it = pulse.Pulse(pid, _NO_BEAT, connect.FIRST_TIMEOUT_S + pulse.MARGIN_S, 0)
            key = local_rank, it.beats == _NO_BEAT
            seconds = self._silence.setdefault(key, pulse.Silence()).listen(pid, it.beats)
            if seconds > it.expected_s > 0 and it.step and self._said.get(local_rank) != it.beats:
                self._tell_stopped(local_rank, it, seconds)
            if seconds > it.limit_s + LATER_S:
                if it.beats != _NO_BEAT or self._has_room():
                    found.append(Hanging(local_rank, pid, seconds, it.step))
                del self._silence[key]  # it is told once, and again if it cannot be killed
        return found

    def _tell_stopped(self, local_rank: int, it: pulse.Pulse, seconds: float) -> None:
        """Of a worker that cannot say so itself; the others find out that it says nothing."""
        with contextlib.suppress(OSError):
            if is_stopped(it.pid):
                self._said[local_rank] = it.beats
                self.tell(local_rank, it.step, seconds)

    def _has_room(self) -> bool:
        """Could a worker have left its pulse? On a full disk it cannot, and is no worse for it."""
        probe = self.folder / "pulse.probe"
        try:
            probe.write_bytes(b"room")
            return True
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)


def is_stopped(pid: int) -> bool:
    """Is the process stopped, by SIGSTOP for instance? Raises OSError where there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def describe(pids: Mapping[int, int], stacks: Path) -> list[str]:
    """A line for each of these workers: where it is, by the stack that it writes on SIGUSR1.

    `pids`: by local rank; `stacks`: the folder of the files, see `distributed/process.py`.
    """
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(STACK_S if pids else 0)
    return [_describe(stacks / f"stack.{i}", pid) for i, pid in pids.items()]


def _describe(stack: Path, pid: int) -> str:
    try:
        text = stack.read_text()
    except FileNotFoundError:
        return _NOT_BEGUN.format(pid)
    except (OSError, ValueError) as error:
        return _WITHOUT_STACK.format(error)
    try:
        rank, whose, *lines = text.splitlines()
        if whose != f"process {pid}":  # of one before it
            return _NOT_BEGUN.format(pid)
        stopped = is_stopped(pid)
    except (OSError, ValueError) as error:
        return _WITHOUT_STACK.format(error)
    # '  File "/a/b.py", line 7 in f', the innermost first
    frames = re.findall(r'File ".*?([^/"]+)", line (\d+) in (\S+)', "\n".join(lines))
    calls = [f"{function} ({file}:{line})" for file, line, function in frames[:4]]
    where = "is stopped (SIGSTOP)" if stopped else pulse.hangs_in(calls)
    return f"{rank} {where}: it is killed"
