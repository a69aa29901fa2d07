"""Is the log of a run whole, and is all of it this run's?

`chain_fp` of a step folds its `batch_fp` into that of the step before, so each line follows from
the one before it, or one of them is not what was written. A log of another run, which follows in
itself, has another `chain_fp` than the ledger has for the same step; one of the same rows with
other numbers has another `state_fp`. The training uses neither, as it goes on from checkpoints.
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
    "put what is missing back from a backup, and move a log of another run away. The training has "
    "lost nothing, as it goes on from checkpoints"
)
_SHOWN = 3  # gaps, and lines that are wrong
PRINTED = ("start", "checkpoint", "stop")  # events that give a step its fingerprints
PRINTS = ("batch_fp", "chain_fp", "state_fp")


class LogCheck:
    """Made before a history is read; `add` takes each of its lines, in order."""

    def __init__(self, run_dir: str | Path) -> None:
        """Raises OSError."""
        self.prints = lineage(read_ledger(run_dir))
        self._gaps: list[tuple[int, int]] = []
        self._wrong: list[str] = []
        self._step, self._generation = 0, 0  # of the line before
        self._chain: int | None = 0  # there; None where it cannot be told

    def add(self, generation: int, line: Line) -> None:
        """One more line, and the generation that logged it."""
        step, batch, chain = line.get("step"), _print(line, "batch_fp"), _print(line, "chain_fp")
        if type(step) is not int or not is_step(line):
            self._wrong.append(f"generation {generation} has a line of step {shown(step)}")
            return
        name, before = f"step {step} (generation {generation})", self._chain
        if step > self._step + 1:
            self._gaps.append((self._step + 1, step - 1))
            before = None
        if batch is None or chain is None:
            self._wrong.append(f"{name} has not the fingerprints of a step")
        elif before is not None and fold(before, batch) != chain:
            last = f"step {self._step} (generation {self._generation})"
            after = last if self._step else "the beginning of a run"
            self._wrong.append(f"{name} does not follow from {after}")
        other = (it for it, there in self.prints.get(step, ()) if line.get(it) not in (None, there))
        for field in dict.fromkeys(other):
            self._wrong.append(f"{name} has another {field} than {LEDGER}")
        self._step, self._generation, self._chain = step, generation, chain

    def found(self) -> str | None:
        """After the last line: what is not as it should be; None where all is."""
        gaps = list(self._gaps)
        if (end := max(self.prints, default=0)) > self._step:
            gaps.append((self._step + 1, end))
        parts = [f"it lacks {gap_text(gaps)}"] if gaps else []
        parts += self._wrong[:_SHOWN]
        if (more := len(self._wrong) - _SHOWN) > 0:
            parts.append(f"and {more} more lines")
        return "; ".join(parts) or None


def not_whole(run_dir: str | Path, wrong: str) -> str:
    """What has been found, with the run and the fix."""
    return f"the log of run {run_dir} is not whole, or not all of it this run's: {wrong}: {_FIX}"


def gap_text(gaps: Iterable[tuple[int, int]]) -> str:
    """`steps 5 to 6, 9`: from the first to the last step of each, the first three of them."""
    gaps = list(gaps)
    shown = [f"{a} to {b}" if a < b else f"{a}" for a, b in gaps[:_SHOWN]]
    more = f" and {len(gaps) - _SHOWN} more" if len(gaps) > _SHOWN else ""
    many = len(gaps) > 1 or gaps[0][0] < gaps[0][1]
    return f"step{'s' if many else ''} {', '.join(shown)}{more}"


def lineage(events: Iterable[Mapping[str, Any]]) -> dict[int, list[tuple[str, Any]]]:
    """Steps of the run, and each fingerprint that its starts, saves and stops give them.

    As the ledger has them: what is no fingerprint is no step's. A life leaves all that lies beyond
    the step that it begins from. An event may stand behind those of newer lives, if a full disk or
    the saver of a lost rank 0 has put it off.
    """
    known: dict[int, list[tuple[str, Any]]] = {}
    in_order = sorted(events, key=lambda event: event["generation"])
    ways = branches.find(in_order)
    for _, group in groupby(in_order, key=lambda event: event["generation"]):
        own = [it for it in group if it["event"] in PRINTED and not it.get("error")]
        start = next((it["step"] for it in own if it["event"] == "start" and is_done(it)), None)
        if start is not None:  # a run that begins anew may have another state of step 0
            known = {step: it for step, it in known.items() if start and step <= start}
        for event in filter(is_done, own):
            on_way = branches.is_on(ways, event["generation"], event["step"])
            if event["step"] >= (start or 0) and on_way:
                prints = [(it, event[it]) for it in PRINTS if event.get(it) is not None]
                known.setdefault(event["step"], []).extend(prints)
    return dict(sorted(known.items()))


def is_done(event: Mapping[str, Any]) -> bool:
    """Does an event say how many steps were done? A foreign one may have anything."""
    return type(step := event.get("step")) is int and 0 <= step < MOST_STEPS


def _print(line: Line, name: str) -> int | None:
    text = line.get(name)
    if isinstance(text, str) and FINGERPRINT.fullmatch(text):
        return int(text, 16)
    return None
