"""A step without progress: reports where each rank is, while the stall lasts.

On every rank a thread listens to the pulse (distributed/pulse.py). When the rank makes no progress
for much longer than its steps take, that thread posts where the main thread is, and rank 0's thread
reads all posts. A rank without a post is stopped, or cut off, or holds the GIL. This costs the loop
nothing, and needs no collective.
"""

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as td

from gptddp.distributed import pulse
from gptddp.distributed.connect import World
from gptddp.errors import visible
from gptddp.training.clock import PhaseClock

RECENT = 64  # steps; their median is the usual time of a step
LEAST_S, MARGIN_S = 10.0, 30.0  # silence that is a stall: at least, and beyond a usual step at most
FIRST_S = 45.0  # silence that is a stall, before the first step is done
AGAIN_S = 20.0  # between two reports of one stall
GATHER_S = 2.0  # for the other ranks to notice as well
_IDLE = 0.05  # of a CPU: a CPU rank that uses less in its backward pass waits
_SHOWN = 8  # ranks that are named


@dataclass(frozen=True)
class Stall:
    """A step that makes no progress."""

    step: int
    seconds: float  # since rank 0 made progress
    missing: list[int]  # ranks that the others wait for
    text: str  # where each rank is


class Stalls:
    """Finds where this rank is; on rank 0 where all are. `silent` runs in the pulse's thread."""

    def __init__(self, world: World, clock: PhaseClock, report: Callable[[Stall], None]) -> None:
        """`report`: takes a stall, in a thread; of interest on rank 0 only."""
        self.over = False  # no step follows: long silence is no stall
        self._world, self._clock, self._report = world, clock, report
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._next_s = 0.0  # silence at which the stall is reported again
        self._cpu = 0.0, 0.0  # monotonic, and CPU seconds of this process at that time
        self._thread: threading.Thread | None = None
        self._expected_s = FIRST_S  # silence that is a stall
        self.usual_s = 0.0  # of a step; 0: no step is done

    def stepped(self, step_s: float) -> float:
        """Add a step of this many seconds; return the median of the recent steps."""
        self._recent.append(step_s)
        self.usual_s = statistics.median(self._recent)
        self._expected_s = max(LEAST_S, min(4 * self.usual_s, self.usual_s + MARGIN_S))
        return self.usual_s

    def silent(self, seconds: float) -> None:
        """Look for a stall: this rank has made no progress for this long."""
        now, cpu = time.monotonic(), time.process_time()
        idle = cpu - self._cpu[1] < _IDLE * (now - self._cpu[0])
        self._cpu = now, cpu
        if seconds < min(self._next_s, self._expected_s):
            self._next_s = 0.0
        busy = self._thread is not None and self._thread.is_alive()
        too_early = seconds < max(self._next_s, self._expected_s)
        step = pulse.step()  # 0: the life has not begun
        if self.over or busy or too_early or not step:
            return
        self._next_s = seconds + AGAIN_S
        waits = idle and self._world.device.type == "cpu"
        self._thread = threading.Thread(
            target=self._look, args=(step, seconds, waits), name="stall", daemon=True
        )
        self._thread.start()

    def _look(self, step: int, seconds: float, idle: bool) -> None:
        mine, world = here(self._clock.phase, idle), self._world
        found: dict[int, Any] = {world.rank: mine}
        if world.world_size > 1:
            # rank 0 is lost or stopped, this rank is ending, or a post is no JSON
            with contextlib.suppress(td.DistError, RuntimeError, ValueError):
                found |= self._exchange(step, mine)
        if step == pulse.step() and not self.over:
            self._report(described(step, seconds, found, world.names))

    def _exchange(self, step: int, mine: Mapping[str, Any]) -> dict[int, Any]:
        """Post where this rank is; return the posts of all ranks so far."""
        self._world.post("where", [step, mine])
        time.sleep(GATHER_S)
        posted = {it: v for it, v in self._world.posted("where").items() if isinstance(v, list)}
        return {rank: its for rank, (of_step, its) in posted.items() if of_step == step}


def here(phase: str, idle: bool) -> dict[str, Any]:
    """Where the main thread is; `idle`: its process has hardly used a CPU lately."""
    frames = pulse.main_frames()
    at = pulse.of_trainer(frames)
    inner = frames[0] if frames else None
    waits = pulse.in_collective(frames)
    backward = inner is not None and "backward" in inner.name  # DDP's all-reduce is in it
    shown = [it for it in (inner, at) if it is not None]
    if waits or inner is at:
        shown = shown[1:]
    place = ", called by ".join(dict.fromkeys(map(pulse.place, shown)))
    return {"phase": phase, "waits": waits and (idle or not backward), "at": place}


def described(step: int, seconds: float, found: Mapping[int, Any], names: Sequence[str]) -> Stall:
    """The stall, by each rank's post: the missing ranks first, then where the others wait."""
    missing, parts, waiting = list[int](), list[str](), dict[str, list[int]]()
    for rank, name in enumerate(names):
        it = found.get(rank)
        if not isinstance(it, dict):
            missing.append(rank)
            parts.append(f"{name} gives no sign of life")
        elif it.get("waits"):
            waiting.setdefault(visible(it.get("at", ""))[:200], []).append(rank)
        else:
            missing.append(rank)
            where = visible(it.get("at", ""))[:200]
            parts.append(f"{name} is at {where}, phase {visible(it.get('phase', ''))[:20]}")
    if len(parts) > _SHOWN:
        parts[_SHOWN:] = [f"and {len(parts) - _SHOWN} more ranks are in no collective"]
    for place, ranks in waiting.items():
        which = names[ranks[0]] if len(ranks) == 1 else f"{len(ranks)} ranks"
        all_of_them = "all ranks" if len(ranks) == len(names) > 1 else which
        verb = "waits" if len(ranks) == 1 else "wait"
        parts.append(f"{all_of_them} {verb} in {place}")
    return Stall(step, seconds, missing if waiting or len(names) == 1 else [], "; ".join(parts))
