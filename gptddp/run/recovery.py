"""The end of the previous life: a life whose ranks were all killed records none."""

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from gptddp.run.directory import log_path
from gptddp.run.history import newest_lost_life
from gptddp.run.json_lines import backwards, parse
from gptddp.run.summary import Summary

_MOST_LINES = 20_000  # read from a log, which has phases every ten seconds
UNKNOWN = "rank 0 was killed"


def unsaid_end(
    ledger: Summary, line: Mapping[str, Any] | None, run_dir: Path
) -> dict[str, Any] | None:
    """The event `end` of the previous life, if the ledger lacks it; `line`: the log's last.

    None also for a new run, or if the ledger lost that life. The event's seconds are from the log,
    up to its last step. Raises OSError.
    """
    if not ledger.life or ledger.ended or line is None or newest_lost_life(run_dir, ledger):
        return None
    cause = f"the ranks differed: {ledger.differed}" if ledger.differed else UNKNOWN
    end = {"generation": ledger.life, "step": line["step"], "at": line["time"], "cause": cause}
    return {**end, **_logged(run_dir, ledger.life, line["time"]), "survived": False}


def _logged(run_dir: Path, generation: int, until: float) -> dict[str, Any]:
    """The last phases in the log of a life, and the seconds from them `until` its last step."""
    lines = map(parse, backwards(log_path(run_dir, generation)))
    for line in islice(lines, _MOST_LINES):
        if line and "phases" in line:
            with suppress(LookupError, TypeError, ValueError):  # invalid
                since_s = float(line["since_s"]) + max(0.0, until - line["time"])
                return {"phases": line["phases"], "since_s": round(since_s, 3)}
    return {}


def unsaved_s(ledger: Summary) -> float:
    """Seconds since the last save, or the run, began; infinite if a clock was set back."""
    now = time.time()
    known = (ledger.saved_time, ledger.began_time, now)
    age_s = now - float(next(it for it in known if it is not None))
    return age_s if age_s >= 0 else math.inf
