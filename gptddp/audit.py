"""Is a run what its log and its checkpoints say? Its steps, computed once more on this machine.

From the seed, or from one kept checkpoint to the next, each step has to come out as the log has it,
and each checkpoint as it is saved: every bit, whatever the world sizes of the run were, and however
often it was killed. What an audit cannot see is in `docs/same-bits.md`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gptddp.checkpoint import owner, store
from gptddp.checkpoint.load import load
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.environment import ranks
from gptddp.distributed.hardware import machine
from gptddp.distributed.replicas import state_fp
from gptddp.errors import AuditError, CheckpointError, ConfigError, DataError, Unusable
from gptddp.files import exists
from gptddp.flags import changed, of_run
from gptddp.run import books
from gptddp.run.books import Books
from gptddp.run.code import made_by
from gptddp.run.directory import CHECKPOINTS, LEDGER
from gptddp.train import train
from gptddp.training.first_state import first_state
from gptddp.training.opening import check_data
from gptddp.training.quarantine import check
from gptddp.training.replay import DUE, FIELDS, Replay, Span, State, Wrong, unlike
from gptddp.training.stop import StopFlag

_TIMES = ("train_s",)  # of a checkpoint's `meta`: what cannot be recomputed


@dataclass
class Report:
    """What an audit has found."""

    last: int  # step of the log
    same: list[tuple[int, int]] = field(default_factory=list)  # first and last step, recomputed
    wrong: Wrong | None = None
    books: list[str] = field(default_factory=list)  # what is wrong with the files as they are
    aside: list[str] = field(default_factory=list)  # what does not count, and why
    code: list[str] = field(default_factory=list)  # own code of the run, and which steps it made

    @property
    def exit_code(self) -> int:
        """0: nothing is wrong, though not all steps need have been recomputed; 2: none has been."""
        if self.wrong or self.books:
            return 1
        return 0 if self.same else 2


def audit(
    run: Path,
    data: str,
    whole: bool,
    tell: Callable[[str], None] = lambda _: None,
    init_from: str = "",
) -> Report:
    """Recompute the spans between the checkpoints of a run, or with `whole` all from the seed.

    `data`: the dataset directory, `init_from`: that of the weights which the run has begun with; ""
    for the run's own. Raises AuditError where it cannot be told:
    another processor, another torch, sums that are not exact.
    """
    if ranks().world_size > 1:
        raise AuditError("an audit is one process: start it without torchrun, srun and RANK")
    names = store.names(run)  # before the log, which has all steps up to a checkpoint
    found = books.read(run, (*FIELDS, *DUE, "train_s"))
    if (run_id := owner.run_id_of(run)) is None:
        raise AuditError(f"nothing in {run} says the id of the run: put {LEDGER} back")
    _check_can_tell(found)
    aside = [found.left] if found.left else []
    audited = _Audit(
        found,
        run_id,
        names,
        data,
        init_from,
        whole,
        Report(found.last, books=found.wrong, aside=aside, code=made_by(found.lives, found.codes)),
    )
    stop = StopFlag()
    stop.must_exit = lambda waited_s: False  # it says how far it came; a second Ctrl-C ends it
    try:
        with connect("cpu") as world:
            for span in audited.spans():
                if audited.report.wrong is None and span.end > span.step:
                    tell(f"steps {span.step + 1} to {span.end} of {found.last}")
                    audited.recompute(span, world, stop)
    finally:
        stop.close()
    return audited.report


@dataclass
class _Audit:
    """One audit: what is compared with what, and what has been found so far."""

    books: Books
    run_id: str
    names: Sequence[str]  # of checkpoints
    data: str
    init_from: str
    whole: bool
    report: Report

    def recompute(self, span: Span, world: World, stop: StopFlag) -> None:
        """Live the steps of a span again, up to its end or the first that is wrong."""
        dataset = self._dataset(span.config.on_bad)
        replay = Replay(span, dataset, world, stop, self.run_id)
        try:
            train(replay)
        except CheckpointError as error:  # its tensors are not those of the model
            self.report.wrong = Wrong(span.step, "checkpoint", None, str(error), span.begin.name)
            return
        if replay.cause == "stopped":
            raise AuditError(f"{stop.cause} after step {replay.step}: give the command again")
        wrong = self.report.wrong = replay.wrong
        done = min(replay.step, wrong.step - 1) if wrong else replay.step
        if done > span.step:
            self.report.same.append((span.step + 1, done))
        span.after = replay.state()

    def _dataset(self, on_bad: str) -> Dataset:
        """The data that the run began with, where its newest life has read them."""
        run = self.books.run
        try:
            dataset = open_dataset(self.data or self.books.data, on_bad)
            check_data(run, dataset, on_bad)
        except DataError as error:
            raise AuditError(f"{error}. For an audit: --data with the data of {run}") from error
        check(self._decisions(), dataset, run / LEDGER)
        self._check_library(dataset)
        return dataset

    def _check_library(self, dataset: Dataset) -> None:
        """From the seed, too, only with the library that the run has encoded its text with."""
        here = None if dataset.pretokenized else dataset.tokenizer().library
        if (newest := owner.newest(self.books.run, self.run_id)) is None:
            return
        with suppress(Unusable, LookupError, TypeError, AttributeError):
            # a damaged one is told of in its turn
            said = store.unsealed(self.books.run / CHECKPOINTS / newest)
            if (there := said["meta"]["data"].get("library")) not in (None, here):
                raise AuditError(
                    f"the text of the run was encoded by {there}, and here it would be by {here}, "
                    f"which may give other tokens: install {str(there).replace(' ', '==')}"
                )

    def _decisions(self) -> Iterator[dict[str, Any]]:
        for step, groups in self.books.quarantine.items():
            yield {"step": step, "row_groups": groups}

    # -- what there is to recompute ----------------------------------------------------------------

    def spans(self) -> Iterator[Span]:
        """From state to state; the next is asked for when the one before it has been recomputed.

        A checkpoint is compared with the state that was recomputed up to it, and goes on from
        there.
        """
        books, report = self.books, self.report
        saved = self._checkpoints()
        state = None
        while state is None and saved and not self.whole:
            state = self._loaded(saved.pop(0))
        state = state or self._first()
        report.wrong = state.wrong or self._unlike_its_line(state)
        for path in (*saved, None):
            end = _order(path)[1] if path else report.last
            while state.step < end and report.wrong is None:
                upto = books.same_config(state.step + 1, end)
                config = books.config_at(state.step + 1)
                span = Span(config, state, upto, books.lines, books.prints, books.quarantine)
                del state  # what the span begins with is not held while it is recomputed
                yield span
                if span.after is None:
                    return
                state = span.after
            if path and report.wrong is None:
                report.wrong = self._difference(path, state)

    def _first(self) -> State:
        """What the run has begun with: its seed, or the weights of a folder, read anew."""
        config = self.books.config_at(1)
        if not config.init_sha256:
            return State(0, "the seed", None, {})
        config = replace(config, init_from=self.init_from or self.books.init_from)
        try:
            first = first_state(config, self._dataset(config.on_bad))
        except ConfigError as error:
            raise AuditError(f"{error}. For an audit from the first step: --init-from") from error
        return State(0, "the weights of --init-from", first.tensors, {})

    def _checkpoints(self) -> list[Path]:
        """Those of the run as it is now, of the first steps first; the others are told of."""
        run, found = self.books.run, []
        for name in filter(store.is_candidate, self.names):
            if why := self._why_not(path := run / CHECKPOINTS / name):
                self.report.aside.append(f"{name}: {why}")
            else:
                found.append(path)
        return sorted(found, key=lambda path: _order(path)[::-1])

    def _why_not(self, path: Path) -> str | None:
        """Why a checkpoint is not of the run as it is now; None where it is."""
        if owner.is_foreign(path, self.run_id):
            return "it is another run's"
        generation, step = _order(path)
        begins = self.books.begins
        away = (life for life, at in begins.items() if life > generation and at < step)
        if (life := min(away, default=None)) is None:
            return None
        return f"the run has left it, as life {life} has begun from step {begins[life]}"

    def _loaded(self, path: Path) -> State | None:
        """A checkpoint; the tensors have to have its fingerprint, where it says one.

        None where the run, which goes on beside the audit, has deleted it. Raises AuditError where
        it cannot be read just now.
        """
        name, step = path.name, _order(path)[1]
        try:
            loaded = load(path, self.run_id)
        except CheckpointError as error:  # of a newer version
            raise AuditError(str(error)) from error
        except Unusable as unusable:
            if not exists(path):
                self.report.aside.append(f"{name}: it has been deleted meanwhile")
                return None
            if unusable.transient or isinstance(unusable.__cause__, PermissionError):
                raise AuditError(f"{path} cannot be read: {unusable.reason}") from unusable
            return State(step, name, None, {}, Wrong(step, "checkpoint", None, str(unusable), name))
        there, fp = loaded.meta.get("state_fp"), f"{state_fp(loaded.tensors):016x}"
        other = there not in (None, fp)
        its = "of its tensors"
        wrong = Wrong(loaded.step, "state_fp", there, fp, name, its) if other else None
        return State(loaded.step, name, loaded.tensors, loaded.meta | {"state_fp": fp}, wrong)

    def _unlike_its_line(self, state: State) -> Wrong | None:
        """What log or ledger have of the step of a checkpoint, and is not so there.

        The audit begins with it, and does not recompute it: see `Replay.record` for other steps.
        """
        if not state.step or state.tensors is None:
            return None
        line, step = self.books.lines.get(state.step, {}), state.step
        there = {name: line[name] for name in ("state_fp", "chain_fp", "tokens") if name in line}
        prints, where = self.books.prints.get(step, {}), f"in {state.name}"
        return unlike(step, there, state.meta, "the log", where) or unlike(
            step, prints, state.meta, LEDGER, where
        )

    def _difference(self, path: Path, state: State) -> Wrong | None:
        """What a checkpoint has that is not so in the recomputed state of its step.

        It is read for that, and held no longer.
        """
        if (saved := self._loaded(path)) is None:
            return None
        if saved.wrong:
            return saved.wrong
        said, found = _flat(saved.meta), _flat(state.meta)
        for name in [it for it in sorted(said.keys() | found.keys()) if it not in _TIMES]:
            if said.get(name) != found.get(name):
                return Wrong(saved.step, name, said.get(name), found.get(name), saved.name)
        return None


def _flat(meta: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a checkpoint's `meta`, those of the position in the data by `data.NAME`."""
    return {k: v for k, v in meta.items() if k != "data"} | {
        f"data.{name}": value for name, value in dict(meta.get("data", {})).items()
    }


