"""Write the measurements of the tests into docs/faults.md: `python tests/faults/table.py FILE...`.

The text of the page stays, and so does a table for which the files have no measurements.
"""

import json
import math
import re
import statistics
import sys
from pathlib import Path

import torch

from gptddp.distributed.hardware import machine

DOCS = Path(__file__).parents[2] / "docs/faults.md"
STEP = "the others retry the step in flight"
RESUME = "training resumes from the newest checkpoint"
LEASE = "[lease](internals.md#the-lease-one-job-at-a-time)"
# The rows of the summary: what breaks; what happens ("": the last part of the measured text); the
# numbers of the faults in this row; words that select their measurements.
SUMMARY = [
    ("A worker process is killed", STEP, (1, 19, 38), "killed"),
    ("A pod is killed", STEP, (2, 3, 4, 33, 35), ": retry"),
    ("Several pods, but not all, are killed one after another", STEP, (8,), "retry"),
    ("All pods are killed one after another", f"{RESUME}; seconds from the pods' return", (8,),
     "resume"),
    ("All pods are killed at once", RESUME, (4, 6), "all pods"),
    ("A pod or a network link falls silent", "the majority continues without it", (13, 15, 17),
     "dropped"),
    ("Half of the pods fall silent", f"the half that gets the run's {LEASE} continues", (13, 17),
     "lease"),
    ("Pods are added or removed", "all finish the step and continue", (30, 10), ""),
    *((f"Random kills every {every} s", "", (7,), f"every {every} s")
      for every in (10, 3)),
]  # fmt: skip


def seconds(values: list[float | None]) -> str:
    real = [value for value in values if value is not None and not math.isnan(value)]
    return f"{(it := statistics.median(real)):.{1 if it >= 10 else 2}f}" if real else ""


def on_cluster(its: list[dict]) -> list[str]:
    """The cells of a fault on a cluster: medians."""
    names = ("seconds", "pause_s", "back_s", "load")
    return [seconds([it[name] for it in its]) for name in names]


def grouped(measured: list[dict], where: str | None) -> dict[tuple, list[dict]]:
    """The measurements made there, by number and name of the fault: one table row each."""
    rows: dict[tuple, list[dict]] = {}
    for it in sorted(measured, key=lambda it: it.get("fault", 0)):
        if it.get("where") == where:
            rows.setdefault((it.get("fault"), it["what"]), []).append(it)
    return rows


def summary(rows: dict[tuple, list[dict]]) -> list[str]:
    """The measured rows of the summary, each with its smallest and its largest median."""
    lines = []
    for what, happens, numbers, words in SUMMARY:
        found = [
            its for (number, name), its in rows.items()
            if number in numbers and words in f"{name}: {its[-1]['happens']}"
        ]  # fmt: skip
        medians = (seconds([it["seconds"] for it in its]) for its in found)
        times = sorted(filter(None, medians), key=float)
        if times:
            span = times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"
            redone = max(it["redone"] for its in found for it in its)
            again = f"up to {redone}" if redone else "0"
            happens = happens or found[-1][-1]["happens"].rpartition("; ")[2]
            lines.append(f"| {what} | {happens} | {span} | {again} |\n")
    return lines


def page(measured: list[dict], old: str) -> str:
    """The whole page; a table without measurements keeps the rows of the old page."""
    here, there = grouped(measured, None), grouped(measured, "cluster")

    def cost(its: list[dict], between: str = "") -> str:
        return (
            f"{seconds([it['seconds'] for it in its])} | {between}{max(it['redone'] for it in its)}"
        )

    tables = {
        "| what breaks |": summary(here),
        "| # | fault | what happens |": [
            f"| {number} | {what} | {its[-1]['happens']} | "
            + cost(its, f"{seconds([it['back_s'] for it in its])} | ")
            + " |\n"
            for (number, what), its in here.items()
        ],
        "| fault on a cluster |": [
            f"| {what} | {len(its)} | {' | '.join(on_cluster(its))} |\n"
            for (_, what), its in there.items()
        ],
    }
    for head, rows in tables.items():
        table = re.compile(rf"^({re.escape(head)}.*\n.*\n)(?:\|.*\n)+", re.M)
        assert len(table.findall(old)) == 1, head
        if rows:
            old = table.sub(lambda it, rows=rows: it[1] + "".join(rows), old)
    this = machine(torch.device("cpu")) if here else r"\1"
    return re.sub(r"(?<=two cores \()(.*)(?=\): four pods)", this, old)


def main() -> None:
    files = [path for path in map(Path, sys.argv[1:]) if path.exists()]
    lines = [line for path in files for line in path.read_text().splitlines()]
    DOCS.write_text(page([json.loads(line) for line in lines], DOCS.read_text()))


if __name__ == "__main__":
    main()
