"""Everything that the page says of a run, read once: log, ledger, checkpoints, markers.

Nothing is counted here that has been counted elsewhere: rank-seconds are those of the ledger's sum,
steps those of `gptddp log`, checkpoints those of `gptddp checkpoints`.
"""

import contextlib
import math
import shlex
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptddp.checkpoint.retention import Status, list_checkpoints
from gptddp.config import Config, with_preset
from gptddp.errors import ConfigError
from gptddp.files import exists, read_json
from gptddp.flags import from_saved
from gptddp.report.lives import Life, lives_of, number
from gptddp.report.tables import Tables
from gptddp.run import log_check, summary
from gptddp.run.directory import (
    CHECKPOINTS,
    CONFIG,
    DATASET,
    FAULTS,
    FINISHED,
    LEDGER,
    SAMPLES,
    about,
    log_generations,
)
from gptddp.run.history import is_step, logged, read_ledger
from gptddp.run.json_lines import parse
from gptddp.run.owners import Owners

SERIES = ("loss", "val_loss", "val_bpb", "tok_s", "world_size", "lr", "grad_norm", "data_wait_s")
MOST_FAULTS = 20

Events = list[dict[str, Any]]


@dataclass
class Run:
    """One run. Times are unix seconds; a list of a series has a number for each of `steps`."""

    path: Path
    about: dict[str, Any]  # config.json; empty where it cannot be used
    config: Config | None
    events: Events
    lives: list[Life]
    owners: Owners
    marker: dict[str, Any] | None  # of a finished run
    checkpoints: list[Status]
    faults: list[dict[str, Any]]  # the trainer's own errors: step, generation, rank, error
    tables: Tables
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    of_life: "array[int]" = field(default_factory=lambda: array("q"))  # which life logged the step
    series: "dict[str, array[float]]" = field(
        default_factory=lambda: {name: array("d") for name in SERIES}
    )
    skipped: list[int] = field(default_factory=list)  # steps
    last: dict[str, Any] = field(default_factory=dict)  # the last line
    state_fp: tuple[int, str] | None = None  # the newest, and its step
    wrong: list[str] = field(default_factory=list)  # what of its files is not as it should be
    log_wrong: bool = False  # is the log among them?
    samples: dict[int, str] = field(default_factory=dict)  # texts, by step
    dataset: str = ""  # the hash of its manifest; "": not known

    @property
    def name(self) -> str:
        """The run directory's name."""
        return self.path.resolve().name

    @property
    def quoted(self) -> str:
        """The run directory, for a shell in any folder."""
        return shlex.quote(str(self.path.resolve()))

    @property
    def tells_seconds(self) -> bool:
        """Has any life told where its seconds went? Those of version 0.1.0 have not."""
        return any(life.phases or self.tables.of.get(life.generation) for life in self.lives)

    def is_over(self, life: Life) -> bool:
        """Has another life followed, or has it stopped?"""
        return life is not self.lives[-1] or life.stop is not None

    @property
    def step(self) -> int:
        """The last step of the log; 0: none."""
        return self.steps[-1] if self.steps else 0

    @property
    def done(self) -> int:
        """The last step that is known to be done, be the log whole or not."""
        told = [self.marker or {}, *(it.stop or it.end or {} for it in self.lives[-1:])]
        return max([self.step, *(int(number(it.get("step"))) for it in told)])

    def events_of(self, *kinds: str) -> Events:
        """The events of these kinds, in order."""
        return [it for it in self.events if it["event"] in kinds]


def is_run(path: Path) -> bool:
    """Has a folder anything of a run? Raises OSError."""
    files = (CONFIG, LEDGER, CHECKPOINTS, FINISHED)
    return any(exists(path / name) for name in files) or bool(log_generations(path))


