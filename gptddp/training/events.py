"""What happens in a life is said once: rank 0 emits an event, and every sink does its part.

A sink is a function of an event: a mapping with `event` (its kind), `time` (unix seconds),
`generation`, and the fields of its kind. Ledger and log are records: the next life goes on from
them. Console, /metrics and samples.jsonl are views. To add one, put it beside them in
Recorder.__init__. It is called in the loop and in threads, so it must not wait. The first event may
be the `end` of the life before.

Before a life's recorder is there, events go straight to the ledger: a branch, and what memory has
kept. So does the checkpoint of a rank 0 that was killed in its save.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gptddp.run.history import RunLog

Event = Mapping[str, Any]
Sink = Callable[[Event], None]

IN_LEDGER = {  # the kinds that are in the ledger
    "end": "how a life ended that was not stopped; mostly the next one says so",
    "changed": "a setting, or the code, is not that of the life before",
    "branch": "the run goes back to a checkpoint; written before the life begins, by go_back.py",
    "start": "a life begins: from which state, in which world, with which configuration",
    "world": "it goes on with other ranks: who is lost and how, who has come, and the pause",
    "checkpoint": "a save has ended: with a name, or with an error",
    "quarantine": "row groups that cannot be read are left out from now on",
    "spike": "loss or gradient norm is many times its usual size",
    "slow": "a rank is slower than the others",
    "slow_end": "it is not any more",
    "stall": "a step does not move: where each rank is",
    "stall_end": "it has moved",
    "diverged": "ranks differ",
    "stop": "the life ends in good order",
}
OTHERS = {  # the kinds that are not
    "step": "a step is done; `line` is its line of the log",
    "completed": "the evaluation or the fingerprint of the last step was missing, and is done",
    "sample": "the model has written a text after an evaluation",
    "still": "a step that stalls has not moved yet",
    "loaded": "a checkpoint was read",
    "newest": "the newest checkpoint, whoever has saved it",
    "storage": "the storage begins to fail, or works again",
    "waiting": "the last checkpoint takes its time",
    "ended": "all is written: what has come out of the life",
    "last": "the numbers of the run for the last scrape",
    "closed": "nothing follows",
}

log = logging.getLogger(__name__)


class Events:
    """Rank 0 only. Nothing in a sink is a collective, and several threads may emit.

    What a record raises reaches the caller: no step is begun before the records have the last one.
    No failure of the disk is among it, see run/lines.py. What a view raises is logged once, and
    training goes on.
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
                    log.exception("training goes on, but %s has failed on `%s`", name, kind)


def to_log(run_log: RunLog) -> Sink:
    """Writes the line of a step; again where it was completed."""
    kinds = ("step", "completed")
    return lambda event: run_log.append(event["line"]) if event["event"] in kinds else None
