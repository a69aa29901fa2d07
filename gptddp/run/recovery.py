"""How the life before this one ended, and where the seconds went until the run trained on.

A life that is killed as a whole cannot say so: the next one does.
"""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

from gptddp.run.directory import log_path
from gptddp.run.history import newest_lost_life
from gptddp.run.json_lines import backwards, parse
from gptddp.run.summary import Summary

PARTS = ("reform_s", "reload_s", "first_step_s")  # of a `recovered` event
_MOST_LINES = 20_000  # of a log are read: the table is there every ten seconds
UNKNOWN = "rank 0 left no word: it was killed"


@dataclass(frozen=True)
class Last:
    """What is known of the life before. Times are unix seconds of the hosts that took them."""

    generation: int
    step: int  # the last that it finished
    step_time: float  # when it did
    cause: str | None  # None: the life itself recorded how it ended
    # where its seconds went: `phases` by rank, and `since_s` from then until its end, by the log
    spent: Mapping[str, Any] = field(default_factory=dict)


def last_life(ledger: Summary, line: Mapping[str, Any] | None, run_dir: Path) -> Last | None:
    """From the ledger and the log's last line.

    None for a new run, and where the ledger has lost that life. Raises OSError.
    """
    if not ledger.life or line is None or newest_lost_life(run_dir, ledger):
        return None
    said = ledger.ended
    unheard = f"the ranks differed: {ledger.differed}" if ledger.differed else UNKNOWN
    logged = {} if said else _logged(run_dir, ledger.life, line["time"])
    spent = {**logged, "survived": False}
    return Last(ledger.life, line["step"], line["time"], None if said else unheard, spent)


def _logged(run_dir: Path, generation: int, until: float) -> dict[str, Any]:
    """The last phases in the log of a life, and the seconds from then `until` its last step."""
    lines = map(parse, backwards(log_path(run_dir, generation)))
    for line in islice(lines, _MOST_LINES):
        if line and "phases" in line:
            with suppress(LookupError, TypeError, ValueError):  # foreign
                since_s = float(line["since_s"]) + max(0.0, until - line["time"])
                return {"phases": line["phases"], "since_s": round(since_s, 3)}
    return {}


def unsaved_s(ledger: Summary) -> float:
    """Seconds since the last save began, or since the run did; infinite if a clock was put back."""
    now = time.time()
    known = (ledger.saved_time, ledger.began_time, now)
    age_s = now - float(next(it for it in known if it is not None))
    return age_s if age_s >= 0 else math.inf


def seconds(last: Last, joined: float, ready: float, first_step: float) -> dict[str, float]:
    """The parts of a recovery, from the last finished step to the first new one.

    reform: until this life's process group was up (the old workers' end, the wait for the lease,
    new workers); reload: until the state was back on all ranks; first_step: until a step was done.
    Clocks that differ falsify the parts, but none is negative, and they add up to the total. All in
    seconds.
    """
    moments = [last.step_time, joined, ready, first_step]
    moments = list(accumulate((min(at, first_step) for at in moments), max))
    parts = {
        name: round(end - begin, 3)
        for name, (begin, end) in zip(PARTS, pairwise(moments), strict=True)
    }
    return parts | {"total_s": round(moments[-1] - moments[0], 3)}