def check(path: Path) -> Path:
    """The folder, where it is a run's. Raises ConfigError with what may be meant, OSError."""
    if is_run(path):
        return path
    if not exists(path):
        raise ConfigError(f"{path} does not exist: give the folder that --run-dir has named")
    near = [*sorted(path.glob("*/config.json")), *sorted(path.glob("volumes/runs/*/config.json"))]
    fix = "give the folder that --run-dir has named"
    if runs := [str(it.parent) for it in near if is_run(it.parent)][:3]:
        fix = f"these are: {', '.join(runs)}"
    raise ConfigError(f"{path} is not a run directory, it has neither {CONFIG} nor {LEDGER}: {fix}")


def read(path: Path, tell: Callable[[str], None] = lambda _: None) -> Run:
    """All that the page needs of one run. `tell` is told what is read. Raises OSError."""
    wrong: list[str] = []
    whole, config = {}, None
    try:
        whole = about(path)
    except ConfigError as error:
        wrong.append(str(error))
    sums = summary.read(path)
    wrong += [f"{path / LEDGER}: left out: {it}" for it in sums.left_out]
    with contextlib.suppress(ConfigError):  # the ledger is written first
        values = sums.config or whole.get("config")
        if values:
            config = with_preset(from_saved(path / LEDGER, values), accelerator=False)
    events = read_ledger(path)
    run = Run(
        path=path,
        about=whole,
        config=config,
        events=events,
        lives=lives_of(events),
        owners=sums.owners,
        marker=_marker(path, whole, wrong),
        checkpoints=list_checkpoints(path),
        faults=_faults(path),
        tables=Tables(),
        wrong=wrong,
    )
    with contextlib.suppress(ValueError, LookupError, TypeError):
        began: Any = read_json(path / DATASET)
        run.dataset = str(began["sha256"])
    run.samples = _samples(path)
    _read_log(run, tell)
    run.tables.tell(run.owners)
    return run


def _read_log(run: Run, tell: Callable[[str], None]) -> None:
    """Every step once, into the series; what of the log is wrong is told."""
    check = log_check.LogCheck(run.path)
    for life, line in logged(run.path, tell=tell):
        check.add(life, line)
        if not is_step(line):
            continue
        run.steps.append(line["step"])
        run.of_life.append(life)
        for name, series in run.series.items():
            series.append(number(line.get(name), none=math.nan))
        if line.get("loss", 0) is None:
            run.skipped.append(line["step"])
        if isinstance(found := line.get("state_fp"), str):
            run.state_fp = line["step"], found
        if isinstance(phases := line.get("phases"), dict):
            run.tables.add(life, phases)
        run.last = line
    if run.steps and not run.lives:
        run.wrong.append(
            f"{run.path / LEDGER} knows of no life of {run.path}, whose log has steps: lives, "
            "restarts and seconds are not known: put it back from a backup"
        )
    if wrong := check.found():
        run.wrong.append(log_check.told(run.path, wrong))
        run.log_wrong = True


def _marker(path: Path, whole: Mapping[str, Any], wrong: list[str]) -> dict[str, Any] | None:
    """finished.json, where it is this run's."""
    try:
        marker = read_json(path / FINISHED)
    except ValueError as error:
        wrong.append(f"{error}: remove it, and give the run's command again, which writes it anew")
        return None
    ours = isinstance(marker, dict) and marker.get("run_id") in (None, whole.get("run_id"))
    return marker if ours else None


def _samples(path: Path) -> dict[int, str]:
    """The texts that rank 0 has written, by step: of several lives the newest's."""
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
    """The newest errors of the trainer's own, as they were recorded."""
    found = []
    for file in (path / FAULTS).glob("*.*.*.json"):
        with contextlib.suppress(OSError, ValueError):
            numbers = list(map(int, file.name.split(".")[:3]))
            record = read_json(file)
            if isinstance(record, dict) and isinstance(record.get("time"), float):
                of = dict(zip(("step", "generation", "rank"), numbers, strict=True))
                found.append({**record, **of})
    return sorted(found, key=lambda it: it["time"])[-MOST_FAULTS:]
