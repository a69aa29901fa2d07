"""Threads that make the blocks of a rank's lanes ahead of the trainer.

The order of the blocks in a lane is fixed (lanes.py); the order in which lanes are served is not.
The lane with the fewest ready rows gets the next block, until `prefetch` blocks per lane are ready.
This spreads the work evenly over the steps: there are no bursts when all lanes run out together.
All threads work while a lane is short of rows, as at the start of a life; otherwise only one does,
so that the trainer is not slowed down.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from gptddp.data.blocks import Lane, Made, Source
from gptddp.distributed import storage

URGENT_STEPS = 4  # a lane with rows for fewer steps gets a block even if others have many
JOIN_S = 2.0  # `stop` does not wait longer for a thread that hangs in a read: it is a daemon


class Producer:
    """Threads and the lanes that they fill. It does not refer to the loader: see Loader._stop."""

    def __init__(
        self, source: Source, lanes: list[Lane], rows: int, prefetch: float, threads: int
    ) -> None:
        """`rows`: taken from every lane per step; `prefetch`: blocks per lane to keep ready."""
        self.source, self.lanes, self.n, self.prefetch = source, lanes, rows, prefetch
        self.urgent_rows = URGENT_STEPS * rows
        self._blocks = self._block_rows = 0  # made so far
        self._busy: set[Lane] = set()  # whose block is being made, also if not needed any more
        self._stopped = threading.Event()
        self.error: BaseException | None = None  # it concerns all lanes
        lock = threading.RLock()  # reentrant: a garbage collection inside may call stop()
        self._work, self._ready = threading.Condition(lock), threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._run, name=f"gptddp-data-{i}", daemon=True)
            for i in range(threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads and wait for them. Any thread may call it, at any time, repeatedly."""
        with self._work:
            self._stopped.set()
            for lane in self.lanes:
                lane.stopped.set()
            self._work.notify_all()
            self._ready.notify_all()
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def take(self) -> list[tuple[np.ndarray, ...]]:
        """Wait for the rows of the next step and return them as parts, in the order of the lanes.

        Raises a thread's error when the rows made before it are used up: at the same step for any
        number of threads and any prefetch. Raises RuntimeError after `stop`.
        """
        with self._ready:
            for lane in self.lanes:
                while lane.rows < self.n:
                    if self._stopped.is_set():
                        raise RuntimeError("the loader is closed")
                    if error := lane.error or self.error:
                        raise error
                    with storage.waiting(partial(self._reading, lane)):
                        self._ready.wait()
            parts = [part for lane in self.lanes for part in lane.take(self.n)]
            self.urgent_rows = URGENT_STEPS * self.n
            self._work.notify_all()
            return parts

    def hurry(self, steps: int) -> None:
        """Until the next `take`: make the rows of so many steps before all others."""
        with self._work:
            self.urgent_rows = max(URGENT_STEPS, steps) * self.n
            self._work.notify_all()

    def is_ready(self) -> bool:
        """Are the rows of the next steps, those that come first, made or out of reach?"""
        with self._work:
            enough = (it.rows >= self.urgent_rows or it.error for it in self.lanes)
            return bool(self.error) or all(enough)

    def reading(self) -> str:
        """In any thread: the file that a thread reads at this moment; "" if none."""
        return next((lane.reading for lane in [*self._busy] if lane.reading), "")

    def move(
        self,
        cursors: Mapping[int, Sequence[int]],
        new: Callable[[int, Sequence[int]], Lane],
    ) -> None:
        """Continue with these lanes, by number, at these cursors; `new` makes missing lanes."""
        with self._work:
            own, lanes = {lane.number: lane for lane in self.lanes}, []
            for number, cursor in cursors.items():
                lane = own.get(number)
                keeps = lane and not lane.error and lane.go_to(cursor)  # an error may have passed
                lanes.append(lane if lane and keeps else new(number, cursor))
            for lane in self.lanes:
                if lane not in lanes:
                    lane.stopped.set()
            self.lanes = lanes
            self._work.notify_all()

    def _reading(self, lane: Lane) -> str:
        """In any thread: the file whose reading holds up this lane; "" if none."""
        return lane.reading if lane in self._busy else self.reading()

    def _run(self) -> None:
        try:
            encode = self.source.encoder()
        except BaseException as error:
            self._fail(self, error)
            return
        while lane := self._next_lane():
            try:
                made = lane.make(self.source, encode)
            except BaseException as error:
                self._fail(lane, error)  # others continue: an earlier step may fail in them
            else:
                self._deliver(lane, made)

    def _fail(self, what: "Lane | Producer", error: BaseException) -> None:
        """Store the error for the trainer's thread, which raises it when it needs the rows."""
        with self._ready:
            what.error = error
            if isinstance(what, Lane):
                self._busy.discard(what)
            self._ready.notify_all()

    def _next_lane(self) -> Lane | None:
        """Wait until a lane needs a block, set it busy and return it. None: stop."""
        with self._work:
            while not self._stopped.is_set():
                idle = [it for it in self.lanes if it not in self._busy and not it.error]
                lane = min(idle, key=lambda lane: lane.rows, default=None)
                if lane and self._needs(lane):
                    self._busy.add(lane)
                    return lane
                self._work.wait()
        return None

    def _needs(self, lane: Lane) -> bool:
        if lane.rows < self.urgent_rows:
            return True
        if any(it in self._busy for it in self.lanes):
            return False
        enough = self.prefetch * len(self.lanes) * self._block_rows / self._blocks
        return sum(lane.rows for lane in self.lanes) < enough

    def _deliver(self, lane: Lane, made: Made | None) -> None:
        with self._ready:
            self._busy.discard(lane)
            if made:
                lane.ready.append(made)
                lane.rows += len(made.rows)
                self._blocks += 1
                self._block_rows += len(made.rows)
                self._ready.notify()
            self._work.notify()
