"""Runs side by side: which was best, and what differed. `gptddp runs`, and the top of the page."""

import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptddp.budget import shown
from gptddp.errors import visible
from gptddp.files import exists, explain, names_in
from gptddp.flags import of_run
from gptddp.report import verdict
from gptddp.report.life_records import number
from gptddp.report.run_record import RunRecord, read_briefly
from gptddp.report.words import amount, value
from gptddp.run.directory import CHECKPOINTS, FAULTS, is_run

DEPTH = 3  # of folders below the one that is given
MEASURES = {"val_loss": "val. loss", "val_bpb": "val. bits/byte"}  # fields of the log
_NO_RUNS = (CHECKPOINTS, FAULTS, "lost+found")  # folders
_HASH = re.compile("[0-9a-f]{16,}")
_SHOWN = 8  # digits of a hash


@dataclass(frozen=True)
class Row:
    """One run. Of the measure that is compared: the least value, its step, the newest value."""

    name: str
    path: Path
    state: str  # as `Verdict` has it; unreadable
    note: str = ""  # what is wrong with it, or missing
    steps: str = ""  # done, of how many
    step: int = 0
    tokens: int = 0
    best: float | None = None
    best_step: int = 0
    last: float | None = None
    is_best: bool = False  # of all; several where they are equal to the last digit
    settings: dict[str, Any] = field(default_factory=dict)  # those that differ; {}: not known


@dataclass(frozen=True)
class Table:
    """Runs, the best first; behind them those that have no evaluation."""

    measure: str  # of MEASURES
    settings: list[str]  # whose values differ: fields, `data` and `code` by their hashes
    rows: list[Row]
    caption: str = ""  # why numbers may not be compared


