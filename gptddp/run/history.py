"""The history of a run, in its directory: the logs of its lives and one ledger.

`log.<generation>.jsonl` has one object per step, `ledger.jsonl` one per event. Both only grow and
are read from their ends: the newest log first, and only as much as needed.
"""

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptddp.files import names_in
from gptddp.run import branches, summary
from gptddp.run.directory import CHECKPOINTS, LEDGER, log_generations, log_path
from gptddp.run.json_lines import MOST_STEPS, backwards, parse, parse_event
from gptddp.run.lines import Line, Lines, as_json
from gptddp.run.summary import Summary

Tell = Callable[[str], None]  # takes a text: the log that is read now
# `.bad.1` may follow, or a unique suffix in `.tmp` and `.trash`.
_CHECKPOINT = re.compile(r"step-\d+\.(\d{1,9})(\..+)?", re.ASCII)

log = logging.getLogger(__name__)


class RunLog(Lines):
    """The log of one generation: `append` an object for each step. Rank 0 only.

    A step is written only after all earlier events of `ledger` are durable. Steps come in order.
    If a step is written again, so are all steps after it: reading backwards may stop at the first
    step that is too early.
    """

    def __init__(
        self, run_dir: str | Path, generation: int, ledger: "Ledger | None" = None
    ) -> None:
        super().__init__(log_path(run_dir, generation), ledger)
        self._steps: deque[int] = deque()  # of the lines that are not durable yet
        self._durable_step = 0

    def append(self, obj: Mapping[str, Any]) -> None:
        """Write the line of a step, as Lines does."""
        self._steps.append(obj["step"])
        super().append(obj)

    @property
    def durable_step(self) -> int:
        """All lines up to this step are durable; 0: none is."""
        for _ in range(len(self._steps) - self.waiting):
            self._durable_step = self._steps.popleft()
        first = self._steps[0] if self._steps else self._durable_step + 1
        return min(self._durable_step, first - 1)


