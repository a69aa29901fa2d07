"""Check that the log of a run is complete, and that all of it belongs to this run.

The `chain_fp` of a step folds its `batch_fp` into the `chain_fp` of the previous step, so each line
follows from the line before it, unless one of them was changed. The log of another run is
consistent, but its `chain_fp` differs from the ledger's; with the same rows but other numbers, its
`state_fp` differs. The training does not use the log: it continues from checkpoints.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from gptddp.config import shown
from gptddp.run import branches
from gptddp.run.directory import LEDGER
from gptddp.run.history import is_step, read_ledger
from gptddp.run.json_lines import MOST_STEPS
from gptddp.run.lines import Line
from gptddp.run.progress import FINGERPRINT, fold

_FIX = (
    "put missing logs back from a backup, and move logs of other runs away. The training lost "
    "nothing, as it continues from checkpoints"
)
_SHOWN = 3  # gaps and wrong lines in a message
PRINTED = ("start", "checkpoint", "stop")  # events with the fingerprints of a step
PRINTS = ("batch_fp", "chain_fp", "state_fp")


class LogCheck:
    """Create it before a history is read, then `add` each line, in order."""

    def __init__(self, run_dir: str | Path) -> None:
        """Raises OSError."""
        self.prints = lineage(read_ledger(run_dir))
        self._gaps: list[tuple[int, int]] = []
        self._wrong: list[str] = []
        self._step, self._generation = 0, 0  # of the line before
        self._chain: int | None = 0  # of the line before; None: unknown

    def add(self, generation: int, line: Line) -> None:
        """Check one more line, which `generation` logged."""
        step, batch, chain = line.get("step"), _print(line, "batch_fp"), _print(line, "chain_fp")
        if type(step) is not int or not is_step(line):
            self._wrong.append(f"generation {generation} has a line of invalid step {shown(step)}")
            return
        name, before = f"step {step} (generation {generation})", self._chain
        if step > self._step + 1:
            self._gaps.append((self._step + 1, step - 1))
            before = None
        if batch is None or chain is None:
            self._wrong.append(f"{name} lacks valid fingerprints")
        elif before is not None and fold(before, batch) != chain:
            last = f"step {self._step} (generation {self._generation})"
            after = last if self._step else "the beginning of the run"
            self._wrong.append(f"{name} does not follow from {after}")
        other = (it for it, there in self.prints.get(step, ()) if line.get(it) not in (None, there))
        for field in dict.fromkeys(other):
            self._wrong.append(f"{name} has another {field} than {LEDGER}")
        self._step, self._generation, self._chain = step, generation, chain

    def found(self) -> str | None:
        """After the last line: all errors; None if there are none."""
        gaps = list(self._gaps)
        if (end := max(self.prints, default=0)) > self._step:
            gaps.append((self._step + 1, end))
        parts = [f"it lacks {gap_text(gaps)}"] if gaps else []
        parts += self._wrong[:_SHOWN]
        if (more := len(self._wrong) - _SHOWN) > 0:
            parts.append(f"and {more} more lines")
        return "; ".join(parts) or None


def not_whole(run_dir: str | Path, wrong: str) -> str:
    """The message for the errors, with the run and the fix."""
    return f"the log of run {run_dir} is incomplete, or has lines of another run: {wrong}: {_FIX}"


def gap_text(gaps: Iterable[tuple[int, int]]) -> str:
    """`steps 5 to 6, 9`: the first and last step of each gap, for the first three gaps."""
    gaps = list(gaps)
    shown = [f"{a} to {b}" if a < b else f"{a}" for a, b in gaps[:_SHOWN]]
    more = f" and {len(gaps) - _SHOWN} more" if len(gaps) > _SHOWN else ""
    many = len(gaps) > 1 or gaps[0][0] < gaps[0][1]
    return f"step{'s' if many else ''} {', '.join(shown)}{more}"


def lineage(events: Iterable[Mapping[str, Any]]) -> dict[int, list[tuple[str, Any]]]:
    """The steps of the run, each with the fingerprints in its starts, saves and stops.

    The values are not checked: an invalid fingerprint matches no step. A life discards all steps
    beyond the one that it begins from. An event may come after events of newer lives, if a full
    disk or the saver of a lost rank 0 delayed it.
    """
    known: dict[int, list[tuple[str, Any]]] = {}
    in_order = sorted(events, key=lambda event: event["generation"])
    ways = branches.find(in_order)
    for _, group in groupby(in_order, key=lambda event: event["generation"]):
        own = [it for it in group if it["event"] in PRINTED and not it.get("error")]
        start = next((it["step"] for it in own if it["event"] == "start" and is_done(it)), None)
        if start is not None:  # a run from scratch may have another state of step 0
            known = {step: it for step, it in known.items() if start and step <= start}
        for event in filter(is_done, own):
            on_way = branches.is_on(ways, event["generation"], event["step"])
            if event["step"] >= (start or 0) and on_way:
                prints = [(it, event[it]) for it in PRINTS if event.get(it) is not None]
                known.setdefault(event["step"], []).extend(prints)
    return dict(sorted(known.items()))


def is_done(event: Mapping[str, Any]) -> bool:
    """Does an event have a valid number of steps? Invalid events may have anything."""
    return type(step := event.get("step")) is int and 0 <= step < MOST_STEPS


def _print(line: Line, name: str) -> int | None:
    text = line.get(name)
    if isinstance(text, str) and FINGERPRINT.fullmatch(text):
        return int(text, 16)
    return None
