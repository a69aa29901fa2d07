"""The sections of the page about one run, as rows of text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptddp.config import FIELDS
from gptddp.errors import visible, visible_lines
from gptddp.report import happenings, verdict
from gptddp.report.life_records import LifeRecord, number
from gptddp.report.phase_tables import PhaseTable, of_rank_0
from gptddp.report.run_record import RunRecord
from gptddp.report.words import amount, clock, duration, many, percent, value
from gptddp.run.owners import ABOUT, OWNERS

_BEGINNING = ("init", "restore", "warmup")
_BUSY = ("step", "redo", "data_wait")
MOST_ROWS = 60  # of a table
MOST_SAMPLES = 12
MOST_TEXT = 10_000  # characters of a traceback
Pairs = list[tuple[str, str]]  # a name and what it is


class Table:
    """Headings of columns, and rows of cells; `more` rows are left out."""

    def __init__(
        self,
        head: str,
        rows: Sequence[Sequence[Any]],
        caption: str = "",
        most: int = MOST_ROWS,
        newest: bool = False,
    ) -> None:
        """`head`: separated by `|`. `newest`: of too many rows the last are kept."""
        shown = rows[-most:] if newest else rows[:most]
        self.head, self.caption, self.more = head.split("|"), caption, len(rows) - len(shown)
        self.rows = [[visible_lines(cell) for cell in row] for row in shown]


def sections(run: RunRecord, name: str) -> dict[str, Any]:
    """All sections, for the template."""
    found = verdict.verdict_of(run)
    commands = verdict.next_commands(run, found.state)
    return {
        "name": visible(name),
        "path": visible(run.path),
        "quoted": visible(run.quoted),
        "state": found.state,
        "verdict": visible(verdict.sentences(run, found)),
        "next": [(visible(a), visible(b)) for a, b in commands],
        "tiles": tiles(run),
        "wrong": [visible(it) for it in run.wrong],
        "goodput": goodput(run),
        "lives": lives(run, found.state),
        "ranks": slowest(run),
        "checkpoints": checkpoints(run),
        "events": events(run),
        "samples": samples(run),
        "faults": [_fault(it) for it in run.faults],
        "proof": proof(run),
        "environment": environment(run),
        "config": configuration(run),
    }


def tiles(run: RunRecord) -> Pairs:
    """The few numbers to see first."""
    rows = [("steps", f"{run.step:,}"), ("tokens", amount(number(run.last.get("tokens"))))]
    labels = {"training loss": "loss", "validation loss": "val_loss", "bits per byte": "val_bpb"}
    for label, field in labels.items():
        if known := run.newest(field):
            rows.append((label, value(known[1])))
    if found := verdict.goodput(run):
        rows.append(("goodput", percent(found[0])))
        if (own := verdict.without_stops(found[1])) is not None:
            rows.append(("without stops", percent(own)))
    rows.append(("lives (starts)", f"{len(run.lives):,}"))
    if run.lives:
        rows.append(("ranks at last", f"{run.lives[-1].world_size:,}"))
        rows.append(("elapsed", duration(verdict.elapsed(run))))
    return rows


def goodput(run: RunRecord) -> dict[str, Any] | None:
    """Each use of rank-seconds, and what the goodput would be without it."""
    if not (found := verdict.goodput(run)):
        return None
    part, seconds = found
    total, stopped, rows = sum(seconds.values()), seconds["stopped"], []
    for name in sorted(seconds, key=lambda it: (it != "training", -seconds[it])):
        if not (it := seconds[name]):
            continue
        without = ["", ""]
        if name != "training":
            running = total - it - stopped * (name != "stopped")
            without = [percent(seconds["training"] / rest) for rest in (total - it, running)]
        rows.append(
            {
                "name": name,
                "what": ABOUT[name],
                "seconds": f"{it:,.1f}",
                "share": percent(it / total),
                "without": without[: 1 + bool(stopped)],
                "width": f"{100 * it / total:.2f}",
                "colour": OWNERS.index(name),
            }
        )
    parts = {"part": percent(part), "total": f"{total:,.1f}", "stopped": bool(stopped)}
    return {**parts, "rows": rows}


def lives(run: RunRecord, state: str) -> Table:
    """How each life began and ended, the newest of them."""
    head = "life|began (UTC)|ranks|from step|from|ended by|until the first new step|split"
    rows = []
    for i, life in enumerate(run.lives):
        following = run.lives[i + 1] if i + 1 < len(run.lives) else None
        over = happenings.cause(life, following) if following else life.cause and life.why_over
        going = {"running": "it runs", "finished": "the last step"}.get(state, "no word")
        took = duration(life.lost_s) + " after a stop" * (i > 0 and not life.follows_fault)
        failed = f", {life.failed_saves} failed" if life.failed_saves else ""
        rows.append(
            [
                life.generation,
                clock(life.began),
                life.world_size,
                value(life.start.get("step")),
                life.start.get("source", ""),
                over or going,
                took if life.lost_s else "",
                ", ".join(happenings.parts(life)),
                value(life.start.get("redo")),
                f"{life.saves}{failed}",
                _slowest_of(run, life),
            ]
        )
    return Table(f"{head}|steps again|saves|slowest rank", rows, newest=True)


def events(run: RunRecord) -> Table:
    """What else has happened, the newest of it."""
    rows = [[f"{at:,}", it] for at, it in happenings.others(run)]
    return Table("step|what", rows, newest=True)


def _busy(run: RunRecord, life: LifeRecord) -> tuple[PhaseTable, np.ndarray] | None:
    """Seconds of each rank by phase, and those in which it computed or waited for its rows.

    None for a life of one rank, and for one that has not recorded steps.
    """
    tables = run.tables.of_life(life, run.is_over(life)) if life.world_size > 1 else []
    if not tables or not tables[-1].keys() & {"step", "redo"}:
        return None
    zero = np.zeros(life.world_size)
    return tables[-1], sum((tables[-1].get(it, zero) for it in _BUSY), zero)


def _slowest_of(run: RunRecord, life: LifeRecord) -> str:
    if not (found := _busy(run, life)):
        return ""
    rank = int(found[1].argmax())
    return f"{rank}: {_over_median(found[1], rank)}"


def _over_median(seconds: np.ndarray, rank: int) -> str:
    """`+8.7 %`: how much longer a rank was busy than the middle one."""
    middle = float(np.median(seconds))
    return f"{100 * (seconds[rank] / middle - 1):+.1f} %" if middle else ""


def slowest(run: RunRecord) -> Table | None:
    """The ranks of the newest life that has recorded steps, the longest busy first."""
    both = next(((it, found) for it in reversed(run.lives) if (found := _busy(run, it))), None)
    if both is None:
        return None
    life, (table, busy) = both
    zero = np.zeros(life.world_size)
    start = sum((table.get(it, zero) for it in _BEGINNING), zero)
    columns = [*(table.get(it, zero) for it in ("data_wait", "wait", "eval")), start]
    rows = [
        [f"rank {rank}", f"{busy[rank]:,.1f}", _over_median(busy, rank)]
        + [f"{it[rank]:,.1f}" for it in columns]
        for rank in np.argsort(-busy, kind="stable").tolist()
    ]
    caption = f"Life {life.generation}, its first {duration(of_rank_0(table))}."
    if len(run.lives) > 1:
        caption += " Of other lives, the table of lives names the slowest."
    head = (
        "rank|busy, s|to the median|of it for data, s|waited for others, s|evaluation, s|start, s"
    )
    return Table(head, rows, caption)


def checkpoints(run: RunRecord) -> Table:
    """Those that are there, newest first, and what their saves took."""
    events = run.events_of("checkpoint")
    saves = {str(it.get("name")): it for it in events if not it.get("error")}
    rows = []
    for it in run.checkpoints:
        save = saves.get(it.name, {})
        took = [duration(number(save[key])) if key in save else "" for key in _TOOK]
        saved = clock(it.time) if it.time else ""
        size = f"{it.nbytes / 1e6:,.1f} MB"
        rows.append([it.name, f"{it.step:,}", it.state, size, saved, *took, it.reason])
    head = "name|step|state|size|saved (UTC)|taken from training|written in"
    if any(row[-1] for row in rows):
        head += "|what is wrong"
    else:
        rows = [row[:-1] for row in rows]
    failed = len([it for it in events if it.get("error")])
    there = f"{len(rows):,} {'is' if len(rows) == 1 else 'are'} there now"
    return Table(head, rows, f"{many(len(saves), 'save')} in all, {failed:,} failed; {there}.")


_TOOK = ("stall_s", "write_s")


def samples(run: RunRecord) -> Table:
    """Texts of the model, from its first evaluation to its last: as many of them as can be read."""
    steps = list(run.samples)
    count = min(len(steps), MOST_SAMPLES)
    kept = [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]
    table = Table("step|text", [[f"{it:,}", run.samples[it][:MOST_TEXT]] for it in kept])
    table.more = len(steps) - count
    return table


def _fault(record: dict[str, Any]) -> tuple[str, str]:
    """An error of the trainer's own: where, and its traceback."""
    at = f"step {record['step']}, life {record['generation']}, rank {record['rank']}"
    what = visible(f"{at} ({record.get('pod')}): {record.get('error')}")
    return what, visible_lines(record.get("traceback", ""))[-MOST_TEXT:]


