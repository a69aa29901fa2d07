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

Event = Mapping[str, Any]
Sink = Callable[[Event], None]

# Kinds of events in the ledger; docs/internals.md says when, and with which fields.
IN_LEDGER = frozenset({
    "start", "world", "checkpoint", "branch", "changed", "quarantine", "spike", "slow", "slow_end",
    "stall", "stall_end", "diverged", "stop", "end",
})  # fmt: skip

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
