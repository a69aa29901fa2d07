"""The plots over the steps, as plain data for Plotly; the page adds the colours."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptddp.errors import visible
from gptddp.report import happenings
from gptddp.report.run_record import RunRecord

MOST_POINTS = 1000  # buckets of a series, with two points each
MOST_LIVES = 200  # marks of the newest lives
MANY = 600  # steps; the lines of longer runs are smoothed by default
NOISY = ("loss", "tok_s", "grad_norm", "data_wait_s")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
# field of the log, heading, unit of the axis, explanation
PANELS = (
    ("loss", "Loss", "nats a token", "The mean loss of each step and of each evaluation."),
    ("val_bpb", "Bits per byte", "bits a byte",
     "The validation loss in a unit that does not depend on the tokenizer."),
    ("tok_s", "Throughput", "tokens/s", "Tokens per second of all ranks, for each step."),
    ("world_size", "World size", "ranks", "The number of ranks that train together."),
    ("lr", "Learning rate", "", "The rate of each step; the optimizer's other rates follow it."),
    ("grad_norm", "Gradient norm", "", "The norm of each step before clipping."),
    ("data_wait_s", "Wait for data", "seconds", "Rank 0's wait for the rows of each step."),
)  # fmt: skip

Trace = dict[str, Any]


def panels(runs: Sequence[RunRecord], names: Sequence[str]) -> list[dict[str, Any]]:
    """One figure for each field of the log that any run has; `names`: of the runs."""
    labels = [visible(name) if len(runs) > 1 else "" for name in names]
    found = []
    for name, title, unit, note in PANELS:
        lines = [it for i in range(len(runs)) for it in _lines(name, runs, i, labels[i])]
        if not lines:
            continue
        marks = [it for i in range(len(runs)) for it in _marks(name, runs, i, labels[i])]
        low = 0 if name in ("world_size", "data_wait_s", "tok_s") else None
        figure = {"id": name, "title": title, "unit": unit, "note": note, "low": low}
        found.append({**figure, "traces": lines + marks})
    return found


def _at(run: RunRecord, steps: Sequence[int]) -> dict[str, list[float]]:
    """The place of steps on each x axis; time: seconds since the run began. [] if unknown."""
    found: dict[str, list[float]] = {"steps": list(steps), "tokens": [], "time": []}
    began = run.lives[0].began if run.lives else min(run.series["time"], default=0.0)
    for name, zero in (("tokens", 0.0), ("time", began)):
        if len(run.steps) and np.isfinite(run.series[name]).all():
            found[name] = (np.interp(steps, run.steps, run.series[name]) - zero).round(1).tolist()
    return found


def _lines(name: str, runs: Sequence[RunRecord], number: int, label: str) -> list[Trace]:
    """The line of a run, thinned; for the loss, also the line of the evaluations."""
    fields = {"loss": "training", "val_loss": "validation"} if name == "loss" else {name: ""}
    run, most = runs[number], max(100, MOST_POINTS // len(runs))
    found = []
    for field, what in fields.items():
        values, of_evaluations = run.series[field], field.startswith("val_")
        known = [i for i, it in enumerate(values) if math.isfinite(it) or not of_evaluations]
        picked = [known[i] for i in thin([values[i] for i in known], most)]
        if not picked:
            continue
        trace = {
            "x": _at(run, [run.steps[i] for i in picked]),
            "y": [values[i] if math.isfinite(values[i]) else None for i in picked],
            "name": _name(label, what),
            "run": number,
            "kind": "points" if of_evaluations else "line",
            "colour": number if len(runs) > 1 else int(of_evaluations),
            # six colours and six dashes: the seventh run has the first run's colour, another dash
            "dash": DASHES[number // len(DASHES) % len(DASHES)],
            "symbol": SYMBOLS[(number + number // len(SYMBOLS)) % len(SYMBOLS)],
            "steps": name == "world_size",
        }
        if name in NOISY and not of_evaluations:  # the page smooths the means, or all points
            thinned = means(values, most) if len(picked) < len(values) else []
            x = _at(run, [run.steps[i] for i, _ in thinned])
            trace["means"] = {"x": x, "y": [it for _, it in thinned]}
        found.append(trace)
    return found


def _name(*parts: str) -> str:
    return ": ".join(filter(None, parts)) or "value"


def thin(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """The indices of the points to draw, in order: the least and the largest of each bucket.

    Buckets have equally many points. The first and the last finite point are kept too. NaN and
    infinity are skipped, except if all points are drawn: then they are gaps in the line.
    """
    numbers = np.asarray(values, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(numbers))
    if not len(finite):
        return []
    if len(numbers) <= 2 * most:
        return list(range(len(numbers)))
    kept = set(finite[[0, -1]].tolist())
    for bucket in filter(len, np.array_split(finite, most)):
        kept |= {int(bucket[numbers[bucket].argmin()]), int(bucket[numbers[bucket].argmax()])}
    return sorted(kept)


def means(values: Sequence[float], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """The mean of each bucket of a thinned series, at the index in its middle."""
    numbers = np.asarray(values, dtype=np.float64)
    buckets = filter(len, np.array_split(np.flatnonzero(np.isfinite(numbers)), most))
    return [(int(it[len(it) // 2]), float(numbers[it].mean())) for it in buckets]


def _marks(name: str, runs: Sequence[RunRecord], number: int, label: str) -> list[Trace]:
    """The marks of restarts and, below them, of other events, each with a text."""
    run, others = runs[number], happenings.others(runs[number])
    shown = [("restart", happenings.restarts(run)[-MOST_LIVES:], 0.97, "triangle-down")]
    if name == "loss":
        shown.append(("event", others[:: 1 + len(others) // MOST_LIVES], 0.85, "diamond"))
    return [
        {
            "kind": "mark",
            "mark": kind,
            "symbol": symbol,
            "colour": number if len(runs) > 1 else 2,
            "x": _at(run, [step for step, _ in notes]),
            "y": [height] * len(notes),
            "text": [text for _, text in notes],
            "name": _name(label, kind),
            "run": number,
        }
        for kind, notes, height, symbol in shown
        if notes
    ]
