"""Feed a tracker from the log of a run: `gptddp track`, which `--track` starts beside rank 0.

A step is sent once it is settled: a checkpoint has it, so no kill makes it run again. This process
may be killed at any time: the next one asks the tracker which steps it has.
"""

import os
import select
import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import click

from gptddp.errors import ConfigError, visible
from gptddp.files import lock
from gptddp.run import summary
from gptddp.run.directory import LEDGER
from gptddp.run.history import logged
from gptddp.run.summary import Summary
from gptddp.track.trackers import TRACKERS, Row

_END_S = 30  # time to finish after the end of rank 0, as a tracker may hang forever
_POLL_S, _RETRY_S = 1.0, 60.0
_ROWS = 500  # sent at once
_WHEN = ("step", "time", "since_s")  # numbers of a line that are not sent as values


def rank_0_ends(within_s: float) -> bool:
    """Has rank 0 ended? Then stdin ends, a pipe into which nobody writes."""
    if ended := bool(select.select([0], [], [], within_s)[0]):
        signal.alarm(_END_S)
    return ended


def track(run: Path, to: str, over: Callable[[float], bool]) -> int:
    """Send new settled steps until `over` is true, and once more; return the last step sent.

    `over` waits for the given seconds. At the end, raises ConfigError if another process tracks the
    run, ClickException if the tracker is unavailable.
    """
    said = ""
    while True:
        try:
            held = lock(run / f"track.{to}.lock")
        except BlockingIOError:
            if over(_POLL_S):
                raise ConfigError(f"another process tracks {run}, and sends all steps") from None
            continue
        try:
            return _sent(run, to, over)
        except Exception as error:
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            away = visible(f"{to} is unavailable ({why}); `gptddp track` sends the missing steps")
        finally:
            os.close(held)
        if over(0):
            raise click.ClickException(away)
        if away != said:
            click.echo(away, err=True)
        said = away
        over(_RETRY_S)


def _sent(run: Path, to: str, over: Callable[[float], bool]) -> int:
    shown = _shown_as(run, about := summary.read(run))
    size, is_last = 0, False
    with TRACKERS[to](run.absolute(), *shown, about.config or {}) as (last, send):
        while not is_last:
            is_last = over(_POLL_S)
            before, size = size, (run / LEDGER).stat().st_size
            if size == before or _shown_as(run, about := summary.read(run)) != shown:
                continue
            if (end := settled(about)) > last:
                rows = (_row(life, line) for life, line in logged(run, last + 1, end))
                while some := list(islice(rows, _ROWS)):
                    send(some)
                    last = some[-1][0]
    return last


def _shown_as(run: Path, about: Summary) -> tuple[str, str]:
    """Id and name in a tracker; each branch is another run there, with all of its steps."""
    if not about.run_id:
        raise ConfigError(f"the ledger of {run} has no start of a life: train the run first")
    id, name = about.run_id, run.absolute().name
    if count := len(about.branches):
        id, name = f"{id}-{count}", f"{name}-from-{about.branches[-1]['step']}-{count}"
    return id, name


def settled(about: Summary) -> int:
    """The last step whose log line no longer changes: the last one of a finished run, or else the
    one before a checkpoint, as the checkpoint's step may still get its evaluation.
    """
    steps = [int(name.removeprefix("step-").partition(".")[0]) - 1 for name in about.commits]
    return max([0, *steps, *([int(about.finished["step"])] if about.finished else [])])


def _row(life: int, line: dict[str, Any]) -> Row:
    values = {it: v for it, v in line.items() if type(v) in (int, float) and it not in _WHEN}
    return line["step"], line["time"], values | {"life": life}
