"""The history of a run, in its directory: one log per generation and one ledger.

`log.<generation>.jsonl` has an object a step, `ledger.jsonl` an object an event. Both only grow.
"""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptddp.files import names_in
from gptddp.run.directory import CHECKPOINTS, LEDGER
from gptddp.run.lines import Lines

_LOG = re.compile(r"log\.(\d+)\.jsonl", re.ASCII)
# `.bad.1` may follow, or a unique suffix in `.tmp` and `.trash`.
_CHECKPOINT = re.compile(r"step-\d+\.(\d+)(\..+)?", re.ASCII)


class RunLog(Lines):
    """The log of one generation: `append` an object for each step. Rank 0 only.

    No step is logged before the events that `ledger` has been given before it are durable.
    """

    def __init__(
        self, run_dir: str | Path, generation: int, ledger: "Ledger | None" = None
    ) -> None:
        super().__init__(Path(run_dir) / f"log.{generation}.jsonl", ledger)


class Ledger(Lines):
    """The events of a run over all its lives: start, restore, checkpoint, stop, fault."""

    sync_every = 1

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / LEDGER)

    def event(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event with the time in unix seconds, durable as soon as the disk allows."""
        self.append({"event": event, "time": time.time(), "generation": generation, **fields})


# -- reading -----------------------------------------------------------------------------------


def _read(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line of a file and its object, without those that a killed writer or a disk has torn."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                if isinstance(obj := json.loads(line), dict):
                    yield line, obj


def complete(
    run_dir: str | Path, log: RunLog, lines: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Add to the log those of these lines, up to `step`, that no log of the run has.

    They come with a snapshot: the steps were done, but rank 0 was killed before it wrote them.
    """
    if not lines:  # the usual case: the whole history need not be read
        return
    known = {line["step"] for line in history(run_dir)}
    for line in lines:
        if line["step"] not in known and line["step"] <= step:
            log.append(line)


def history(run_dir: str | Path) -> Iterator[dict[str, Any]]:
    """The run's steps in order, each as the highest generation that has it logged it.

    Where the newest generation has not yet come as far as one before it, the steps beyond are
    the older one's. They are valid: the rows of a step are the same in every generation, and so
    are the losses, but for rounding where the world size changed. When the newest gets there, its
    own lines take their place.
    """
    for _, line in logged(run_dir):
        yield line


def logged(run_dir: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of `history`, each with the generation that logged it."""
    logs = [(int(m[1]), name) for name in names_in(run_dir) if (m := _LOG.fullmatch(name))]
    # as text: objects of a million steps would take a gigabyte
    lines: dict[int, tuple[int, bytes]] = {}
    for generation, name in sorted(logs):
        for line, obj in _read(Path(run_dir) / name):
            if isinstance(step := obj.get("step"), int):
                lines[step] = generation, line
    for step in sorted(lines):
        yield lines[step][0], json.loads(lines[step][1])


def read_ledger(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's events in the order in which they were written, each once; nothing else."""

    def is_event(it: dict[str, Any]) -> bool:
        event, time, generation = (it.get(key) for key in ("event", "time", "generation"))
        return isinstance(event, str) and isinstance(time, float) and isinstance(generation, int)

    lines = _read(Path(run_dir) / LEDGER)
    return list({line: event for line, event in lines if is_event(event)}.values())


def highest_generation(
    run_dir: str | Path, events: Sequence[Mapping[str, Any]] | None = None
) -> int:
    """The highest generation that has left anything in the run directory; 0 for a new run.

    `events`: those of its ledger, if they have been read.
    """
    found = [0]
    for name in names_in(run_dir):
        if match := _LOG.fullmatch(name):
            found.append(int(match[1]))
    checkpoints = Path(run_dir) / CHECKPOINTS
    for folder in (checkpoints, checkpoints / ".tmp", checkpoints / ".trash"):
        found += [int(m[1]) for name in names_in(folder) if (m := _CHECKPOINT.fullmatch(name))]
    events = read_ledger(run_dir) if events is None else events
    found += [event["generation"] for event in events]
    return max(found)


def void_generation(events: Sequence[Mapping[str, Any]]) -> int:
    """The last generation in which ranks have diverged: no snapshot up to it is used."""
    return max((e["generation"] for e in events if e["event"] == "diverged"), default=0)
