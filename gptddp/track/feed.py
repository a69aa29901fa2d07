"""Feed a tracker from the log of a run: `gptddp track`, which `--track` starts beside rank 0.

A step is sent once it is settled: a checkpoint has it, so no kill makes it run again. This process
may be killed at any time: the next one asks the tracker which steps it has.
"""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_WHY = 300  # characters of an error
_WHEN = ("step", "time", "since_s")  # numbers of a line that are not sent as values


def rank_0_ends(within_s: float) -> bool:
    """Has rank 0 ended? Then stdin ends, a pipe into which nobody writes."""
    if ended := bool(select.select([0], [], [], within_s)[0]):
        signal.alarm(_END_S)
    return ended


def track(run: Path, to: str, over: Callable[[float], bool]) -> int:
    """Send new settled steps until `over` is true, and once more; return the last step sent.

    `over` waits for the given seconds. At the end, raises ConfigError if another process tracks the
    run or the run has no start, ClickException if the tracker or the run's volume fails.
    """
    said = ""
    while True:
        try:
            with _locked(run / f"track.{to}.lock"):
                return _sent(run, to, over)
        except BlockingIOError:
            if over(_POLL_S):
                raise ConfigError(f"another process tracks {run} now: try again later") from None
            continue
        except Exception as error:
            is_over = over(0)
            if is_over and isinstance(error, ConfigError):
                raise
            why = " ".join(str(error).split())[:_WHY] or type(error).__name__
            failed = visible(f"{to} lacks steps ({why}); `gptddp track` sends the missing steps")
        if is_over:
            raise click.ClickException(failed)
        if failed != said:
            click.echo(failed, err=True)
        said = failed
        over(_RETRY_S)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    held = lock(path)
    try:
        yield
    finally:
        os.close(held)


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
                rows = (_row(generation, line) for generation, line in logged(run, last + 1, end))
                while some := list(islice(rows, _ROWS)):
                    send(some)
                    last = some[-1][0]
    return last


def _shown_as(run: Path, about: Summary) -> tuple[str, str]:
    """Id and name in a tracker; each branch is another run there, with all of its steps.

    So is a run that has lost its checkpoints and started again at step 0.
    """
    if not about.run_id:
        raise ConfigError(f"the ledger of {run} has no start of a life: train the run first")
    id, name = about.run_id, run.absolute().name
    if again := (about.from_scratch or {}).get("since"):
        id, name = f"{id}-scratch-{again}", f"{name}-from-scratch-{again}"
    if count := len(about.branches):
        id, name = f"{id}-{count}", f"{name}-from-{about.branches[-1]['step']}-{count}"
    return id, name


def settled(about: Summary) -> int:
    """The last step whose log line no longer changes: the last one of a finished run, or else the
    one before a checkpoint, as the checkpoint's step may still get its evaluation.
    """
    steps = [int(name.removeprefix("step-").partition(".")[0]) - 1 for name in about.commits]
    return max([0, *steps, *([int(about.finished["step"])] if about.finished else [])])


def _row(generation: int, line: dict[str, Any]) -> Row:
    values = {it: v for it, v in line.items() if type(v) in (int, float) and it not in _WHEN}
    return line["step"], float(line.get("time") or 0.0), values | {"generation": generation}
