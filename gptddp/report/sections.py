"""The sections of the page about one run, as rows of text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptddp.config import FIELDS
from gptddp.errors import visible_lines
from gptddp.report import figures, story
from gptddp.report.lives import Life, number, why_over
from gptddp.report.read import Run
from gptddp.report.tables import Table as Phases
from gptddp.report.tables import of_rank_0
from gptddp.report.words import amount, cell, clock, duration, many, percent, size, value
from gptddp.run.owners import OWNERS

_BEGINNING = ("init", "restore", "warmup")
_BUSY = ("step", "redo", "data_wait")
MOST_ROWS = 60  # of a table
MOST_SAMPLES = 12
MOST_TEXT = 10_000  # characters of a traceback
ABOUT = {
    "training": "steps that no life had finished before",
    "waiting": "for a slower rank",
    "data": "waiting for the rows of a step",
    "evaluation": "measuring the validation loss",
    "checkpoint": "what saves take from training, and the last save of a life",
    "redone": "steps that a lost life had finished",
    "detection": "from the last step until a fault was noticed",
    "reforming": "until all ranks of the next life had begun",
    "reload": "of a life after a fault, until its first step was done",
    "start": "of a first life, or one after a stop, until its first step was done",
    "stopped": "nobody trained, and nobody was meant to",
    "books": "log, ledger and metrics, on rank 0",
    "other": "the rest of the loop",
}


@dataclasses.dataclass
class Table:
    """A heading of each column, and rows of as many cells. more: rows that are left out."""

    head: list[str]
    rows: list[list[str]]
    more: int = 0
    caption: str = ""


def of(run: Run, name: str) -> dict[str, Any]:
    """All sections, for the template."""
    state = story.state_of(run)
    return {
        "name": cell(name),
        "path": cell(run.path),
        "quoted": cell(run.quoted),
        "state": state.word,
        "verdict": cell(story.verdict(run, state)),
        "next": [(cell(a), cell(b)) for a, b in story.next_commands(run, state)],
        "tiles": tiles(run),
        "wrong": [cell(it) for it in run.wrong],
        "goodput": goodput(run),
        "lives": lives(run),
        "ranks": slowest(run),
        "checkpoints": checkpoints(run),
        "events": events(run),
        "samples": samples(run),
        "faults": [
            (cell(_fault(it)), visible_lines(it.get("traceback", ""))[-MOST_TEXT:])
            for it in run.faults
        ],
        "proof": proof(run),
        "environment": environment(run),
        "config": configuration(run),
    }


def tiles(run: Run) -> list[tuple[str, str]]:
    """The few numbers to see first."""
    last, found = run.last, story.goodput(run)
    rows = [("steps", f"{run.step:,}"), ("tokens", amount(number(last.get("tokens"))))]
    for label, field in (
        ("training loss", "loss"),
        ("validation loss", "val_loss"),
        ("bits per byte", "val_bpb"),
    ):
        known = next((it for it in reversed(run.series[field]) if math.isfinite(it)), None)
        if known is not None:
            rows.append((label, value(known)))
    if found:
        rows.append(("goodput", percent(found[0])))
        if (own := story.without_stops(found[1])) is not None:
            rows.append(("without stops", percent(own)))
    rows.append(("lives (starts)", f"{len(run.lives):,}"))
    if run.lives:
        rows.append(("ranks at last", f"{run.lives[-1].world_size:,}"))
        rows.append(("elapsed", duration(story.elapsed(run))))
    return rows


def goodput(run: Run) -> dict[str, Any] | None:
    """Each owner of rank-seconds, and what the goodput would be without it."""
    if not (found := story.goodput(run)):
        return None
    part, seconds = found
    total = sum(seconds.values())
    stopped, rows = seconds["stopped"], []
    for owner in sorted(seconds, key=lambda it: (it != "training", -seconds[it])):
        if not (it := seconds[owner]):
            continue
        without = ["", ""]
        if owner != "training":
            running = total - it - stopped * (owner != "stopped")
            without = [percent(seconds["training"] / left) for left in (total - it, running)]
        width, colour = 100 * it / total, OWNERS.index(owner)
        row: dict[str, Any] = {
            "owner": owner,
            "what": ABOUT.get(owner, ""),
            "seconds": f"{it:,.1f}",
        }
        row |= {"share": percent(it / total), "without": without[: 1 + bool(stopped)]}
        rows.append({**row, "width": f"{width:.2f}", "colour": colour})
    parts = {"part": percent(part), "total": f"{total:,.1f}", "stopped": bool(stopped)}
    return {**parts, "rows": rows}


def lives(run: Run) -> Table:
    """How each life began and ended."""
    head = ["life", "began (UTC)", "ranks", "from step", "from", "ended by"]
    head += ["until the first new step", "split", "steps again", "saves", "slowest rank"]
    lives = run.lives
    shown = list(zip([None, *lives], lives, [*lives[1:], None], strict=False))[-MOST_ROWS:]
    rows = []
    for before, life, following in shown:
        total = number((life.recovered or {}).get("total_s"))
        saves = f"{life.saves}" + (f", {life.failed_saves} failed" if life.failed_saves else "")
        stop = before is not None and not life.follows_fault
        row = [str(life.generation), clock(life.began), f"{life.world_size}"]
        row += [value(life.start.get("step")), cell(life.start.get("source", ""))]
        row += [
            cell(figures.cause(life, following) if following else ending(run, life)),
            (duration(total) + " after a stop" * stop) if total else "",
        ]
        row += [", ".join(figures.parts(life)), value(life.start.get("redo")), saves]
        slow = ""
        if found := busy(run, life):
            rank = int(found[1].argmax())
            slow = f"{rank}: {over_median(found[1], rank)}"
        rows.append([*row, slow])
    return Table(head, rows, max(0, len(run.lives) - MOST_ROWS))


def ending(run: Run, life: Life) -> str:
    """How the newest life ended."""
    if life.cause:
        return why_over(life)
    word = story.state_of(run).word
    return {"running": "it runs", "finished": "the last step"}.get(word, "no word")


def busy(run: Run, life: Life) -> tuple[Phases, np.ndarray] | None:
    """Seconds of each rank by phase, and those in which it computed or waited for its rows.

    None for a life of one rank, and for one that has not told of steps.
    """
    tables = run.tables.of_life(life, run.is_over(life)) if life.world_size > 1 else []
    if not tables or not tables[-1].keys() & {"step", "redo"}:
        return None
    zero = np.zeros(life.world_size)
    return tables[-1], sum((tables[-1].get(it, zero) for it in _BUSY), zero)


def over_median(seconds: np.ndarray, rank: int) -> str:
    """`+8.7 %`: how much longer a rank was busy than the middle one."""
    middle = float(np.median(seconds))
    return f"{100 * (seconds[rank] / middle - 1):+.1f} %" if middle else ""


def slowest(run: Run) -> Table | None:
    """The ranks of the newest life that has told of steps, the longest busy first."""
    for life in reversed(run.lives):
        if not (found := busy(run, life)):
            continue
        table, seconds = found
        zero = np.zeros(life.world_size)
        order = np.argsort(-seconds, kind="stable")
        rows = []
        for rank in order[:MOST_ROWS]:
            others = (table.get(it, zero)[rank] for it in ("data_wait", "wait", "eval"))
            begin = sum(table.get(it, zero)[rank] for it in _BEGINNING)
            row = [f"rank {rank}", f"{seconds[rank]:,.1f}", over_median(seconds, rank)]
            rows.append([*row, *(f"{it:,.1f}" for it in (*others, begin))])
        head = ["rank", "busy, s", "to the median", "of it for data, s", "waited for others, s"]
        head += ["evaluation, s", "start, s"]
        caption = f"Life {life.generation}, its first {duration(of_rank_0(table))}."
        if len(run.lives) > 1:
            caption += " Of other lives, the table of lives names the slowest."
        return Table(head, rows, max(0, len(order) - MOST_ROWS), caption)
    return None


def checkpoints(run: Run) -> Table:
    """Those that are there, newest first, and what their saves took."""
    saves = {str(it.get("name")): it for it in run.events_of("checkpoint") if not it.get("error")}
    rows = []
    for it in run.checkpoints:
        save = saves.get(it.name, {})
        took = [
            duration(number(save[key])) if key in save else "" for key in ("stall_s", "write_s")
        ]
        rows.append(
            [
                cell(it.name),
                f"{it.step:,}",
                it.state,
                size(it.nbytes),
                clock(it.time) if it.time else "",
                *took,
                cell(it.reason),
            ]
        )
    head = [
        "name",
        "step",
        "state",
        "size",
        "saved (UTC)",
        "taken from training",
        "written in",
        "what is wrong",
    ]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    done = len(saves)
    failed = len([it for it in run.events_of("checkpoint") if it.get("error")])
    there = f"{len(rows):,} {'is' if len(rows) == 1 else 'are'} there now"
    caption = f"{many(done, 'save')} in all, {failed:,} failed; {there}."
    return Table(head, rows[:MOST_ROWS], max(0, len(rows) - MOST_ROWS), caption)


def events(run: Run) -> Table:
    """What else has happened."""
    rows = [[f"{step:,}", what] for step, what in figures.other_notes(run)]
    return Table(["step", "what"], rows[-MOST_ROWS:], max(0, len(rows) - MOST_ROWS))


def samples(run: Run) -> Table:
    """Texts of the model, from its first evaluation to its last: as many of them as can be read."""
    steps = list(run.samples)
    count = min(len(steps), MOST_SAMPLES)
    kept = [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]
    rows = [[f"{it:,}", visible_lines(run.samples[it])[:MOST_TEXT]] for it in kept]
    return Table(["step", "text"], rows, len(steps) - count)


def _fault(record: dict[str, Any]) -> str:
    at = f"step {record['step']}, life {record['generation']}, rank {record['rank']}"
    return f"{at} ({record.get('pod')}): {record.get('error')}"


def proof(run: Run) -> list[tuple[str, str]]:
    """The fingerprints, and whether the log is whole."""
    rows = []
    if chain := run.last.get("chain_fp"):
        rows.append((f"chain_fp, of the rows of steps 1 to {run.step:,}", cell(chain)))
    if run.state_fp:
        rows.append(
            (f"state_fp, of all tensors after step {run.state_fp[0]:,}", cell(run.state_fp[1]))
        )
    whole = not run.log_wrong
    if run.step:
        said = (
            "every step once, each follows from the one before" if whole else "not whole, see above"
        )
        rows.append(("the log", said))
    if run.config and run.config.reduce:
        what = "fast: the same rows, not the same bits at another world size"
        if run.config.reduce == "exact":
            what = "exact: the same bits at any world size"
        rows.append(("sums of gradients", what))
    return rows


def environment(run: Run) -> list[tuple[str, str]]:
    """What the newest life ran on."""
    rows = [
        ("gptddp", run.about.get("version")),
        ("torch", run.about.get("torch")),
        ("run id", run.about.get("run_id")),
    ]
    if run.lives:
        start = run.lives[-1].start
        rows += [
            ("device", start.get("device")),
            ("ranks", start.get("world_size")),
            ("pods or nodes", start.get("nodes")),
        ]
        machines = start.get("machines")
        rows += [
            ("machine", it) for it in (machines[:MOST_ROWS] if isinstance(machines, list) else [])
        ]
    return [(name, cell(it)) for name, it in rows if it is not None]


def configuration(run: Run) -> Table:
    """Every field of the run, with its help."""
    if run.config is None:
        return Table([], [])
    found = dataclasses.asdict(run.config)
    rows = [[name, cell(found[name]), FIELDS[name].metadata["help"]] for name in found]
    return Table(["field", "value", "what it is"], [it for it in rows if it[1] != "None"])


def compared(runs: Sequence[Run], names: Sequence[str]) -> Table:
    """The runs beside each other."""
    found = [dict(tiles(run)) for run in runs]
    longest = sorted(found, key=len, reverse=True)
    keys = list(dict.fromkeys(key for of_run in longest for key in of_run))
    rows = []
    for run, name, of_run in zip(runs, names, found, strict=True):
        rows.append([cell(name), story.state_of(run).word, *(of_run.get(key, "") for key in keys)])
    caption = ""
    if len({run.dataset for run in runs} - {""}) > 1:
        caption = (
            "Not all are of the same dataset. Where tokenizers differ, losses (nats a token) "
            "cannot be compared; where the validation texts are the same, bits per byte can."
        )
    return Table(["run", "state", *keys], rows, caption=caption)
