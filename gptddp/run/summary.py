"""What a start needs of the ledger, as a sum: ten thousand lives are not read at each start.

`ledger.summary.json` is the sum of the ledger up to some byte of it; what came after is added. It
is a cache and nothing else: one that is missing, torn or of another ledger is made again.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from gptddp.config import shown
from gptddp.files import read_json, write_json_atomic
from gptddp.run import branches
from gptddp.run.directory import LEDGER, SUMMARY
from gptddp.run.json_lines import MOST_STEPS, parse_event
from gptddp.run.owners import Owners

COMMITS = 32  # whose names are kept: enough to say what a directory lacks
NEWEST = 8  # slow ranks and stalls that are kept
LEFT_OUT = 8  # lines that cannot be used, and are named
STALE_BYTES = 64 << 10  # of the ledger that a start reads on top; then the file is written anew
_PROOF_BYTES = 4096  # before that byte of the ledger, whose hash says that it is the same ledger


@dataclass
class Summary:
    """The events of a run so far, in sum. `add` of an event that is in it changes nothing."""

    generation: int = 0  # the highest of any event
    life: int = 0  # the newest that has begun; 0: none has
    source: str | None = None  # what it has gone on from
    ended: bool = False  # is its end recorded?
    differed: str = ""  # its ranks that differed, if any did
    void: int = 0  # the last generation in which ranks have diverged: no snapshot up to it is used
    commits: list[str] = field(default_factory=list)  # the newest, since the run began at step 0
    began_time: float | None = None  # unix seconds: of the first event
    saved_time: float | None = None  # when the last save began that was committed
    run_id: str | None = None  # of the run; version 0.1.0 has not recorded it
    config: dict[str, Any] | None = None  # what the newest life that recorded it ran with
    config_life: int = 0  # that life
    code: str | None = None  # the hash of own code that the newest life has run; None: it had none
    quarantine: list[dict[str, Any]] = field(default_factory=list)  # step, row_groups, names
    left_out: list[str] = field(default_factory=list)  # what of the ledger cannot be used, and why
    # who was given --from-scratch last: the generation, and the job and id of that life
    from_scratch: dict[str, Any] | None = None
    branches: list[dict[str, Any]] = field(default_factory=list)  # see branches.py
    owners: Owners = field(default_factory=Owners)  # of its rank-seconds
    # of the newest: ranks that were slow and steps that stalled, with `seconds` once that was over
    slow: list[dict[str, Any]] = field(default_factory=list)
    stalls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one more event of the ledger; any error says that it is a foreign one."""
        kind, generation = event["event"], event["generation"]
        self.generation = max(self.generation, generation)
        self.began_time = event["time"] if self.began_time is None else self.began_time
        if kind == "start":
            self.run_id = event.get("run_id") or self.run_id
            if isinstance(given := event.get("from_scratch"), dict):
                self.from_scratch = {**given, "generation": generation}
            if event.get("config") and generation > self.config_life:
                self.config, self.config_life = dict(event["config"]), generation
        if kind == "start" and generation > self.life:
            self.life, self.source = generation, event.get("source")
            self.ended, self.differed = False, ""
            self.code = event.get("code")
            if self.source == "scratch":  # what was committed before has been given up
                self.commits = []
        elif kind in ("stop", "end") and generation == self.life:
            self.ended = True
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
        elif kind in ("slow", "slow_end"):
            self.slow = _paired(self.slow, event, "slow", "rank")
        elif kind in ("stall", "stall_end"):
            self.stalls = _paired(self.stalls, event, "stall", "generation")
        self.owners.add(event)

    def _go_back(self, branch: dict[str, Any]) -> None:
        """What is committed on the way that the run has left is not missed any more."""
        if branch["generation"] not in [it["generation"] for it in self.branches]:
            self.branches = sorted([*self.branches, branch], key=lambda it: it["generation"])
            self.commits = [it for it in self.commits if self._is_on_way(it)]

    def _is_on_way(self, name: str) -> bool:
        step, _, generation = name.removeprefix("step-").partition(".")
        return branches.is_on(self.branches, int(generation), int(step))

    def leave_out(self, what: str) -> None:
        """Remember that a line of the ledger cannot be used, so that a start can say so."""
        self.left_out = [*self.left_out, what][:LEFT_OUT]


def _paired(
    known: list[dict[str, Any]], event: Mapping[str, Any], begins: str, of: str
) -> list[dict[str, Any]]:
    """The newest of a kind: one more, or how long the last of the same rank or life has lasted."""
    if event["event"] == begins:
        if any(it["time"] == event["time"] for it in known):
            return known
        about = {name: it for name, it in event.items() if name != "event"}
        return [*known, {**about, "seconds": None}][-NEWEST:]
    key = event["generation"], event[of]
    for it in reversed(known):
        if (it["generation"], it.get(of)) == key and it["seconds"] is None:
            it["seconds"] = event["seconds"]
            break
    return known


def _decision(event: Mapping[str, Any]) -> dict[str, Any]:
    """Which row groups a quarantine event leaves out, and from which step on.

    Raises ValueError for what none can be. Are the row groups there? That the data tell.
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


def read(run_dir: str | Path) -> Summary:
    """The sum of the run's ledger; an empty one where there is none. Raises OSError."""
    return _read(Path(run_dir))[0]


def refresh(run_dir: str | Path) -> None:
    """Write the file where starts have come to read much of the ledger. Raises OSError."""
    run = Path(run_dir)
    found, before, now = _read(run)
    if now - before < STALE_BYTES:
        return
    with open(run / LEDGER, "rb") as ledger:
        proof = _proof(ledger, now)
    body = {"bytes": now, "proof": proof, "summary": dataclasses.asdict(found)}
    write_json_atomic(run / SUMMARY, {**body, "xxh3_64": _seal(body)})


def _read(run: Path) -> tuple[Summary, int, int]:
    """The sum; up to which byte of the ledger the file has it, and up to which it is whole."""
    with contextlib.suppress(FileNotFoundError), open(run / LEDGER, "rb") as ledger:
        found, before = _cached(run, ledger)
        now = ledger.seek(before)
        for line in ledger:
            _count(found, line, now)
            if line.endswith(b"\n"):  # else it is being written
                now += len(line)
        return found, before, now
    return Summary(), 0, 0


def _count(found: Summary, line: bytes, at: int) -> None:
    """One more line of the ledger, which begins at this byte: an event, or what is left out."""
    if event := parse_event(line):
        try:
            found.add(event)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # foreign
            what = f"a {shown(event['event'])} of generation {shown(event['generation'])}"
            found.leave_out(f"{what} at byte {at} ({error})")
    elif line.strip() and line.endswith(b"\n"):
        found.leave_out(f"a line at byte {at} that is torn, or no event")


def _cached(run: Path, ledger: IO[bytes]) -> tuple[Summary, int]:
    """What the file says, up to which byte; nothing where it is not of this ledger."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        saved = dict(read_json(run / SUMMARY) or {})
        seal = saved.pop("xxh3_64")
        if seal == _seal(saved) and saved["proof"] == _proof(ledger, saved["bytes"]):
            found = saved["summary"]
            return Summary(**{**found, "owners": Owners(**found["owners"])}), saved["bytes"]
    return Summary(), 0


def _proof(ledger: IO[bytes], end: int) -> str:
    """The hash of the last bytes before this one; ValueError where the ledger is shorter."""
    if ledger.seek(0, 2) < end:
        raise ValueError("the ledger is shorter")
    begin = ledger.seek(max(0, end - _PROOF_BYTES))
    return xxhash.xxh3_64_hexdigest(ledger.read(end - begin))


def _seal(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())