def find(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The run directories in a folder, in order of their names; it may be one. Raises OSError."""
    if is_run(folder):
        yield folder
    for name in sorted(names_in(folder), key=_natural) if depth else ():
        if name.startswith(".") or name in _NO_RUNS:
            continue
        try:
            if exists(path := folder / name, stat.S_ISDIR):
                yield from find(path, depth - 1)
        except OSError:  # it cannot be looked into: its row says so
            yield path


def side_by_side(runs: Sequence[Path]) -> Table:
    """The table of runs in any state: one that cannot be read has a row that says so."""
    records: list[RunRecord | OSError] = []
    for path in runs:
        try:
            records.append(read_briefly(path))
        except OSError as error:
            records.append(error)
    return table_of(runs, records)


def table_of(runs: Sequence[Path], records: Sequence[RunRecord | OSError]) -> Table:
    """The table of what has been read of each of these runs."""
    known = [it for it in records if isinstance(it, RunRecord)]
    measure, caption = _measure(known)
    every = [_settings(it) for it in known]
    fields = dict.fromkeys(name for it in every for name in it)
    differ = [name for name in fields if len({str(it.get(name, "")) for it in every if it}) > 1]
    rows = [
        _row(name, path, it, measure, differ)
        for name, path, it in zip(names_of(runs), runs, records, strict=True)
    ]
    evaluated = sorted((it for it in rows if it.best is not None), key=lambda it: it.best or 0.0)
    if len(evaluated) > 1 and (measure == "val_bpb" or not caption):
        least = evaluated[0].best
        evaluated = [replace(it, is_best=it.best == least) for it in evaluated]
    return Table(measure, differ, [*evaluated, *(it for it in rows if it.best is None)], caption)


def names_of(runs: Sequence[Path]) -> list[str]:
    """What tells these paths apart: each from the folder on that all are in."""
    paths = [path.resolve() for path in runs]
    above = os.path.commonpath([path.parent for path in paths]) if paths else ""
    return [visible(path.relative_to(above)) for path in paths]


def _measure(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """By which field of the log runs are compared, and what is to be said of that."""
    if len({run.dataset for run in runs} - {""}) < 2:
        return "val_loss", ""
    told = "Not all are of the same dataset. "
    evaluated = [run for run in runs if run.newest("val_loss") is not None]
    if all(run.newest("val_bpb") is not None for run in evaluated):
        return (
            "val_bpb",
            f"{told}Bits per byte can be compared if the validation texts are the same.",
        )
    return "val_loss", f"{told}Where tokenizers differ, losses (nats a token) cannot be compared."


def _settings(run: RunRecord) -> dict[str, Any]:
    """What decides the run, but for paths and the like of one start; {}: not known."""
    if run.config is None:
        return {}
    start = run.lives[-1].start
    return of_run(run.config) | {"data": run.dataset, "code": start.get("code") or ""}


def _row(
    name: str, path: Path, run: RunRecord | OSError, measure: str, differ: Sequence[str]
) -> Row:
    if isinstance(run, OSError):
        return Row(name, path, "unreadable", visible(explain(run)))
    values = dict(zip(run.steps, run.series[measure], strict=True))
    finite = {step: it for step, it in values.items() if math.isfinite(it)}
    best = min(finite, key=lambda step: (finite[step], step), default=0)
    notes = [*run.wrong, *(["no evaluation yet"] if not finite else [])]
    settings, tokens = _settings(run), int(number(run.last.get("tokens")))
    steps, train_s = f"{run.done}", number(run.last.get("train_s"))
    if run.config:
        steps = shown(run.config, run.done, tokens, train_s)
    return Row(
        name,
        path,
        verdict.verdict_of(run).state,
        visible("; ".join(notes)),
        steps,
        run.done,
        tokens,
        finite.get(best),
        best,
        finite[max(finite)] if finite else None,
        False,
        {it: settings.get(it, "") for it in differ} if settings else {},
    )


def _natural(name: str) -> list[Any]:
    """To sort `lr-2` before `lr-10`."""
    return [int(it) if it.isdecimal() else it for it in re.split(r"(\d+)", name)]


# -- as text ---------------------------------------------------------------------------------------


def cells(row: Row, settings: Sequence[str]) -> list[str]:
    """A row as text, as `heads` has its columns."""
    known = [short(row.settings[it]) if row.settings else "?" for it in settings]
    best = [value(row.best), *known, value(row.last)]
    return [row.name, *best, row.state, row.steps, amount(row.tokens)]


def heads(it: Table) -> list[str]:
    """The columns: first what was best, and what differed."""
    return ["run", f"best {MEASURES[it.measure]}", *it.settings, "last", "state", "step", "tokens"]


def as_text(it: Table, width: int = 0) -> str:
    """The table, in columns that fit `width` characters; 0: in one piece, however wide.

    What does not fit follows below, behind the names of the runs: no value is cut.
    """
    lines = [heads(it), *(cells(row, it.settings) for row in it.rows)]
    marks = ["  ", *("* " if row.is_best else "  " for row in it.rows)]
    columns = [[mark + line[0] for mark, line in zip(marks, lines, strict=True)]]
    columns += list(map(list, zip(*lines, strict=True)))[1:]
    sizes = [max(map(len, column)) for column in columns]
    blocks: list[list[int]] = []
    left = 0
    for column in range(1, len(columns)):
        if not blocks or (width and sizes[column] + 2 > left):
            blocks.append([0])
            left = width - sizes[0]
        blocks[-1].append(column)
        left -= sizes[column] + 2
    texts = [
        "\n".join(
            "  ".join(columns[i][line].ljust(sizes[i]) for i in block).rstrip()
            for line in range(len(lines))
        )
        for block in blocks
    ]
    notes = [f"{row.name}: {row.note}" for row in it.rows if row.note]
    best = "* best" if any(row.is_best for row in it.rows) else ""
    return "\n\n".join([*texts, "\n".join(filter(None, [best, it.caption, *notes]))]).rstrip()


def as_objects(it: Table) -> list[dict[str, Any]]:
    """A flat object for each row, for programs; what is not known is null."""
    return [
        {
            "run": row.name,
            "path": str(row.path),
            "best": row.is_best,
            "state": row.state,
            "step": row.step,
            "tokens": row.tokens,
            f"best_{it.measure}": row.best,
            "best_step": row.best_step or None,
            f"last_{it.measure}": row.last,
            **{name: row.settings.get(name) for name in it.settings},
            "note": row.note,
        }
        for row in it.rows
    ]


def short(setting: Any) -> str:
    """A value of a setting: all of it, but of a hash."""
    text = "on" if setting is True else "off" if setting is False else visible(setting)
    if isinstance(setting, list | tuple):
        text = ",".join(map(str, setting))
    return (text[:_SHOWN] if _HASH.fullmatch(text) else text) or "none"
