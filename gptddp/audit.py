"""Is a run what its log and its checkpoints say? Its steps, computed once more on this machine.

From the seed, or from one kept checkpoint to the next, each step has to come out as the log has it,
and each checkpoint as it is saved: every bit, whatever the world sizes of the run were, and however
often it was killed. What an audit cannot see is in `docs/same-bits.md`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptddp.checkpoint import owner, store
from gptddp.checkpoint.load import load
from gptddp.config import Config, changed, of_run
from gptddp.data.dataset import open_dataset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import machine
from gptddp.distributed.replicas import state_fp
from gptddp.errors import AuditError, Unusable
from gptddp.fingerprints import ranges
from gptddp.flags import from_saved
from gptddp.run import log_check, summary
from gptddp.run.directory import CHECKPOINTS, LEDGER
from gptddp.run.history import logged, read_ledger
from gptddp.run.quarantine import decided
from gptddp.train import live
from gptddp.training.replay import DUE, FIELDS, Replay, Span, State, Wrong
from gptddp.training.stop import StopFlag


@dataclass
class Report:
    """What an audit has found."""

    last: int  # step of the log
    same: list[tuple[int, int]] = field(default_factory=list)  # first and last step, recomputed
    wrong: Wrong | None = None
    log: str | None = None  # what is wrong with the log as it is
    aside: list[str] = field(default_factory=list)  # checkpoints that do not count, and why

    @property
    def ok(self) -> bool:
        """Is nothing wrong? Not all steps need have been recomputed."""
        return self.wrong is None and self.log is None


@dataclass(frozen=True)
class Books:
    """What a run has written down: lines and their lives by step, configurations by life.

    left: steps of lives that the run has gone back behind, and that it has not done again.
    """

    run: Path
    run_id: str
    lines: Mapping[int, Mapping[str, Any]]
    lives: Mapping[int, int]
    begins: Mapping[int, int]  # by life: the step that it went on from
    configs: Mapping[int, Config]
    machines: Mapping[int, list[str]]
    quarantine: dict[int, list[int]]
    left: list[int]

    def config_at(self, step: int) -> Config:
        """What a step was done with; one that the log lacks, as the next or last that it has."""
        known = min((at for at in self.lives if at >= step), default=max(self.lives))
        return self.configs[self.lives[known]]


def audit(
    run: Path, data: str, whole: bool, tell: Callable[[str], None] = lambda _: None
) -> Report:
    """Recompute the spans between the checkpoints of a run, or with `whole` all from the seed.

    `data`: the dataset directory, "" for the run's own. Raises AuditError where it cannot be told:
    another processor, another torch, sums that are not exact.
    """
    books = _books(run)
    _check_can_tell(books)
    last = max(books.lines)
    report = Report(last, log=_wrong_log(run))
    if books.left:
        why = "the run has left them, as a later life has begun before them"
        report.aside.append(f"{ranges(books.left)}: {why}")
    stop = StopFlag()
    try:
        with connect("cpu") as world:
            for span in _spans(books, whole, report):
                if report.wrong is None and span.end > span.step:
                    tell(f"steps {span.step + 1} to {span.end} of {last}")
                    _recompute(span, books, data, world, stop, report)
    finally:
        stop.close()
    return report


def _recompute(
    span: Span, books: Books, data: str, world: World, stop: StopFlag, report: Report
) -> None:
    replay = Replay(span, world, stop, books.run_id)
    dataset = open_dataset(data or span.config.data, span.config.on_bad)
    live(replay, dataset, dataset.tokenizer(), stop)
    if replay.cause == "stopped":
        raise AuditError(f"{stop.cause} after step {replay.step}: give the command again")
    report.wrong = replay.wrong
    done = replay.step - (replay.wrong is not None)
    if done > span.step:
        report.same.append((span.step + 1, done))
    span.after = replay.state()


# -- what there is to recompute ------------------------------------------------------------------


def _spans(books: Books, whole: bool, report: Report) -> Iterator[Span]:
    """From state to state; the next is asked for when the one before it has been recomputed.

    A checkpoint is compared with the state that was recomputed up to it, and goes on from there.
    """
    saved = _checkpoints(books, report)
    begin = None if whole or not saved else saved.pop(0)
    state = _loaded(begin, books.run_id) if begin else State(0, "the seed", None, {})
    report.wrong = state.wrong
    for path in (*saved, None):
        end = _order(path)[1] if path else report.last
        while state.step < end and report.wrong is None:
            config = books.config_at(state.step + 1)
            upto = _same_config(books, state.step + 1, end)
            span = Span(config, state, upto, books.lines, books.quarantine)
            del state  # what the span begins with is not held while it is recomputed
            yield span
            assert span.after is not None
            state = span.after
        if path and report.wrong is None:
            report.wrong = _difference(path, books.run_id, state)


def _same_config(books: Books, first: int, end: int) -> int:
    """The last step up to `end` that was done with the configuration of the step `first`."""
    config = of_run(books.config_at(first))
    for step in range(first, end + 1):
        if of_run(books.config_at(step)) != config:
            return step - 1
    return end


def _checkpoints(books: Books, report: Report) -> list[Path]:
    """Those of the run as it is now, of the first steps first; the others are told of."""
    found = []
    for name in filter(store.is_candidate, store.names(books.run)):
        if why := _why_not(path := books.run / CHECKPOINTS / name, books):
            report.aside.append(f"{name}: {why}")
        else:
            found.append(path)
    return sorted(found, key=lambda path: _order(path)[::-1])


def _why_not(path: Path, books: Books) -> str | None:
    """Why a checkpoint is not of the run as it is now; None where it is."""
    if owner.is_foreign(path, books.run_id):
        return "it is another run's"
    generation, step = _order(path)
    away = (life for life, at in books.begins.items() if life > generation and at < step)
    if (life := min(away, default=None)) is None:
        return None
    return f"the run has left it, as life {life} has begun from step {books.begins[life]}"


def _order(path: Path) -> tuple[int, int]:
    """Generation and step of a candidate."""
    order = store.order(path.name)
    assert order is not None
    return order


def _loaded(path: Path, run_id: str) -> State:
    """A checkpoint; the tensors have to have its fingerprint, where it says one."""
    name, step = path.name, _order(path)[1]
    try:
        loaded = load(path, run_id)
    except Unusable as unusable:
        return State(step, name, None, {}, Wrong(step, "checkpoint", None, str(unusable), name))
    there, fp = loaded.meta.get("state_fp"), f"{state_fp(loaded.tensors):016x}"
    other = Wrong(loaded.step, "state_fp", there, fp, name) if there not in (None, fp) else None
    return State(loaded.step, name, loaded.tensors, loaded.meta | {"state_fp": fp}, other)


def _difference(path: Path, run_id: str, state: State) -> Wrong | None:
    """What a checkpoint has that is not so in the recomputed state of its step.

    It is read for that, and held no longer.
    """
    saved = _loaded(path, run_id)
    for name in ("state_fp", "tokens", "chain_fp", "skipped", "data") if not saved.wrong else ():
        if saved.meta.get(name) != state.meta.get(name):
            return Wrong(saved.step, name, saved.meta.get(name), state.meta.get(name), saved.name)
    return saved.wrong


# -- what the run has written down -----------------------------------------------------------------


def _books(run: Path) -> Books:
    lines, lives = {}, {}
    for generation, line in logged(run):
        lines[line["step"]], lives[line["step"]] = line, generation
    if not lines:
        raise AuditError(f"{run} has logged no step yet: nothing to recompute")
    run_id, configs, machines = owner.run_id_of(run), {}, {}
    config: Config | None = None
    starts = {it["generation"]: it for it in read_ledger(run) if it["event"] == "start"}
    for generation in range(1, 1 + max(lives.values())):
        start = starts.get(generation, {})
        if start.get("config"):
            config = from_saved(run / LEDGER, start["config"])
        if config is not None:
            configs[generation] = config
        machines[generation] = start.get("machines") or []
    if run_id is None or not configs.keys() >= set(lives.values()):
        raise AuditError(f"{run / LEDGER} does not say with what each life of the run was done")
    begins = {life: start["step"] for life, start in starts.items() if _is_step(start.get("step"))}
    quarantine = decided(summary.read(run).quarantine, 0)
    left = _left(lives, begins)
    for step in left:
        del lines[step], lives[step]
    if not lines:
        raise AuditError(f"{run} has begun anew and logged no step since: nothing to recompute")
    return Books(run, run_id, lines, lives, begins, configs, machines, quarantine, left)


def _left(lives: Mapping[int, int], begins: Mapping[int, int]) -> list[int]:
    """The steps, with their lives, before which a later life has begun."""
    ends, end = dict[int, float](), math.inf
    for life in sorted({*lives.values(), *begins}, reverse=True):
        ends[life], end = end, min(end, begins.get(life, math.inf))
    return [step for step, life in lives.items() if step > ends[life]]


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0


def _check_can_tell(books: Books) -> None:
    """Raise AuditError where this machine would have other bits, and where there are none."""
    for generation in sorted(set(books.lives.values())):
        config, life = books.configs[generation], f"life {generation} of {books.run}"
        if config.reduce != "exact":
            raise AuditError(
                f"reduce is {config.reduce} in {life}: the bits of its sums depend on the world "
                "size. `gptddp fingerprints` compares the rows of two such runs"
            )
        here = machine(None)
        for there in books.machines[generation] or ["a machine that it has not recorded"]:
            if there != here:
                raise AuditError(
                    f"{life} was computed on {there}, and this is {here}: the last bits differ "
                    "between them. Give the command on a machine of that kind"
                )
    first = min(books.lives)
    if changes := changed(
        of_run(books.config_at(first)), of_run(books.config_at(max(books.lives)))
    ):
        raise AuditError(f"{', '.join(changes)} changed in {books.run}, and cannot change in a run")


def _wrong_log(run: Path) -> str | None:
    check = log_check.LogCheck(run)
    for generation, line in logged(run):
        check.add(generation, line)
    return check.found()


def describe(report: Report, run: Path) -> str:
    """The report as a few lines of text."""
    lines = []
    if (wrong := report.wrong) is not None:
        what = f"{wrong.field} is {wrong.logged!r} in {wrong.where}, and {wrong.found!r} recomputed"
        if wrong.field == "step":
            what = "it is not in the log"
        if wrong.field == "checkpoint":
            what = f"{wrong.where} cannot be read: {wrong.found}"
        lines.append(f"wrong: step {wrong.step}: {what}")
    if report.log:
        lines.append(f"wrong: {log_check.told(run, report.log)}")
    if report.same:
        parts = ", ".join(f"{a} to {b}" for a, b in _joined(report.same))
        n = sum(b - a + 1 for a, b in report.same)
        lines.append(f"same bits: steps {parts} of {report.last} ({n / report.last:.0%})")
    elif report.ok:
        lines.append("nothing recomputed: no step lies between two checkpoints; give --whole")
    lines += [f"not counted: {it}" for it in report.aside]
    lines.append(f"compared: {', '.join((*FIELDS, *DUE))}. Not: times, speeds, world sizes")
    return "\n".join(lines)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and joined[-1][1] == first - 1:
            first = joined.pop()[0]
        joined.append((first, last))
    return joined
