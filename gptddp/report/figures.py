"""The plots, as figures of Plotly: traces and axes as plain data. Colours are given by the page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gptddp.report.lives import PART_NAMES, Life, moved, number, why_over
from gptddp.report.read import Run
from gptddp.report.strip import Strip
from gptddp.report.thin import MOST, means, thin
from gptddp.report.words import cell, duration, many, value
from gptddp.run.code import named

MOST_LIVES = 200  # that are shaded and marked: of more, the newest
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


def panel(name: str, title: str, unit: str, runs: Sequence[Run]) -> dict[str, Any] | None:
    """A field of the log over the steps; None where no run has any of it."""
    traces: list[dict[str, Any]] = []
    for number_, run in enumerate(runs):
        traces += _lines(name, run, number_, len(runs))
    if not traces:
        return None
    marks = [it for i, run in enumerate(runs) for it in _marks(name, run, i, len(runs))]
    low = 0 if name in ("world_size", "data_wait_s", "tok_s") else None
    return {
        "id": name,
        "title": title,
        "unit": unit,
        "x": "step",
        "low": low,
        "traces": [*traces, *marks],
        "shades": _shades(runs[0]) if len(runs) == 1 else [],
    }


def _lines(name: str, run: Run, of: int, runs: int) -> list[dict[str, Any]]:
    """The line of a run, thinned, and beside the loss of steps that of evaluations."""
    most = max(100, MOST // runs)
    found = []
    for field_, label in ((name, ""), *((("val_loss", "validation"),) if name == "loss" else ())):
        of_evaluations = field_.startswith("val_")
        values, steps = run.series[field_], run.steps
        if of_evaluations:
            known = [i for i, it in enumerate(values) if math.isfinite(it)]
            picked = [known[i] for i in thin([values[i] for i in known], most)]
        else:
            picked = thin(values, most)
        if not picked:
            continue
        trace = {
            "x": [steps[i] for i in picked],
            "y": [values[i] if math.isfinite(values[i]) else None for i in picked],
            "name": _name(run, runs, label or ("training" if name == "loss" else "")),
            "kind": "points" if of_evaluations else "line",
            "colour": of if runs > 1 else int(of_evaluations),
            # as many colours as dashes: the seventh run has the first one's colour, another dash
            "dash": DASHES[(of + of // len(DASHES)) % len(DASHES)],
            "symbol": SYMBOLS[(of + of // len(SYMBOLS)) % len(SYMBOLS)],
            "steps": name == "world_size",
            "faint": name in NOISY and not of_evaluations and len(steps) > MANY,
        }
        found.append(trace)
        if trace["faint"]:
            of_buckets = means(values, max(50, most // 4))
            n = max(1, len(steps) // max(1, len(of_buckets)))
            found.append(
                {
                    **trace,
                    "faint": False,
                    "x": [steps[i] for i, _ in of_buckets],
                    "y": [it for _, it in of_buckets],
                    "name": _name(run, runs, f"mean of {n:,} steps"),
                }
            )
    return found


def _name(run: Run, runs: int, what: str) -> str:
    return ": ".join(filter(None, (cell(run.name) if runs > 1 else "", what))) or "value"


def _shades(run: Run) -> list[dict[str, Any]]:
    """The steps of each life: from the one that it went on from to where the next one did."""
    lives = [it for it in run.lives if type(it.start.get("step")) is int][-MOST_LIVES:]
    found = []
    for i, life in enumerate(lives):
        begin = int(life.start["step"])
        end = int(lives[i + 1].start["step"]) if i + 1 < len(lives) else max(run.step, begin)
        took = number((life.recovered or {}).get("total_s"))
        note = duration(took) + (" lost" if life.follows_fault else " stopped") if took else ""
        of = {"life": life.generation, "note": note}
        found.append({**of, "begin": begin + 0.5, "end": max(end, begin) + 0.5})
    return found


def _marks(name: str, run: Run, of: int, runs: int) -> list[dict[str, Any]]:
    """Restarts above, checkpoints below, all else in between; with words for each."""
    restarts = restart_notes(run)[-MOST_LIVES:]
    found = [_mark(run, runs, of, "restart", restarts, 0.97, "triangle-down")] if restarts else []
    if name == "loss":
        saves = [
            (int(it["step"]), f"checkpoint {cell(it.get('name', ''))}")
            for it in run.events_of("checkpoint")
            if not it.get("error") and type(it.get("step")) is int
        ]
        if saves and runs == 1:
            found.append(_mark(run, runs, of, "checkpoint", _some(saves), 0.02, "line-ns-open"))
        if others := _some(other_notes(run)):
            found.append(_mark(run, runs, of, "event", others, 0.85, "diamond"))
    return found


def _some(notes: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    return [notes[i] for i in range(0, len(notes), 1 + len(notes) // MOST_LIVES)]


def _mark(
    run: Run,
    runs: int,
    of: int,
    kind: str,
    notes: Sequence[tuple[int, str]],
    height: float,
    symbol: str,
) -> dict[str, Any]:
    return {
        "kind": "mark",
        "mark": kind,
        "symbol": symbol,
        "colour": of if runs > 1 else 2,
        "x": [step for step, _ in notes],
        "y": [height] * len(notes),
        "text": [text for _, text in notes],
        "name": _name(run, runs, kind),
    }


def restart_notes(run: Run) -> list[tuple[int, str]]:
    """The step at which each life but the first went on, with cause, split and cost."""
    found = []
    for before, life in zip(run.lives, run.lives[1:], strict=False):
        step = life.start.get("step")
        if type(step) is int:
            found.append(
                (step, f"life {life.generation}: {cell(cause(before, life))}; {cost(life)}")
            )
    return found


def cause(before: Life, life: Life) -> str:
    """Why a life followed."""
    if moved(before, life):
        return "stopped by its launcher: pods came or went"
    return why_over(before)


def cost(life: Life) -> str:
    """Seconds from the last step before to the first one after, in parts, and steps done again."""
    redo = many(int(number(life.start.get("redo"))), "step") + " again"
    if not life.recovered:
        return f"no step was done; {redo}"
    total = life.recovered.get("total_s")
    return f"{duration(number(total))} ({', '.join(parts(life))}); {redo}"


def parts(life: Life) -> list[str]:
    """The split of a recovery. Nobody forms a world anew while a run is stopped."""
    told = life.recovered or {}
    names = PART_NAMES if life.follows_fault else {**PART_NAMES, "reform_s": "stopped"}
    return [
        f"{name} {duration(number(told[key]))}"
        for key, name in names.items()
        if math.isfinite(number(told.get(key), none=math.nan))
    ]


def other_notes(run: Run) -> list[tuple[int, str]]:
    """What else has happened at a step."""
    found = [(step, "skipped: loss or gradient not finite") for step in run.skipped]
    for event in run.events:
        if (what := _told(event)) and type(step := event.get("step")) is int:
            found.append((step, cell(what)[:300]))
    return sorted(found)


def _told(event: Mapping[str, Any]) -> str:
    """An event in words; "" for those that have a place of their own on the page."""
    names = ", ".join(map(str, it)) if isinstance(it := event.get("names"), list) else ""
    took = duration(number(event.get("seconds")))
    match event["event"]:
        case "changed" if event.get("field") == "code":
            return f"code: {named(event.get('old'))} -> {named(event.get('new'))}"
        case "changed":
            return f"{event.get('field')}: {event.get('old')} -> {event.get('new')}"
        case "quarantine":
            return f"left out for good: {names}"
        case "diverged":
            return f"ranks differed: {names}"
        case "checkpoint" if event.get("error"):
            return f"a save failed: {event['error']}"
        case "slow":
            return f"{event.get('name')} is slow: {number(event.get('ratio')):.1f} times the median"
        case "slow_end":
            return f"{event.get('name')} is not slow any more, after {took}"
        case "stall":
            return f"the step does not move, after {took}: {event.get('where')} ({names})"
        case "stall_end":
            return f"the step has moved, after {took}"
    return ""


def ranks(strip: Strip, owners: Sequence[str], lives: Sequence[Life]) -> dict[str, Any]:
    """The picture of the ranks, a character a pixel."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    return {
        "rows": strip.rows,
        "perRow": strip.per_row,
        "width": strip.width,
        "pieces": strip.pieces,
        "cells": ["".join(digits[it] for it in line) for line in strip.cells.tolist()],
        "owners": list(owners),
        "lives": [[it.began, it.generation] for it in lives[-MOST_LIVES:]],
    }


def table_of(figure: Mapping[str, Any], most: int = 24) -> tuple[list[str], list[list[str]]]:
    """The same numbers to be read: of each line at most so many points, its extremes among them."""
    names, cells = [], dict[int, dict[str, str]]()
    for trace in figure["traces"]:
        if trace["kind"] == "mark" or trace.get("faint"):
            continue
        names.append(trace["name"])
        values = [math.nan if it is None else it for it in trace["y"]]
        inner = thin(values, max(1, most // 4)) if len(values) > most else range(len(values))
        for i in inner:
            cells.setdefault(trace["x"][i], {})[trace["name"]] = value(trace["y"][i])
    rows = [
        [f"{step:,}", *(of.get(name, "") for name in names)] for step, of in sorted(cells.items())
    ]
    return ["step", *names], rows
