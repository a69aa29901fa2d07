"""The page's sections about one run, as rows of text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from gptddp.config import FIELDS
from gptddp.errors import visible, visible_lines
from gptddp.report import happenings, side_by_side, verdict
from gptddp.report.life_records import number
from gptddp.report.run_record import RunRecord
from gptddp.run import owners
from gptddp.units import amount, clock, duration, many, percent, size, value

MOST_ROWS = 60  # of a table
MOST_SAMPLES = 12
MOST_TEXT = 10_000  # characters of a traceback
Pairs = list[tuple[str, str]]  # a name and its value
Table = dict[str, Any]


def _table(
    head: str, rows: Sequence[Sequence[Any]], caption: str = "", most: int = MOST_ROWS
) -> Table:
    """A table from column headings, separated by `|`, and its last `most` rows of cells."""
    cells = [[visible_lines(cell) for cell in row] for row in rows[-most:]]
    more = len(rows) - len(cells)
    return {"head": head.split("|"), "rows": cells, "caption": caption, "more": more}


def compared(it: side_by_side.Table) -> Table:
    """The runs side by side, with a mark for the best ones."""
    found = _table("|".join(it.head), list(map(it.cells, it.rows)), it.caption, len(it.rows))
    return {**found, "best": [row["best"] for row in it.rows]}


def sections(run: RunRecord, name: str) -> dict[str, Any]:
    """All sections, for the template."""
    found = verdict.verdict_of(run)
    return {
        "name": visible(name),
        "path": visible(run.path),
        "state": found.state,
        "verdict": visible(verdict.sentences(run, found)),
        "tiles": tiles(run, found.state),
        "wrong": [visible(it) for it in run.wrong],
        "activities": activities(run),
        "lives": lives(run, found.state),
        "checkpoints": checkpoints(run),
        "events": _table("step|what", [[f"{at:,}", it] for at, it in happenings.others(run)]),
        "samples": samples(run),
        "faults": [_fault(it) for it in run.faults],
        "proof": proof(run),
        "environment": environment(run),
        "config": configuration(run),
    }


def tiles(run: RunRecord, state: str) -> Pairs:
    """The most important numbers."""
    rows = [("steps", f"{run.step:,}"), ("tokens", amount(number(run.last.get("tokens"))))]
    if state == "running" and (left_s := verdict.left_s(run)) is not None:
        rows.append(("ETA", duration(int(left_s))))
    labels = {"training loss": "loss", "validation loss": "val_loss", "bits per byte": "val_bpb"}
    for label, field in labels.items():
        if (known := run.newest(field)) is not None:
            rows.append((label, value(known)))
    if (part := owners.goodput(run.owners.so_far())) is not None:
        rows.append(("goodput", percent(part)))
    rows.append(("lives (starts)", f"{len(run.lives):,}"))
    if run.lives:
        rows.append(("ranks (last life)", f"{run.lives[-1].world_size:,}"))
        rows.append(("elapsed", duration(verdict.elapsed(run))))
    return rows


def activities(run: RunRecord) -> list[dict[str, Any]]:
    """The categories of rank-seconds, as in gptddp_run_lost_seconds; training is the goodput."""
    seconds = run.owners.so_far()
    total = sum(seconds.values())
    return [
        {
            "name": name,
            "what": owners.ABOUT[name],
            "seconds": f"{it:,.1f}",
            "share": percent(it / total),
            "colour": owners.OWNERS.index(name),
        }
        for name, it in sorted(seconds.items(), key=lambda it: (it[0] != "training", -it[1]))
        if it
    ]


def lives(run: RunRecord, state: str) -> Table:
    """The start and the end of the newest lives."""
    rows = []
    for i, life in enumerate(run.lives):
        following = run.lives[i + 1] if i + 1 < len(run.lives) else None
        over = happenings.cause(life, following) if following else life.cause and life.why_over
        going = {"running": "running", "finished": "the last step"}.get(state, "not recorded")
        took = duration(life.lost_s) + " after a stop" * (i > 0 and not life.follows_fault)
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
            ]
        )
    head = "life|began (UTC)|ranks|from step|from|ended by|pause before|split of the pause"
    return _table(f"{head}|steps done again", rows)


def checkpoints(run: RunRecord) -> Table:
    """The existing checkpoints, with the duration of their saves."""
    events = run.events_of("checkpoint")
    saves = {str(it.get("name")): it for it in events if not it.get("error")}
    rows, took_s = [], ("stall_s", "write_s")
    for it in reversed(run.checkpoints):
        save = saves.get(it.name, {})
        took = [duration(number(save[key])) if key in save else "" for key in took_s]
        saved = clock(it.time) if it.time else ""
        about = it.name, f"{it.step:,}", it.state, size(it.nbytes), saved
        rows.append([*about, *took, it.reason])
    failed = len([it for it in events if it.get("error")])
    there = f"{len(rows):,} {'exists' if len(rows) == 1 else 'exist'} now"
    caption = f"{many(len(saves), 'save')} in all, {failed:,} failed; {there}."
    head = "name|step|state|size|saved (UTC)|training paused|write time|problem"
    return _table(head, rows, caption)


def samples(run: RunRecord) -> Table:
    """Texts of the model, evenly spaced up to the last one, at most MOST_SAMPLES."""
    steps = list(run.samples)[:: -1 - len(run.samples) // MOST_SAMPLES][::-1]
    return _table("step|text", [[f"{it:,}", run.samples[it][:MOST_TEXT]] for it in steps])


def _fault(record: dict[str, Any]) -> tuple[str, str]:
    """An error of the trainer: a line with its place, and its traceback."""
    at = f"step {record['step']}, life {record['generation']}, rank {record['rank']}"
    what = visible(f"{at} ({record.get('pod')}): {record.get('error')}")
    return what, visible_lines(record.get("traceback", ""))[-MOST_TEXT:]


def proof(run: RunRecord) -> Pairs:
    """The fingerprints, and the completeness of the log."""
    rows = []
    if chain := run.last.get("chain_fp"):
        rows.append((f"chain_fp, of the rows of steps 1 to {run.step:,}", visible(chain)))
    if run.state_fp:
        step, found = run.state_fp
        rows.append((f"state_fp, of all tensors after step {step:,}", visible(found)))
    if run.step:
        whole = "complete: every step once, each follows from the one before"
        rows.append(("the log", "has errors, see above" if run.log_wrong else whole))
    return rows


def environment(run: RunRecord) -> Pairs:
    """The environment of the newest life; a machine's text has the version of torch."""
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
    return _table("field|value|meaning", rows, most=len(FIELDS))