class Ledger(Lines):
    """The events of a run over all its lives: see training/events.py."""

    sync_every = 1
    # by a life, a saver that outlives its rank 0, and a superseded life that still runs
    shared = True

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / LEDGER)

    def append(self, obj: Mapping[str, Any]) -> None:
        """Write an event, as Lines does; a start gets its hash."""
        if obj["event"] == "start":
            start = json.loads(json.dumps({name: as_json(value) for name, value in obj.items()}))
            obj = {**start, summary.HASH: summary.hash_of(start)}
        super().append(obj)

    def event(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event with the time in unix seconds, durable as soon as the disk allows."""
        self.append({"event": event, "time": time.time(), "generation": generation, **fields})


# -- lines and events kept in memory ---------------------------------------------------------------


def complete(
    run_dir: str | Path, run_log: RunLog, lines: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Add to the log the `lines` up to `step` that no log of the run has.

    Another process kept them: rank 0 was killed after these steps, before it wrote their lines.
    """
    if not (lines := [line for line in lines if line["step"] <= step]):
        return
    first = lines[0]["step"]
    known = {line["step"]: line for line in history(run_dir, first - 1, step)}
    if first > 1 and first - 1 not in known:
        text = "the log of run %s lacks step %d, and maybe earlier ones: the disk was unavailable "
        text += "for longer than memory keeps lines. The training itself lost nothing"
        log.error(text, run_dir, first - 1)
    for i, line in enumerate(lines):
        there = known.get(line["step"], {})
        # the logged line is missing, lacks the evaluation, or is another run's
        if line.keys() - there.keys() or there.get("chain_fp") != line.get("chain_fp"):
            for missing in lines[i:]:
                run_log.append(missing)
            return


def recover(
    run_dir: str | Path, ledger: Ledger, events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Add the `events` that the ledger lacks to it, and return them.

    Other processes kept them: rank 0 was lost while the disk was unavailable.
    """
    if not events:
        return []
    first, known = min(event["generation"] for event in events), list[dict[str, Any]]()
    for line in backwards(Path(run_dir) / LEDGER):
        if found := parse_event(line):
            if found["event"] == "start" and found["generation"] < first:
                break
            known.append(_untimed(found))
    missing = [event for event in events if _untimed(event) not in known]
    for event in missing:
        ledger.append(event)
    return missing


def _untimed(event: Mapping[str, Any]) -> dict[str, Any]:
    """The event without its time: two ranks may record the same event a moment apart."""
    return {name: value for name, value in event.items() if name != "time"}


# -- reading -----------------------------------------------------------------------------------


def history(
    run_dir: str | Path,
    first: int | None = None,
    last: int | None = None,
    tell: Tell = lambda _: None,
    having: bytes = b"",
) -> Iterator[dict[str, Any]]:
    """Yield the run's steps in order, each from the highest generation that logged it.

    If the newest generation is not yet as far as an older one, later steps are the older one's: the
    same rows, and the same losses except for rounding. Steps beyond the end of a finished run are
    skipped: a life logged them, but a later life ended earlier, by its time budget. So are the
    steps of discarded branches.

    `first`, `last`: only these steps; the logs are read only as far as needed. `tell` gets the name
    of each log. `having`: only lines with this text; other lines are not parsed.
    """
    for _, line in logged(run_dir, first, last, tell, having):
        yield line


def logged(
    run_dir: str | Path,
    first: int | None = None,
    last: int | None = None,
    tell: Tell = lambda _: None,
    having: bytes = b"",
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like `history`; each line with the generation that logged it."""
    lines: dict[int, bytes] = {}  # objects of a million steps would take a gigabyte
    logs: dict[int, int] = {}
    ledger = summary.read(run_dir)
    for generation in reversed(log_generations(run_dir)):
        tell(f"reading the log of generation {generation}")
        for step, line in lines_of(log_path(run_dir, generation), first, having).items():
            if step in lines or (last is not None and step > last):
                continue
            if branches.is_on(ledger.branches, generation, step):
                lines[step], logs[step] = line, generation
        # steps count from 1, even if `first` is lower or an invalid line has a lower one
        if last is not None and sum(step > 0 for step in lines) > last - max(first or 1, 1):
            break
    finished = ledger.finished or {"generation": 0, "step": 0}
    for step in sorted(lines):
        if logs[step] > finished["generation"] or step <= finished["step"]:
            yield logs[step], parse(lines[step]) or {}


def is_step(line: Line) -> bool:
    """Does a line have a valid step number? Invalid lines may have anything."""
    return type(step := line.get("step")) is int and 0 < step < MOST_STEPS


def is_done(line: Line) -> bool:
    """Does a line have a valid step number, and the time of the step, which a start needs?"""
    return is_step(line) and isinstance(line.get("time"), float)


def newest_line(run_dir: str | Path, generation: int | None = None) -> dict[str, Any] | None:
    """The last valid line of the newest log that has one, or of this generation's log."""
    generations = reversed(log_generations(run_dir)) if generation is None else [generation]
    for it in generations:
        for line in map(parse, backwards(log_path(run_dir, it))):
            if line and is_done(line):
                return line
    return None


def last_step(run_dir: str | Path, generation: int | None = None) -> int:
    """The step of `newest_line`; 0 without a line."""
    line = newest_line(run_dir, generation)
    return line["step"] if line else 0


def lines_of(path: Path, first: int | None = None, having: bytes = b"") -> dict[int, bytes]:
    """The last line of each step in one log, from `first` on; {} without a log. Raises OSError."""
    found: dict[int, bytes] = {}
    for line in backwards(path):
        if having not in line or not (obj := parse(line)):
            continue
        if type(step := obj.get("step")) is int:  # not True
            if first is not None and step < first:
                break
            found.setdefault(step, line)
    return found


def read_ledger(run_dir: str | Path) -> list[dict[str, Any]]:
    """All events of the run in the order in which they were written, each once.

    A start needs only their sums, see summary.py.
    """
    lines = list(backwards(Path(run_dir) / LEDGER))[::-1]
    return [event for line in dict.fromkeys(lines) if (event := parse_event(line))]


def newest_lost_life(run_dir: str | Path, ledger: Summary) -> int:
    """The highest generation with a log, if the ledger lacks its start, else 0. Raises OSError.

    Steps are logged only after the start, so the end of such a ledger, or all of it, is lost.
    """
    newest = max(log_generations(run_dir), default=0)
    return newest if newest > ledger.life else 0


def newest_life(run_dir: str | Path, ledger: Summary | None = None) -> int:
    """The highest generation in ledger and logs; 0 for a new run. Raises OSError.

    `ledger`: its summary, if already read.
    """
    return max(0, *log_generations(run_dir), (ledger or summary.read(run_dir)).generation)


def highest_generation(run_dir: str | Path, ledger: Summary | None = None) -> int:
    """The highest generation with any record in the run directory; 0 for a new run.

    `ledger`: its summary, if already read.
    """
    found = [newest_life(run_dir, ledger)]
    checkpoints = Path(run_dir) / CHECKPOINTS
    for folder in (checkpoints, checkpoints / ".tmp", checkpoints / ".trash"):
        found += [int(m[1]) for name in names_in(folder) if (m := _CHECKPOINT.fullmatch(name))]
    return max(found)
