"""Compare runs: the best first, with settings that differ. `gptddp runs`, and top of the page."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.budget import shown
from gptddp.errors import visible
from gptddp.files import explain
from gptddp.flags import of_run
from gptddp.report import verdict
from gptddp.report.life_records import number
from gptddp.report.run_record import RunRecord, read_briefly
from gptddp.run.directory import CHECKPOINTS, FAULTS, is_run
from gptddp.units import amount, value

DEPTH = 3  # levels of folders below the given one
OTHER_DATA = (
    "The runs have different datasets. If tokenizers differ, losses (nats a token) cannot be "
    "compared; if the validation texts are the same, bits per byte can."
)
_NO_RUNS = (CHECKPOINTS, FAULTS, "lost+found")  # folders

# For programs: run, path, best, state (of `Verdict`, or unreadable), step, progress, tokens, the
# name of the compared measure, its least value (None: not evaluated), the step of that, its newest
# value, the settings that differ, and a note of problems and missing data.
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Runs, the best first; runs without an evaluation come last."""

    measure: str  # val_loss or val_bpb
    settings: list[str]  # fields with different values; `data` and `code`, by their hashes
    rows: list[Row]
    caption: str  # why numbers cannot be compared, or ""

    @property
    def head(self) -> list[str]:
        """The columns: first the best value and the settings that differ."""
        return ["run", f"best {self.measure}", *self.settings, "last", "state", "step", "tokens"]

    def cells(self, row: Row) -> list[str]:
        """A row as text; values are not cut."""
        settings = [visible(row.get(it, "?")) or "none" for it in self.settings]
        end = [value(row["last"]), row["state"], row["progress"], amount(row["tokens"])]
        return [row["run"], value(row["least"]), *settings, *end]


def find(folder: Path) -> Iterator[Path]:
    """The run directories in a folder or the folder itself, and folders that cannot be read."""
    closed: list[OSError] = []
    for name, inner, _ in os.walk(folder, onerror=closed.append, followlinks=True):
        deep = len(Path(name).parts) - len(folder.parts) >= DEPTH
        hidden = [it for it in inner if deep or it.startswith(".") or it in _NO_RUNS]
        inner[:] = sorted(set(inner) - set(hidden))
        try:
            found = is_run(Path(name))
        except OSError:
            found = True  # `side_by_side` reports why it cannot be read
        if found:
            yield Path(name)
    yield from (Path(it.filename) for it in closed if Path(it.filename) != folder)


def side_by_side(runs: Sequence[Path]) -> Table:
    """The table of runs in any state; the row of an unreadable run has the reason."""
    return table_of(runs, list(map(_read, runs)))


def table_of(runs: Sequence[Path], read: Sequence[RunRecord | OSError]) -> Table:
    """The table of runs; `read`: the record of each, or the error."""
    known = [it for it in read if isinstance(it, RunRecord)]
    measure, caption = _measure(known)
    every = [it for it in map(_settings, known) if it]
    fields = dict.fromkeys(name for it in every for name in it)
    differ = [name for name in fields if len({str(it.get(name)) for it in every}) > 1]
    rows = [
        {"run": name, "path": str(path), "best": False, **_row(run, measure, differ)}
        for name, path, run in zip(names_of(runs), runs, read, strict=True)
    ]
    rows.sort(key=lambda it: math.inf if it["least"] is None else it["least"])
    comparable = measure == "val_bpb" or not caption
    if comparable and sum(it["least"] is not None for it in rows) > 1:
        for row in rows:  # several are the best if they are equal to the last digit
            row["best"] = row["least"] == rows[0]["least"]
    return Table(measure, differ, rows, caption)


def _read(path: Path) -> RunRecord | OSError:
    try:
        return read_briefly(path)
    except OSError as error:
        return error


def names_of(runs: Sequence[Path]) -> list[str]:
    """Unique names for these paths: folder names, or paths relative to their common folder."""
    paths = [path.resolve() for path in runs]
    if len({path.name for path in paths}) == len(paths):
        return [visible(path.name) for path in paths]
    above = os.path.commonpath([path.parent for path in paths])
    return [visible(path.relative_to(above)) for path in paths]


def _measure(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """The field of the log by which to compare runs, and a caption about it."""
    if len({run.dataset for run in runs} - {""}) < 2:
        return "val_loss", ""
    evaluated = [run for run in runs if run.newest("val_loss") is not None]
    by_bytes = all(run.newest("val_bpb") is not None for run in evaluated)
    return "val_bpb" if by_bytes else "val_loss", OTHER_DATA


def _settings(run: RunRecord) -> dict[str, Any]:
    """The settings that decide a run, without paths and other values of a start; {}: unknown."""
    if run.config is None:
        return {}
    code = str(run.lives[-1].start.get("code") or "")
    return {**of_run(run.config), "data": run.dataset[:8], "code": code[:8]}


def _row(run: RunRecord | OSError, measure: str, differ: Sequence[str]) -> Row:
    row: Row = {"state": "unreadable", "step": 0, "progress": "", "tokens": 0, "measure": measure}
    row |= {"least": None, "at_step": None, "last": None}
    if isinstance(run, OSError):
        return {**row, "note": visible(explain(run))}
    pairs = zip(run.series[measure], run.steps, strict=True)
    finite = [it for it in pairs if math.isfinite(it[0])]
    if finite:
        row["least"], row["at_step"] = min(finite)
        row["last"] = finite[-1][0]
    tokens, train_s = int(number(run.last.get("tokens"))), number(run.last.get("train_s"))
    progress = shown(run.config, run.done, tokens, train_s) if run.config else str(run.done)
    row |= {"state": verdict.verdict_of(run).state, "step": run.done}
    row |= {"progress": progress, "tokens": tokens}
    settings, notes = _settings(run), [*run.wrong, *["no evaluation yet"] * (not finite)]
    row |= {it: settings.get(it) for it in differ if settings}
    return row | {"note": visible("; ".join(notes))}


def as_text(it: Table, width: int = 0) -> str:
    """The table, in blocks of columns that fit `width` characters; 0: one block of any width.

    Each block begins with the names of the runs.
    """
    marks = ["  ", *("* " if row["best"] else "  " for row in it.rows)]
    lines = [it.head, *map(it.cells, it.rows)]
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
    notes = [f"{row['run']}: {row['note']}" for row in it.rows if row["note"]]
    notes = [*["* best"] * ("* " in marks), *filter(None, [it.caption]), *notes]
    return "\n\n".join([*texts, "\n".join(notes)]).rstrip()
