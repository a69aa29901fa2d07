"""Events of a life: rank 0 emits each event once, and every sink handles it.

A sink is a function of an event: a mapping with `event` (its kind), `time` (unix seconds),
`generation`, and the fields of its kind. Ledger and log are records: the next life continues from
them. Console, /metrics and samples.jsonl are views. To add a view, put it beside them in
Recorder.__init__. A sink is called in the loop and in threads, so it must not wait. The first event
may be the `end` of the previous life.

Before a life has a recorder, events go straight to the ledger: a branch, and events kept in memory.
So does the checkpoint of a rank 0 that was killed in its save.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gptddp.run.history import RunLog

Event = Mapping[str, Any]
Sink = Callable[[Event], None]

IN_LEDGER = {  # kinds of events in the ledger
    "end": "how a life ended without a stop; mostly written by the next life",
    "changed": "a setting or the code differs from the previous life",
    "branch": "the run goes back to a checkpoint; written before the life begins, by go_back.py",
    "start": "a life begins: from which state, in which world, with which configuration",
    "world": "the life continues with other ranks: lost (and how), joined, and the pause",
    "checkpoint": "a save has ended: with a name, or with an error",
    "quarantine": "unreadable row groups are left out from now on",
    "spike": "loss or gradient norm is many times its usual size",
    "slow": "a rank is slower than the others",
    "slow_end": "the rank is not slow any more",
    "stall": "a step makes no progress: where each rank is",
    "stall_end": "the step has finished",
    "diverged": "ranks have different states",
    "stop": "the life ends without a fault",
}
OTHERS = {  # other kinds of events
    "step": "a step is done; `line` is its line of the log",
    "completed": "the last step got its missing evaluation or fingerprint",
    "sample": "the model has written a text after an evaluation",
    "still": "a stalled step still makes no progress",
    "loaded": "a checkpoint was read",
    "newest": "the newest checkpoint, of any life",
    "storage": "the storage begins to fail, or works again",
    "waiting": "the ranks wait for the last checkpoint",
    "ended": "all records are written: the results of the life",
    "last": "the numbers of the run for the last scrape",
}

log = logging.getLogger(__name__)


class Events:
    """Rank 0 only. A sink runs no collective, and several threads may emit.

    Errors of a record reach the caller: no step begins before the records have the last one. Disk
    failures are not among them, see run/lines.py. An error of a view is logged once, and training
    continues.
    """

    def __init__(self, generation: int, records: Sequence[Sink], views: Sequence[Sink]) -> None:
        self.generation, self.records, self.views = generation, [*records], [*views]
        self._failed: list[Sink] = []

    def emit(self, kind: str, **fields: Any) -> None:
        """Hand an event to every sink, to the records first; `generation` may be another life's."""
        about = {"event": kind, "time": time.time(), "generation": self.generation}
        event = {**about, **fields}
        for sink in self.records:
            sink(event)
        for sink in self.views:
            try:
                sink(event)
            except Exception:
                if sink not in self._failed:
                    self._failed.append(sink)
                    name = getattr(sink, "__name__", type(sink).__name__)
                    log.exception("training continues, but %s has failed on `%s`", name, kind)


def to_log(run_log: RunLog) -> Sink:
    """Write the line of a step, and again when it is completed."""
    kinds = ("step", "completed")
    return lambda event: run_log.append(event["line"]) if event["event"] in kinds else None
