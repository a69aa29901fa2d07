"""The plots over the steps, as figures of Plotly: plain data, to which the page gives colours."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptddp.errors import visible
from gptddp.report import happenings
from gptddp.report.run_record import RunRecord

MOST_POINTS = 1000  # buckets of a series; two points of each are drawn
MOST_LIVES = 200  # that are marked: of more, the newest
MANY = 600  # steps: of more, a line of means is drawn over the others
NOISY = ("loss", "tok_s", "grad_norm", "data_wait_s")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
# field of the log, heading, unit of the axis, what it says
PANELS = (
    ("loss", "Loss", "nats a token", "The mean loss of each step, and that of evaluations."),
    ("val_bpb", "Bits per byte", "bits a byte",
     "Of evaluations: the loss that does not depend on the tokenizer."),
    ("tok_s", "Throughput", "tokens/s", "Tokens of all ranks a second, step by step."),
    ("world_size", "World size", "ranks", "How many ranks trained together."),
    ("lr", "Learning rate", "", "Of each step; other rates of the optimizer follow it."),
    ("grad_norm", "Gradient norm", "", "Before it is clipped."),
    ("data_wait_s", "Wait for data", "seconds", "How long rank 0 waited for the rows of a step."),
)  # fmt: skip

Trace = dict[str, Any]


def panels(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A figure for each field of the log that any of these runs has."""
    found = []
    for name, title, unit, note in PANELS:
        lines = [it for i in range(len(runs)) for it in _lines(name, runs, i)]
        if not lines:
            continue
        marks = [it for i in range(len(runs)) for it in _marks(name, runs, i)]
        low = 0 if name in ("world_size", "data_wait_s", "tok_s") else None
        figure = {"id": name, "title": title, "unit": unit, "note": note, "low": low}
        found.append({**figure, "traces": lines + marks})
    return found


def _lines(name: str, runs: Sequence[RunRecord], number: int) -> list[Trace]:
    """The line of a run, thinned; beside the loss of steps that of evaluations."""
    fields = {"loss": "training", "val_loss": "validation"} if name == "loss" else {name: ""}
    run, most = runs[number], max(100, MOST_POINTS // len(runs))
    found = []
    for field, label in fields.items():
        values, of_evaluations = run.series[field], field.startswith("val_")
        known = [i for i, it in enumerate(values) if math.isfinite(it) or not of_evaluations]
        picked = [known[i] for i in thin([values[i] for i in known], most)]
        if not picked:
            continue
        trace = {
            "x": [run.steps[i] for i in picked],
            "y": [values[i] if math.isfinite(values[i]) else None for i in picked],
            "name": _name(runs, run, label),
            "kind": "points" if of_evaluations else "line",
            "colour": number if len(runs) > 1 else int(of_evaluations),
            # as many colours as dashes: the seventh run has the first one's colour, another dash
            "dash": DASHES[(number + number // len(DASHES)) % len(DASHES)],
            "symbol": SYMBOLS[(number + number // len(SYMBOLS)) % len(SYMBOLS)],
            "steps": name == "world_size",
            "faint": name in NOISY and not of_evaluations and len(values) > MANY,
        }
        found.append(trace)
        if trace["faint"]:
            mean = means(values, max(50, most // 4))
            points = {"x": [run.steps[i] for i, _ in mean], "y": [it for _, it in mean]}
            label = f"mean of {max(1, len(values) // max(1, len(mean))):,} steps"
            found.append({**trace, **points, "faint": False, "name": _name(runs, run, label)})
    return found


def _name(runs: Sequence[RunRecord], run: RunRecord, what: str) -> str:
    parts = (visible(run.name) if len(runs) > 1 else "", what)
    return ": ".join(filter(None, parts)) or "value"


def thin(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Which points to draw, by index, in order: of each bucket the least and the largest.

    Buckets have equally many points. The first and the last finite point of all are kept as well.
    NaN and infinity are left out, but where all points are drawn: there they are gaps of the line.
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


def means(values: Sequence[float], most: int = MOST_POINTS // 4) -> list[tuple[int, float]]:
    """The mean of each bucket, at the index in its middle; of a series that is thinned."""
    numbers = np.asarray(values, dtype=np.float64)
    buckets = filter(len, np.array_split(np.flatnonzero(np.isfinite(numbers)), most))
    return [(int(it[len(it) // 2]), float(numbers[it].mean())) for it in buckets]


def _marks(name: str, runs: Sequence[RunRecord], number: int) -> list[Trace]:
    """Restarts above, checkpoints below, all else in between; with words for each."""
    run = runs[number]
    shown = [("restart", happenings.restarts(run)[-MOST_LIVES:], 0.97, "triangle-down")]
    if name == "loss":
        if len(runs) == 1:
            saves = [it for it in run.events_of("checkpoint") if type(it.get("step")) is int]
            saved = [
                (int(it["step"]), f"checkpoint {visible(it.get('name', ''))}")
                for it in saves
                if not it.get("error")
            ]
            shown.append(("checkpoint", _some(saved), 0.02, "line-ns-open"))
        shown.append(("event", _some(happenings.others(run)), 0.85, "diamond"))
    return [
        {
            "kind": "mark",
            "mark": kind,
            "symbol": symbol,
            "colour": number if len(runs) > 1 else 2,
            "x": [step for step, _ in notes],
            "y": [height] * len(notes),
            "text": [text for _, text in notes],
            "name": _name(runs, run, kind),
        }
        for kind, notes, height, symbol in shown
        if notes
    ]


def _some(notes: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    return list(notes[:: 1 + len(notes) // MOST_LIVES])
