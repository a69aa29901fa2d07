"""The history of a run, in its directory: the logs of its lives and one ledger.

`log.<generation>.jsonl` has an object a step, `ledger.jsonl` an object an event. The ledger and the
newest logs only grow. Logs of old lives are folded into few, see fold.py: there a line says in
`log` which one it comes from, if that is another than the file's.
"""

import contextlib
import errno
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gptddp.files import names_in, read_json
from gptddp.run import branches, summary
from gptddp.run.directory import CHECKPOINTS, FINISHED, LEDGER, id_of, life_of_config
from gptddp.run.json_lines import MOST_STEPS, backwards, is_generation, parse, parse_event
from gptddp.run.lines import Lines
from gptddp.run.summary import Summary

Line = Mapping[str, Any]  # of the log
Tell = Callable[[str], None]  # takes what is read now
_LOG = re.compile(r"log\.(\d{1,9})\.jsonl", re.ASCII)
# `.bad.1` may follow, or a unique suffix in `.tmp` and `.trash`.
_CHECKPOINT = re.compile(r"step-\d+\.(\d{1,9})(\..+)?", re.ASCII)

log = logging.getLogger(__name__)


class RunLog(Lines):
    """The log of one generation: `append` an object for each step. Rank 0 only.

    No step is logged before the events that `ledger` has been given before it are durable. Steps
    come in order. Where some are written again, all that follow them are: who reads backwards
    may stop at the first step that is too early.
    """

    def __init__(
        self, run_dir: str | Path, generation: int, ledger: "Ledger | None" = None
    ) -> None:
        super().__init__(log_path(run_dir, generation), ledger)
        self._steps: deque[int] = deque()  # of the lines that are not durable yet
        self._durable_step = 0

    def append(self, obj: Mapping[str, Any]) -> None:
        """Have the line of a step written, as Lines does."""
        self._steps.append(obj["step"])
        super().append(obj)

    @property
    def durable_step(self) -> int:
        """Up to which step all that was given to this log is durable; 0: nothing is."""
        for _ in range(len(self._steps) - self.waiting):
            self._durable_step = self._steps.popleft()
        first = self._steps[0] if self._steps else self._durable_step + 1
        return min(self._durable_step, first - 1)


