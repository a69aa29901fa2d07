"""Feeds a tracker from the log of a run: `gptddp track`, which `--track` starts beside rank 0.

A step is sent once it is settled: a checkpoint has it, so no kill has it done again. Who is killed
here leaves nothing behind, as the next asks the tracker what it has.
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

_END_S = 30  # that it goes on when rank 0 has ended: a tracker may hang for good
_POLL_S, _RETRY_S = 1.0, 60.0
_ROWS = 500  # that are sent at once
_WHEN = ("step", "time", "since_s")  # numbers of a line that are no values


def rank_0_ends(within_s: float) -> bool:
    """Has the input ended, a pipe into which nobody writes?"""
    if ended := bool(select.select([0], [], [], within_s)[0]):
        signal.alarm(_END_S)
    return ended


def track(run: Path, to: str, over: Callable[[float], bool]) -> int:
    """Send what is settled and not there yet, until it is `over` and once more; the last step.

    `over` waits for so many seconds. Raises, when it is over, ConfigError where another process
    tracks the run, ClickException where the tracker is away.
    """
    said = ""
    while True:
        try:
            held = lock(run / f"track.{to}.lock")
        except BlockingIOError:
            if over(_POLL_S):
                raise ConfigError(f"another process tracks {run} and sends all of it") from None
            continue
        try:
            return _sent(run, to, over)
        except Exception as error:
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            away = visible(f"{to} is away ({why}); `gptddp track` sends what is missing")
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
    """Id and name in a tracker. A run that has gone back is another one, with all of its steps."""
    if not about.run_id:
        raise ConfigError(f"the ledger of {run} has no start")
    id, name = about.run_id, run.absolute().name
    if count := len(about.branches):
        id, name = f"{id}-{count}", f"{name}-from-{about.branches[-1]['step']}-{count}"
    return id, name


def settled(about: Summary) -> int:
    """Up to which step the log stays as it is: all of a run that is finished, or else the steps
    before a checkpoint, as the last one may still get its evaluation.
    """
    steps = [int(name.removeprefix("step-").partition(".")[0]) - 1 for name in about.commits]
    return max([0, *steps, *([int(about.finished["step"])] if about.finished else [])])


def _row(life: int, line: dict[str, Any]) -> Row:
    values = {it: v for it, v in line.items() if type(v) in (int, float) and it not in _WHEN}
    return line["step"], line["time"], values | {"life": life}
