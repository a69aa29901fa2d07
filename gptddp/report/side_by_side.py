"""Runs side by side: which was best, and what differed. `gptddp runs`, and the top of the page."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptddp.budget import shown
from gptddp.errors import visible
from gptddp.files import explain
from gptddp.flags import of_run
from gptddp.report import verdict
from gptddp.report.life_records import number
from gptddp.report.run_record import RunRecord, read_briefly
from gptddp.report.words import amount, value
from gptddp.run.directory import CHECKPOINTS, FAULTS, is_run

DEPTH = 3  # of folders below the one that is given
MEASURES = {"val_loss": "val. loss", "val_bpb": "val. bits/byte"}  # fields of the log
_NO_RUNS = (CHECKPOINTS, FAULTS, "lost+found")  # folders
_HASH = re.compile("([0-9a-f]{8})[0-9a-f]{8,}")  # of which the first digits are shown


@dataclass(frozen=True)
class Row:
    """One run. Of what is compared: its least value, the step of that, its newest value."""

    run: str  # its name
    path: Path
    best: bool = False  # of all; several are, where they are equal to the last digit
    state: str = "unreadable"  # or as `Verdict` has it
    step: int = 0
    steps: str = ""  # done, of how many
    tokens: int = 0
    validation: float | None = None  # None: not evaluated yet
    at_step: int | None = None
    last: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # those that differ; {}: not known
    note: str = ""  # what is wrong with it, or missing


@dataclass(frozen=True)
class Table:
    """Runs, the best first; behind them those without an evaluation."""

    measure: str  # of MEASURES
    settings: list[str]  # whose values differ: fields, `data` and `code` by their hashes
    rows: list[Row]
    caption: str = ""  # why numbers may not be compared

    @property
    def head(self) -> list[str]:
        """The columns: first what was best, and what differed."""
        best = f"best {MEASURES[self.measure]}"
        return ["run", best, *self.settings, "last", "state", "step", "tokens"]

    def cells(self, row: Row) -> list[str]:
        """A row as text: no value is cut, but of a hash."""
        known = [visible(row.settings.get(it, "?")) or "none" for it in self.settings]
        known = [_HASH.sub(r"\1", it) for it in known]
        numbers = [row.state, row.steps, amount(row.tokens)]
        return [row.run, value(row.validation), *known, value(row.last), *numbers]


def find(folder: Path) -> Iterator[Path]:
    """The run directories in a folder, which may be one itself; and what cannot be looked into."""
    closed: list[OSError] = []
    for name, inner, _ in os.walk(folder, onerror=closed.append, followlinks=True):
        deep = len(Path(name).parts) - len(folder.parts) >= DEPTH
        hidden = [it for it in inner if deep or it.startswith(".") or it in _NO_RUNS]
        inner[:] = sorted(set(inner) - set(hidden))
        if is_run(Path(name)):
            yield Path(name)
    yield from (Path(it.filename) for it in closed if Path(it.filename) != folder)


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
    every = [it for it in map(_settings, known) if it]
    fields = dict.fromkeys(name for it in every for name in it)
    differ = [name for name in fields if len({str(it.get(name)) for it in every}) > 1]
    named = map(Row, names_of(runs), runs)
    rows = [_row(it, run, measure, differ) for it, run in zip(named, records, strict=True)]
    rows.sort(key=lambda it: math.inf if it.validation is None else it.validation)
    evaluated = [it for it in rows if it.validation is not None]
    if len(evaluated) > 1 and (measure == "val_bpb" or not caption):
        rows = [replace(it, best=it.validation == evaluated[0].validation) for it in rows]
    return Table(measure, differ, rows, caption)


def names_of(runs: Sequence[Path]) -> list[str]:
    """What tells these paths apart: each from the folder on that all are in."""
    paths = [path.resolve() for path in runs]
    above = os.path.commonpath([path.parent for path in paths])
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
    code = run.lives[-1].start.get("code")
    return {**of_run(run.config), "data": run.dataset, "code": code or ""}


def _row(row: Row, run: RunRecord | OSError, measure: str, differ: Sequence[str]) -> Row:
    if isinstance(run, OSError):
        return replace(row, note=visible(explain(run)))
    pairs = zip(run.series[measure], run.steps, strict=True)
    finite = [it for it in pairs if math.isfinite(it[0])]
    best, at_step = min(finite, default=(None, None))
    tokens, train_s = int(number(run.last.get("tokens"))), number(run.last.get("train_s"))
    settings = _settings(run)
    return replace(
        row,
        state=verdict.verdict_of(run).state,
        step=run.done,
        steps=shown(run.config, run.done, tokens, train_s) if run.config else f"{run.done}",
        tokens=tokens,
        validation=best,
        at_step=at_step,
        last=finite[-1][0] if finite else None,
        settings={it: settings.get(it) for it in differ} if settings else {},
        note=visible("; ".join([*run.wrong, *["no evaluation yet"] * (not finite)])),
    )


def as_text(it: Table, width: int = 0) -> str:
    """The table, in columns that fit `width` characters; 0: in one piece, however wide.

    What does not fit follows below, behind the names of the runs.
    """
    lines = [it.head, *map(it.cells, it.rows)]
    marks = ["  ", *("* " if row.best else "  " for row in it.rows)]
    lines = [[mark + name, *rest] for mark, (name, *rest) in zip(marks, lines, strict=True)]
    sizes = [2 + max(map(len, column)) for column in zip(*lines, strict=True)]
    blocks = [[0]]
    for column, size in enumerate(sizes[1:], 1):
        if 0 < width < size + sum(sizes[i] for i in blocks[-1]) - 2 and len(blocks[-1]) > 1:
            blocks.append([0])
        blocks[-1].append(column)
    texts = [
        "\n".join("".join(line[i].ljust(sizes[i]) for i in block).rstrip() for line in lines)
        for block in blocks
    ]
    best = "* best" if any(row.best for row in it.rows) else ""
    notes = [best, it.caption, *(f"{row.run}: {row.note}" for row in it.rows if row.note)]
    return "\n\n".join([*texts, "\n".join(filter(None, notes))]).rstrip()


def as_objects(it: Table) -> list[dict[str, Any]]:
    """A flat object for each row, for programs, with a field for each setting that differs."""
    rows = [{**vars(row), "path": str(row.path), "measure": it.measure} for row in it.rows]
    known = [dict.fromkeys(it.settings) | row.pop("settings") for row in rows]
    return [{"run": row["run"], **some, **row} for row, some in zip(rows, known, strict=True)]