def _order(path: Path) -> tuple[int, int]:
    """Generation and step of a candidate."""
    order = store.order(path.name)
    assert order is not None
    return order


def _check_can_tell(books: Books) -> None:
    """Raise AuditError where this machine would have other bits, and where there are none."""
    here = machine(None)
    lives = sorted(set(books.lives.values()))
    for generation in lives:
        config, life = books.configs[generation], f"life {generation} of {books.run}"
        if config.reduce != "exact":
            raise AuditError(
                f"reduce is {config.reduce} in {life}: the bits of its sums depend on the world "
                "size. `gptddp fingerprints` compares the rows of two such runs"
            )
        if not books.machines.get(generation):
            raise AuditError(
                f"{books.run / LEDGER} does not say what {life} was computed on: put the ledger "
                "back from a backup"
            )
        for there in books.machines[generation]:
            if there != here:
                raise AuditError(
                    f"{life} was computed on {there}, and this is {here}: the last bits differ "
                    "between them. Give the command on a machine of that kind"
                )
        if changes := changed(of_run(books.configs[lives[0]]), of_run(config)):
            raise AuditError(f"{', '.join(changes)} changed in {life}, and cannot change in a run")


def describe(report: Report) -> str:
    """The report as a few lines of text."""
    lines = []
    if (wrong := report.wrong) is not None:
        what = f"{wrong.field} is {wrong.logged!r} in {wrong.where}, and {wrong.found!r}"
        what = f"{what} {wrong.found_where}"
        if wrong.field == "step":
            what = "it is not in the log"
        if wrong.field == "checkpoint":
            what = f"{wrong.where} cannot be read: {wrong.found}"
        if wrong.field == "train_s":
            what = f"train_s is {wrong.logged!r} in {wrong.where}: it must be a number of seconds"
        lines.append(f"wrong: step {wrong.step}: {what}")
    lines += [f"wrong: {it}" for it in report.books]
    if report.same:
        parts = ", ".join(f"{a} to {b}" for a, b in _joined(report.same))
        n = sum(b - a + 1 for a, b in report.same)
        lines.append(f"same bits: steps {parts} of {report.last} ({100 * n // report.last}%)")
    elif report.exit_code == 2:
        lines.append("nothing recomputed: no step lies between two checkpoints; give --whole")
    lines += [f"not counted: {it}" for it in report.aside]
    lines += [f"made by: {it}" for it in report.code]
    lines.append(f"compared: {', '.join((*FIELDS, *DUE))}. Not: times, speeds, world sizes")
    return "\n".join(lines)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and joined[-1][1] == first - 1:
            first = joined.pop()[0]
        joined.append((first, last))
    return joined