def proof(run: RunRecord) -> Pairs:
    """The fingerprints, and whether the log is whole."""
    rows = []
    if chain := run.last.get("chain_fp"):
        rows.append((f"chain_fp, of the rows of steps 1 to {run.step:,}", visible(chain)))
    if run.state_fp:
        step, found = run.state_fp
        rows.append((f"state_fp, of all tensors after step {step:,}", visible(found)))
    if run.step:
        whole = "every step once, each follows from the one before"
        rows.append(("the log", "not whole, see above" if run.log_wrong else whole))
    if run.config and run.config.reduce:
        exact = "exact: the same bits at any world size"
        fast = "fast: the same rows, not the same bits at another world size"
        rows.append(("sums of gradients", exact if run.config.reduce == "exact" else fast))
    return rows


def environment(run: RunRecord) -> Pairs:
    """What the newest life ran on; a machine says its torch."""
    start = run.lives[-1].start if run.lives else {}
    names = {"gptddp": "version", "run id": "run_id", "device": "device", "ranks": "world_size"}
    rows = [(label, start.get(name)) for label, name in {**names, "pods or nodes": "nodes"}.items()]
    machines = start.get("machines")
    rows += [("machine", it) for it in (machines[:MOST_ROWS] if isinstance(machines, list) else [])]
    return [(name, visible(it)) for name, it in rows if it is not None]


def configuration(run: RunRecord) -> Table:
    """Every field of the run, with its help."""
    values = dataclasses.asdict(run.config) if run.config else {}
    known = {name: it for name, it in values.items() if it is not None}
    rows = [[name, it, FIELDS[name].metadata["help"]] for name, it in known.items()]
    return Table("field|value|what it is", rows, most=len(rows))


def compared(runs: Sequence[RunRecord], names: Sequence[str]) -> Table:
    """The runs beside each other."""
    found = [dict(tiles(run)) for run in runs]
    keys = list(dict.fromkeys(key for it in sorted(found, key=len, reverse=True) for key in it))
    states = [verdict.verdict_of(run).state for run in runs]
    rows = [
        [name, state, *(it.get(key, "") for key in keys)]
        for name, state, it in zip(names, states, found, strict=True)
    ]
    caption = ""
    if len({run.dataset for run in runs} - {""}) > 1:
        caption = (
            "Not all are of the same dataset. Where tokenizers differ, losses (nats a token) "
            "cannot be compared; where the validation texts are the same, bits per byte can."
        )
    return Table("|".join(["run", "state", *keys]), rows, caption)
