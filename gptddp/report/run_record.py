"""Read all data of a run for the page: log, ledger, checkpoints, errors, samples.

Counts are not computed again here: rank-seconds are from the sums of the ledger, steps from the
code of `gptddp log`, checkpoints from the code of `gptddp checkpoints`.
"""

import contextlib
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptddp.checkpoint.retention import Status, list_checkpoints
from gptddp.config import Config, with_preset
from gptddp.errors import ConfigError
from gptddp.files import read_json
from gptddp.flags import from_saved
from gptddp.report.life_records import LifeRecord, WorldRecord, lives_of, number
from gptddp.run import log_check, summary
from gptddp.run.directory import FAULTS, LEDGER, SAMPLES, log_generations
from gptddp.run.history import history, is_step, last_step, logged, read_ledger
from gptddp.run.json_lines import parse
from gptddp.run.owners import Owners

SERIES = (
    *("loss", "val_loss", "val_bpb", "tok_s", "world_size", "lr", "grad_norm", "data_wait_s"),
    *("tokens", "time"),
)
MOST_FAULTS = 20


@dataclass
class RunRecord:
    """One run. Times are unix seconds; each series has one number for each of `steps`."""

    path: Path
    events: list[dict[str, Any]]
    checkpoints: list[Status] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)  # errors of the trainer
    samples: dict[int, str] = field(default_factory=dict)  # texts, by step
    wrong: list[str] = field(default_factory=list)  # problems with its files
    dataset: str = ""  # the hash of the data; "": unknown
    log_wrong: bool = False  # does the log have problems?
    config: Config | None = None
    lives: list[LifeRecord] = field(default_factory=list)
    worlds: list[WorldRecord] = field(default_factory=list)
    owners: Owners = field(default_factory=Owners)
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    series: "dict[str, array[float]]" = field(
        default_factory=lambda: {name: array("d") for name in SERIES}
    )
    skipped: list[int] = field(default_factory=list)  # steps
    last: dict[str, Any] = field(default_factory=dict)  # the last line
    state_fp: tuple[int, str] | None = None  # the newest, and its step

    @property
    def step(self) -> int:
        """The last step of the log; 0: none."""
        return self.steps[-1] if self.steps else 0

    @property
    def done(self) -> int:
        """The last step that was done, by log or ledger."""
        ends = [it.stop or it.end for it in self.lives[-1:]]
        return max([self.step, *(int(number(it.get("step"))) for it in ends)])

    def newest(self, name: str) -> float | None:
        """The last finite number in this series."""
        return next(filter(math.isfinite, reversed(self.series[name])), None)

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """The events of this kind, in order."""
        return [it for it in self.events if it["event"] == kind]


def read(path: Path) -> RunRecord:
    """All that the page needs of one run. Raises OSError."""
    run = RunRecord(path, read_ledger(path), list_checkpoints(path), _faults(path), samples(path))
    newest = _read_log(run)
    _read_lives(run, newest)
    return run


def read_briefly(path: Path) -> RunRecord:
    """A run with only its evaluations and last steps; the log is not checked. Raises OSError."""
    run = RunRecord(path, read_ledger(path))
    _read_lives(run)
    most = run.config.max_skipped if run.config else 0
    found = [*history(path, having=b'"val_loss"'), *history(path, last_step(path) - most)]
    lines = {line["step"]: line for line in found if is_step(line)}
    for step in sorted(lines):
        _add(run, lines[step])
    if 0 < run.step < run.done:
        run.wrong.append(f"its log ends at step {run.step}, but {run.done} steps are done")
    return run


def _read_lives(run: RunRecord, *newest: dict[str, Any]) -> None:
    """Add the data of the ledger, and the event `newest` of its newest life, from the log."""
    path = run.path
    run.wrong += [f"{path / LEDGER}: skipped: {it}" for it in summary.read(path).left_out]
    run.lives, run.worlds, run.owners = lives_of([*run.events, *newest])
    if not run.lives and log_generations(path):
        run.wrong.append(
            f"{path / LEDGER} has no life, but the log of {path} has steps: lives, restarts and "
            "rank-seconds are unknown: put the ledger back from a backup"
        )
    recorded = [it for life in run.lives if isinstance(it := life.start.get("config"), dict)]
    run.dataset = str(run.lives[-1].start.get("dataset", "")) if run.lives else ""
    if recorded:
        try:
            config = from_saved(path / LEDGER, recorded[-1])
            run.config = with_preset(config, accelerator=False)
        except ConfigError as error:
            run.wrong.append(str(error))


def _read_log(run: RunRecord) -> dict[str, Any]:
    """Add every step once to the series, and the errors of the log.

    Returns the last phases in the log, as an event that has them.
    """
    check, newest = log_check.LogCheck(run.path), {}
    for life, line in logged(run.path):
        check.add(life, line)
        if not is_step(line):
            continue
        _add(run, line)
        if isinstance(found := line.get("state_fp"), str):
            run.state_fp = line["step"], found
        if "phases" in line:
            newest = {"generation": life, "phases": line["phases"]}
    if wrong := check.found():
        run.wrong.append(log_check.not_whole(run.path, wrong))
        run.log_wrong = True
    return {"event": "checkpoint", "generation": 0, **newest}


def _add(run: RunRecord, line: dict[str, Any]) -> None:
    """Add one more step to the series."""
    run.steps.append(line["step"])
    for name, series in run.series.items():
        series.append(number(line.get(name), none=math.nan))
    if line.get("loss", 0) is None:
        run.skipped.append(line["step"])
    run.last = line


def samples(path: Path) -> dict[int, str]:
    """The texts that rank 0 has written, by step: each from the newest life with that step."""
    found: dict[int, tuple[int, str]] = {}
    with contextlib.suppress(OSError), (path / SAMPLES).open("rb") as file:
        for it in filter(None, map(parse, file)):
            step, life, text = it.get("step"), it.get("generation"), it.get("text")
            if not (type(life) is type(step) is int and isinstance(text, str)):
                continue
            if life >= found.get(step, (0, ""))[0]:
                found[step] = life, text
    return {step: text for step, (_, text) in sorted(found.items())}


def _faults(path: Path) -> list[dict[str, Any]]:
    """The newest errors of the trainer, as recorded."""
    found = []
    for file in (path / FAULTS).glob("*.*.*.json"):
        with contextlib.suppress(OSError, ValueError):
            numbers = list(map(int, file.name.split(".")[:3]))
            record = read_json(file)
            if isinstance(record, dict) and isinstance(record.get("time"), float):
                at = dict(zip(("step", "generation", "rank"), numbers, strict=True))
                found.append({**record, **at})
    return sorted(found, key=lambda it: it["time"])[-MOST_FAULTS:]
