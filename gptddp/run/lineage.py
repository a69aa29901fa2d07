"""Does the run still go on from a state that an older life has left?

A life decides what the run is: it goes on from one state, and all that lies beyond it is a branch
that the run has left. A state that is saved late, while newer lives train, must not be on one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptddp.run.history import highest_generation, read_ledger, void_generation


def left(run: Path, generation: int, step: int) -> str | None:
    """Why the run has left this state; None where every later life has gone on from it by memory.

    Raises OSError.
    """
    events = read_ledger(run)
    if generation <= void_generation(events):
        return f"the ranks of generation {void_generation(events)} differed"
    later = [e for e in events if e["event"] == "start" and e["generation"] > generation]
    if away := next(filter(lambda e: not _goes_on(e, step), later), None):
        source = away.get("source", "an unknown state")
        return f"generation {away['generation']} of this run has begun from {source}"
    newest = highest_generation(run, events)
    if newest > max([generation, *(e["generation"] for e in later)]):
        return f"generation {newest} of this run has begun, and the ledger does not say from where"
    return None


def _goes_on(start: Mapping[str, Any], step: int) -> bool:
    return start.get("source") == "memory" and start.get("step", -1) >= step
