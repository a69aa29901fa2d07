"""The summary of a run, from its ledger: the sums in the newest start, and the events after it.

Each start has the configuration in force and the sums of all events before it. So the ledger is
read from its end back to the newest start, however many lives the run has had. A start has a hash:
if it does not match, the start is skipped, and the start before it counts.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from gptddp.budget import BUDGETS
from gptddp.config import shown
from gptddp.run import branches
from gptddp.run.directory import LEDGER, log_generations
from gptddp.run.json_lines import MOST_STEPS, lines_back, parse_event
from gptddp.run.owners import Owners

COMMITS = 8  # names that are kept: enough to list those that a directory lacks
LEFT_OUT = 8  # unusable lines that are listed
HASH = "xxh3_64"  # field of a start


@dataclass
class Summary:
    """The sums of a run's events so far. Adding an event twice changes nothing."""

    # of the newest start
    life: int = 0  # its generation; 0: no life has begun
    run_id: str | None = None
    config: dict[str, Any] | None = None  # in force
    dataset: str | None = None  # the hash of the data
    code: str | None = None  # the hash of its own code; None: the installed code
    ended: bool = False  # is its end recorded?
    differed: str = ""  # its ranks that differed, if any did

    # of all lives; see SUMS
    bytes: int = 0  # of the ledger that have been read
    generation: int = 0  # the highest of any event
    void: int = 0  # the last generation in which ranks diverged
    commits: list[str] = field(default_factory=list)  # the newest, since the run began at step 0
    began_time: float | None = None  # unix seconds: of the first life
    saved_time: float | None = None  # unix seconds: when the last committed save began
    quarantine: list[dict[str, Any]] = field(default_factory=list)  # step, row_groups, names
    # the last life with --from-scratch: its job; since: the life that began at step 0 again, if any
    from_scratch: dict[str, Any] | None = None
    # the last stop because a budget was used up: generation, step, tokens, train_s, cause, results
    finished: dict[str, Any] | None = None
    branches: list[dict[str, Any]] = field(default_factory=list)  # see branches.py
    owners: Owners = field(default_factory=Owners)  # rank-seconds by category

    # not sums
    left_out: list[str] = field(default_factory=list)  # unusable lines of the ledger, and why

    @property
    def is_finished(self) -> bool:
        """Did a budget end the newest life?"""
        return self.finished is not None and self.finished["generation"] == self.life

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one more event of the ledger; any exception means that it is invalid."""
        kind, generation = event["event"], event["generation"]
        self.generation = max(self.generation, generation)
        if self.began_time is None:
            self.began_time = float(event.get("run_began") or event["time"])
        if kind == "start":
            self._begin(event)
        elif kind in ("stop", "end") and generation == self.life:
            self.ended = True
        if kind == "stop" and event.get("cause") in BUDGETS:
            self._finish(event)
        elif kind == "diverged":
            self.void = max(self.void, generation)
            if generation == self.life and not self.differed:
                self.differed = ", ".join(event.get("names", ()))
        elif kind == "checkpoint" and not event.get("error"):
            began = event["time"] - float(event.get("write_s") or 0.0)
            self.saved_time = began if self.saved_time is None else max(self.saved_time, began)
            name = event.get("name")
            if isinstance(name, str) and name not in self.commits:
                self.commits = [*self.commits, name][-COMMITS:]
        elif kind == "branch":
            self._go_back(branches.checked(event))
        elif kind == "quarantine":
            decision = _decision(event)
            if decision not in self.quarantine:
                self.quarantine.append(decision)
        self.owners.add(event)

    def _begin(self, start: Mapping[str, Any]) -> None:
        if (generation := start["generation"]) <= self.life:
            return
        if isinstance(given := start.get("from_scratch"), dict):
            again = start.get("source") == "scratch" and generation > 1
            since = generation if again else (self.from_scratch or {}).get("since")
            self.from_scratch = {**given, "since": since}
        self.life, self.ended, self.differed = generation, False, ""
        self.run_id, self.config = start.get("run_id"), start.get("config")
        self.dataset, self.code = start.get("dataset"), start.get("code")
        if start.get("source") == "scratch":  # earlier checkpoints no longer belong to the run
            self.commits, self.finished = [], None

    def _finish(self, stop: Mapping[str, Any]) -> None:
        if stop["generation"] >= (self.finished or {}).get("generation", 0):
            done = {"generation": stop["generation"], "step": int(stop["step"])}
            done |= {"tokens": int(stop.get("tokens") or 0), "cause": stop["cause"]}
            done |= {"train_s": float(stop.get("train_s") or 0.0), "results": stop.get("results")}
            self.finished = done

    def sums(self) -> dict[str, Any]:
        """The sums that a start has of all events before it."""
        return {name: getattr(self, name) for name in SUMS} | {
            "owners": dataclasses.asdict(self.owners)
        }

    def _go_back(self, branch: dict[str, Any]) -> None:
        """Forget the checkpoints that do not belong to the new branch.

        The branch's configuration is in force, even if the life that began it is killed.
        """
        if branch["generation"] not in [it["generation"] for it in self.branches]:
            if branch["generation"] > self.life:
                self.config = branch["config"]
            self.branches = sorted([*self.branches, branch], key=lambda it: it["generation"])
            self.commits = [it for it in self.commits if self._is_on_way(it)]
            self.finished = None

    def _is_on_way(self, name: str) -> bool:
        step, _, generation = name.removeprefix("step-").partition(".")
        return branches.is_on(self.branches, int(generation), int(step))


SUMS = (
    *("bytes", "generation", "void", "commits", "began_time", "saved_time", "quarantine"),
    *("from_scratch", "finished", "branches", "owners"),
)


def _decision(event: Mapping[str, Any]) -> dict[str, Any]:
    """The row groups that a quarantine event excludes, and the step from which it does.

    Raises ValueError for impossible values. Only the data show whether the row groups exist.
    """
    step, groups, names = event.get("step"), event.get("row_groups"), event.get("names")
    if type(step) is not int or not 0 <= step < MOST_STEPS:
        raise ValueError(f"step is {shown(step)}: it must be a number of steps")
    if not isinstance(groups, list) or any(type(group) is not int for group in groups):
        raise ValueError(f"row_groups is {shown(groups)}: it must be a list of whole numbers")
    decision = {"step": step, "row_groups": groups}
    if isinstance(names, list) and len(names) == len(groups):
        decision["names"] = [str(name) for name in names]
    return decision


def decided(decisions: Iterable[Mapping[str, Any]], step: int) -> dict[int, list[int]]:
    """The row groups that lives excluded after `step` or more finished steps, by that number."""
    found: dict[int, list[int]] = {}
    for decision in decisions:
        if decision["step"] >= step:
            found.setdefault(decision["step"], []).extend(decision["row_groups"])
    return found


def hash_of(start: Mapping[str, Any]) -> str:
    """The hash of a start event, except for its field with the hash."""
    body = {name: value for name, value in start.items() if name != HASH}
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())


def _is_whole_start(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "start" and event.get(HASH) == hash_of(event)


def _at_start(start: Mapping[str, Any]) -> Summary:
    """The summary in an unchanged start; a newer version may have written more sums."""
    sums = start.get("sums") or {}
    known = {name: sums[name] for name in SUMS if name in sums}
    owners = known.get("owners", {})
    owners = Owners(**{it: owners[it] for it in Owners.__dataclass_fields__ if it in owners})
    found = Summary(**{**known, "owners": owners})
    found.add(start)
    return found


def read(run_dir: str | Path) -> Summary:
    """The summary of the run's ledger, from its newest start on; an empty one without a ledger.

    Reads further back if logs or events are of a newer life than that start. Raises OSError.
    """
    newest, end = max(log_generations(run_dir), default=0), 0
    lines: list[tuple[int, bytes, dict[str, Any]]] = []
    found, upto = Summary(), 0
    with contextlib.suppress(FileNotFoundError), open(Path(run_dir) / LEDGER, "rb") as ledger:
        end = ledger.seek(0, 2)
        for at, line in lines_back(ledger):
            if at < upto and found.life >= newest:
                break
            event = parse_event(line) or {}
            lines.append((at, line, event))
            newest = max(newest, event.get("generation", 0))
            if _is_whole_start(event) and event["generation"] > found.life:
                with contextlib.suppress(LookupError, TypeError, AttributeError):  # invalid sums
                    begun = _at_start(event)
                    found, upto = begun, min(begun.bytes, at)
    found.bytes = end
    for at, line, event in reversed(lines):
        if event and at >= upto:
            _count(found, event, at)
        elif at + len(line) == end:  # the line is being written
            found.bytes = at
        elif at >= upto:
            found.left_out.append(f"a line at byte {at} that is torn or not an event")
    del found.left_out[LEFT_OUT:]
    return found


def _count(found: Summary, event: dict[str, Any], at: int) -> None:
    """Count an event of the ledger, which begins at this byte; an invalid one is skipped."""
    why: Any = "it does not match its hash"
    if event["event"] != "start" or _is_whole_start(event):
        try:
            return found.add(event)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            why = error
    what = f"a {shown(event['event'])} of generation {shown(event['generation'])}"
    found.left_out.append(f"{what} at byte {at} ({why})")