class Ledger(Lines):
    """The events of a run over all its lives: start, restore, checkpoint, stop, fault."""

    sync_every = 1
    # a life, a late save of another pod, and a life that does not know that it is over
    shared = True

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(Path(run_dir) / LEDGER)

    def event(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event with the time in unix seconds, durable as soon as the disk allows."""
        self.append({"event": event, "time": time.time(), "generation": generation, **fields})


# -- what memory has kept --------------------------------------------------------------------------


def complete(
    run_dir: str | Path, run_log: RunLog, lines: Sequence[Mapping[str, Any]], step: int
) -> None:
    """Add to the log those of these lines, up to `step`, that no log of the run has.

    They come with a snapshot: the steps were done, but rank 0 was killed before it wrote them.
    """
    if not (lines := [line for line in lines if line["step"] <= step]):
        return
    first = lines[0]["step"]
    known = {line["step"]: line for line in history(run_dir, first - 1)}
    if first > 1 and first - 1 not in known:
        text = "the log of run %s lacks step %d, and maybe some before it: the disk was away for "
        text += "longer than memory keeps lines. The training itself has lost nothing"
        log.error(text, run_dir, first - 1)
    for i, line in enumerate(lines):
        there = known.get(line["step"], {})
        # absent, or without its evaluation, or another run's
        if line.keys() - there.keys() or there.get("chain_fp") != line.get("chain_fp"):
            for missing in lines[i:]:
                run_log.append(missing)
            return


def recover(
    run_dir: str | Path, ledger: Ledger, events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Add to the ledger those of these events that it lacks, and return them.

    They come with a snapshot too: of lives whose rank 0 was lost while the disk took nothing.
    """
    if not events:
        return []
    first, known = min(event["generation"] for event in events), list[dict[str, Any]]()
    for line in backwards_if_there(Path(run_dir) / LEDGER):
        if found := parse_event(line):
            if found["event"] == "start" and found["generation"] < first:
                break
            known.append(_untimed(found))
    missing = [event for event in events if _untimed(event) not in known]
    for event in missing:
        ledger.append(event)
    return missing


def _untimed(event: Mapping[str, Any]) -> dict[str, Any]:
    """Two ranks may have noted the same event, a moment apart."""
    return {name: value for name, value in event.items() if name != "time"}


# -- reading -----------------------------------------------------------------------------------


def log_path(run_dir: str | Path, generation: int) -> Path:
    """The log of a generation."""
    return Path(run_dir) / f"log.{generation}.jsonl"


def log_generations(run_dir: str | Path) -> list[int]:
    """The generations whose logs are there, in order."""
    return sorted(int(m[1]) for name in names_in(run_dir) if (m := _LOG.fullmatch(name)))


def _upwards(run_dir: str | Path, tell: Tell) -> Iterator[int]:
    """The generations whose logs are there, from the lowest to the highest, to be read one by one.

    Each is told: on a slow volume ten thousand of them take many minutes.

    So no line is missed in a fold: what is folded meanwhile is found in a higher log, read later.
    That may be one that was not there at the beginning: so they are listed again at the end.
    """
    highest = -1
    while more := [it for it in log_generations(run_dir) if it > highest]:
        for generation in more:
            tell(f"reading the log, life {generation}")
            yield generation
        highest = more[-1]


def history(
    run_dir: str | Path,
    first: int | None = None,
    tell: Tell = lambda _: None,
    with_left: bool = False,
) -> Iterator[dict[str, Any]]:
    """The run's steps in order, each as the highest generation that has it logged it.

    Where the newest generation has not yet come as far as one before it, the steps beyond are
    the older one's. They are valid: the rows of a step are the same in every generation, and so
    are the losses, but for rounding where the world size changed. When the newest gets there, its
    own lines take their place. Steps beyond the end of a finished run are left out: time has ended
    it earlier than the life that logged them, and they are of a branch that the run has left. So
    are those of lives before the run went back (see branches.py), but `with_left`.

    `first`: from this step on; then no more of the logs is read than that takes. `tell` is told
    which log is read.
    """
    for _, line in logged(run_dir, first, tell, with_left):
        yield line


def logged(
    run_dir: str | Path,
    first: int | None = None,
    tell: Tell = lambda _: None,
    with_left: bool = False,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of `history`, each with the generation that logged it."""
    lines: dict[int, bytes] = {}  # objects of a million steps would take a gigabyte
    logs: dict[int, int] = {}
    sizes: dict[int, int] = {}  # of the logs before they were read
    known = [] if with_left else summary.read(run_dir).branches
    for generation in _upwards(run_dir, tell):
        sizes[generation] = _size(run_dir, generation)
        own = _of_run(known, generation, lines_of(log_path(run_dir, generation), first))
        lines |= own
        logs |= dict.fromkeys(own, generation)
    for generation in sorted(sizes)[:-1]:  # did a life go on meanwhile, and then another begin?
        if _size(run_dir, generation) > sizes[generation]:
            own = _of_run(known, generation, lines_of(log_path(run_dir, generation), first))
            for step, text in own.items():
                if logs.get(step, -1) <= generation:
                    lines[step], logs[step] = text, generation
    finisher, end = _finished(Path(run_dir))
    for step in sorted(lines):
        line = parse(lines[step]) or {}
        folded = line.pop("log", None)
        life = folded if is_generation(folded) else logs[step]
        if life > finisher or step <= end:
            yield life, line


def _of_run(
    known: Sequence[branches.Branch], generation: int, lines: dict[int, bytes]
) -> dict[int, bytes]:
    """Those lines of a log, by step, that are on the run's way."""
    return {step: it for step, it in lines.items() if branches.is_on(known, generation, step)}


def _finished(run: Path) -> tuple[int, int]:
    """The life that has finished the run, and its last step; (0, 0) where none is known to."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        marker = read_json(run / FINISHED) or {}
        life, step = marker["generation"], marker["step"]
        if is_generation(life) and type(step) is int and marker["run_id"] == id_of(run):
            return life, step
    return 0, 0


def _size(run_dir: str | Path, generation: int) -> int:
    """Of a log, in bytes; 0 where it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return log_path(run_dir, generation).stat().st_size
    return 0


def is_step(line: Line) -> bool:
    """Has a line the number of a step that has been done? A foreign one may have anything."""
    return type(step := line.get("step")) is int and 0 < step < MOST_STEPS


def last_step(
    run_dir: str | Path,
    generation: int | None = None,
    below: int = MOST_STEPS,
    tell: Tell = lambda _: None,
) -> int:
    """The highest step below this one in a log, or in any, 0 where there is none.

    The last of each log is taken; from there back no more is read than that takes.
    """
    found = [0]
    for it in _upwards(run_dir, tell) if generation is None else [generation]:
        lines = map(parse, backwards_if_there(log_path(run_dir, it)))
        found.append(next((x["step"] for x in lines if x and is_step(x) and x["step"] < below), 0))
    return max(found)


def first_step(run_dir: str | Path, generation: int) -> int:
    """The step of the first line of a log, 0 where there is none. Raises OSError."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(log_path(run_dir, generation), "rb", buffering=1024) as file,
    ):
        return next((x["step"] for x in map(parse, file) if x and is_step(x)), 0)
    return 0


def lines_of(path: Path, first: int | None = None) -> dict[int, bytes]:
    """The last line of each step in one log, from `first` on. Raises OSError.

    Nothing where there is no such log: its lines are in a higher one, or it has none yet.
    """
    found: dict[int, bytes] = {}
    for line in backwards_if_there(path):
        if (obj := parse(line)) and type(step := obj.get("step")) is int:  # true is no step
            if first is not None and step < first:
                break
            found.setdefault(step, line)
    return found


def backwards_if_there(path: Path) -> Iterator[bytes]:
    """The lines of a file from its last to its first; none of a file that is not there."""
    for last_try in (False, False, True):
        try:
            yield from backwards(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            # NFS, of a file that was replaced or removed while it was read. Lines may come twice.
            if error.errno != errno.ESTALE or last_try:
                raise


def read_ledger(run_dir: str | Path) -> list[dict[str, Any]]:
    """The run's events in the order in which they were written, each once; nothing else.

    All of them: a start is content with their sum, see summary.py.
    """
    lines = list(backwards_if_there(Path(run_dir) / LEDGER))[::-1]
    return [event for line in dict.fromkeys(lines) if (event := parse_event(line))]


def life_without_start(run_dir: str | Path, ledger: Summary) -> int:
    """The newest life that has logged steps, where the ledger lacks its start; 0: it has that.

    No step is logged before it, so the end of such a ledger is lost, or all of it. Raises OSError.
    """
    newest = max(log_generations(run_dir), default=0)
    return newest if newest > ledger.life else 0


def has_older_config(run_dir: str | Path, ledger: Summary) -> bool:
    """Is the ledger's configuration older than that of config.json, which is whole?

    It is written first. So a line of it is lost or damaged then. Raises OSError.
    """
    newer = life_of_config(Path(run_dir)) >= max(1, ledger.config_life)
    return newer or life_without_start(run_dir, ledger) > 0


def has_checkpoints(run_dir: str | Path) -> bool:
    """Has the run any checkpoint, valid or not? Raises OSError."""
    return any(_CHECKPOINT.fullmatch(name) for name in names_in(Path(run_dir) / CHECKPOINTS))


def highest_generation(
    run_dir: str | Path, ledger: Summary | None = None, ignore: Collection[str] = ()
) -> int:
    """The highest generation that has left anything in the run directory; 0 for a new run.

    `ledger`: its sum, if it has been read. `ignore`: names of checkpoints that are no trace of it.
    """
    found = [0, *log_generations(run_dir)]
    checkpoints = Path(run_dir) / CHECKPOINTS
    for folder in (checkpoints, checkpoints / ".tmp", checkpoints / ".trash"):
        names = set(names_in(folder)).difference(ignore)
        found += [int(m[1]) for name in names if (m := _CHECKPOINT.fullmatch(name))]
    return max(*found, (ledger or summary.read(run_dir)).generation)
