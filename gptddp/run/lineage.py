"""Does the run still go on from a state that an older life has left?

A life decides what the run is: it goes on from one state, and all that lies beyond it is a branch
that the run has left. A state that is saved late, while newer lives train, must not be on one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptddp.run import summary
from gptddp.run.directory import LEDGER
from gptddp.run.history import newest_life
from gptddp.run.json_lines import backwards, parse_event


def left(run: Path, generation: int, step: int) -> str | None:
    """Why the run has left this state; None where every later life has gone on from it by memory.

    Raises OSError.
    """
    ledger = summary.read(run)
    if generation <= ledger.void:
        return f"the ranks of generation {ledger.void} differed"
    later = _starts_after(run, generation)
    if away := next(filter(lambda e: not _goes_on(e, step), later), None):
        source = away.get("source", "an unknown state")
        return f"generation {away['generation']} of this run has begun from {source}"
    begun = set(range(generation + 1, newest_life(run, ledger) + 1))
    if unknown := begun.difference(e["generation"] for e in later):
        it = min(unknown)
        return f"generation {it} of this run has begun, and the ledger does not say from where"
    return None


def _starts_after(run: Path, generation: int) -> list[dict[str, Any]]:
    """The starts of all later lives; mostly no more of the ledger is read than that takes.

    An event that memory has kept through an outage may stand behind newer ones: an older start is
    the end of the search only where none is missing between.
    """
    later: dict[int, dict[str, Any]] = {}
    for line in backwards(run / LEDGER):
        if (event := parse_event(line)) and event["event"] == "start":
            if event["generation"] > generation:
                later[event["generation"]] = event
            elif len(later) == max(later, default=generation) - generation:
                break
    return [later[it] for it in sorted(later)]


def _goes_on(start: Mapping[str, Any], step: int) -> bool:
    return start.get("source") == "memory" and start.get("step", -1) >= step
