"""Recompute the steps of a run on this machine, and compare them with its log and checkpoints.

From the seed, or from one kept checkpoint to the next, each step must match the log, and each
checkpoint must match the recomputed state, in every bit, whatever the run's world sizes were and
however often it was killed. `docs/same-bits.md` lists what an audit cannot detect.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptddp.checkpoint import run_state, store
from gptddp.checkpoint.load import SavedState, load
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.environment import ranks
from gptddp.distributed.hardware import machine
from gptddp.distributed.replicas import state_fp
from gptddp.errors import AuditError, CheckpointError, ConfigError, DataError, Unusable
from gptddp.files import exists
from gptddp.run import audited
from gptddp.run.audited import Recorded
from gptddp.run.code_of_steps import made_by
from gptddp.run.directory import CHECKPOINTS, LEDGER
from gptddp.train import train
from gptddp.training.first_state import first_state
from gptddp.training.opening import check_data
from gptddp.training.parts import DUE
from gptddp.training.quarantine import check
from gptddp.training.replay import FIELDS, Difference, Replay, Span, unlike
from gptddp.training.stop import StopFlag

Tell = Callable[[str], None]  # takes a text: the steps that are recomputed now


def audit(run: Path, data: str, whole: bool, tell: Tell = lambda _: None) -> "Audit":
    """Recompute the spans between the checkpoints of a run, or with `whole` all steps.

    `data`: the dataset; "" for the run's own. Raises AuditError if processor or torch differ, or
    the sums are not exact.
    """
    if ranks().world_size > 1:
        raise AuditError("an audit is one process: start it without torchrun, srun and RANK")
    names = store.names(run)  # before the log, which has all steps up to a checkpoint
    recorded = audited.read(run, (*FIELDS, *DUE, "train_s"))
    if (run_id := run_state.read(run).run_id) is None:
        raise AuditError(f"no file in {run} has the id of the run: put {LEDGER} back")
    audited.check_machine(recorded, machine(None))
    stop = StopFlag()
    stop.must_exit = lambda waited_s: (
        False
    )  # it reports its progress first; a second Ctrl-C ends it
    try:
        with connect("cpu") as world:
            it = Audit(recorded, run_id, data, world, stop, tell)
            try:
                it.compare(it.checkpoints(names), whole)
            except Difference as first:
                recorded.wrong.insert(0, str(first))
            return it
    finally:
        stop.close()


@dataclass
class Audit:
    """One audit and its progress."""

    recorded: Recorded  # findings are added to its `wrong` and `aside`
    run_id: str
    data: str
    world: World
    stop: StopFlag
    tell: Tell
    begin: int = 0  # the steps after this one, up to `end`, match the log
    end: int = 0

    @property
    def exit_code(self) -> int:
        """0: no difference, even if only some steps were recomputed; 2: no step was recomputed."""
        if self.recorded.wrong:
            return 1
        return 0 if self.end > self.begin else 2

    def compare(self, saved: list[Path], whole: bool) -> None:
        """Recompute from state to state. Raises Difference at the first that differs.

        Each checkpoint is compared with the recomputed state, which then continues.
        """
        state = None
        while state is None and saved and not whole:
            state = self._loaded(saved.pop(0))
        if state is None:
            state = self._first()
        else:
            self._check_beside_its_line(state)
        self.begin = self.end = state.step
        for path in saved:
            state = self._recomputed(state, store.order(path.name)[1])
            self._check_checkpoint(path, state)
        self._recomputed(state, self.recorded.last)

    def _recomputed(self, state: SavedState, end: int) -> SavedState:
        """The state after the step `end`, with the configuration of each step on the way."""
        recorded = self.recorded
        while state.step < end:
            upto = recorded.same_config(state.step + 1, end)
            self.tell(f"steps {state.step + 1} to {upto} of {recorded.last}")
            config = recorded.config_at(state.step + 1)
            span = Span(config, state, upto, recorded.lines, recorded.prints, recorded.quarantine)
            state = self._lived(span)
        return state

    def _lived(self, span: Span) -> SavedState:
        """Train the steps of a span again, up to its end or the first difference."""
        dataset, step = self._dataset(span.config.on_bad), span.begin.step
        replay = Replay(span, dataset, self.world, self.stop, self.run_id)
        try:
            train(replay)
        except CheckpointError as error:  # its tensors do not fit the model
            raise Difference(step, f"{span.begin.name} cannot be read: {error}") from error
        if replay.cause == "stopped":
            raise AuditError(f"{self.stop.cause} after step {replay.step}: start the audit again")
        self.end = max(step, replay.step - (replay.wrong is not None))
        if replay.wrong:
            raise replay.wrong
        return replay.state()

    def _dataset(self, on_bad: str) -> Dataset:
        """The data of the run, from the place where its newest life read them."""
        run = self.recorded.run
        try:
            dataset = open_dataset(self.data or self.recorded.data, on_bad)
            check_data(run, run_state.read(run).dataset, dataset, on_bad)
        except DataError as error:
            raise AuditError(f"{error}. For an audit: --data with the data of {run}") from error
        decisions = self.recorded.quarantine.items()
        check(({"step": at, "row_groups": it} for at, it in decisions), dataset, run / LEDGER)
        self._check_library(dataset)
        return dataset

    def _check_library(self, dataset: Dataset) -> None:
        """Raise AuditError if the run encoded its text with another library."""
        here = None if dataset.pretokenized else dataset.tokenizer().library
        if (newest := store.newest(self.recorded.run, self.run_id)) is None:
            return
        with suppress(Unusable, LookupError, TypeError, AttributeError):
            # a damaged checkpoint is reported later
            said = store.unsealed(self.recorded.run / CHECKPOINTS / newest)
            if (there := said["meta"]["data"].get("library")) not in (None, here):
                raise AuditError(
                    f"the run encoded its text with {there}, but this machine has {here}, which "
                    f"may give other tokens: install {str(there).replace(' ', '==')}"
                )

    # -- the states that the run has kept ----------------------------------------------------------

    def _first(self) -> SavedState:
        """The first state of the run: from its seed, or from the weights of a folder."""
        config = self.recorded.config_at(1)
        if not config.init_sha256:
            return SavedState("the seed")
        config = replace(config, init_from=self.recorded.init_from)
        try:
            return first_state(config, self._dataset(config.on_bad))[0]
        except ConfigError as error:
            raise AuditError(
                f"an audit from the first step needs the run's weights: {error}"
            ) from error

    def checkpoints(self, names: Sequence[str]) -> list[Path]:
        """The checkpoints of the run as it is now, oldest step first; others are listed aside."""
        run, found, parents = self.recorded.run, [], dict[tuple[int, int], Any]()
        for name in filter(store.is_candidate, names):
            path = run / CHECKPOINTS / name
            if why := self._why_not(path):
                self.recorded.aside.append(f"{name}: {why}")
                continue
            found.append(path)
            with suppress(Unusable):  # it is reported later
                parents[store.order(path.name)] = store.order(
                    str(store.unsealed(path).get("parent"))
                )
        for life, step in self.recorded.unrecorded(parents):
            lacks = f"{run / LEDGER} lacks the checkpoint event of {store.name_of(step, life)}"
            self.recorded.wrong.append(f"{lacks}, but has later events of the same life")
        return sorted(found, key=lambda path: store.order(path.name)[::-1])

    def _why_not(self, path: Path) -> str | None:
        """Why a checkpoint does not belong to the run as it is now; None: it does."""
        if store.is_foreign(path, self.run_id):
            return "it belongs to another run"
        if (life := self.recorded.left_by(*store.order(path.name))) is None:
            return None
        step = self.recorded.starts[life]["step"]
        return f"the run discarded it: life {life} started from step {step}"

    def _loaded(self, path: Path) -> SavedState | None:
        """Load a checkpoint and check its tensors against its fingerprint, if it has one.

        None if the run, which may continue beside the audit, has deleted it. Raises AuditError if
        it cannot be read at present.
        """
        name, step = path.name, store.order(path.name)[1]
        try:
            loaded = load(path, self.run_id)
        except CheckpointError as error:  # of a newer version
            raise AuditError(str(error)) from error
        except Unusable as unusable:
            if not exists(path):
                self.recorded.aside.append(f"{name}: it was deleted during the audit")
                return None
            if unusable.transient or isinstance(unusable.__cause__, PermissionError):
                raise AuditError(f"{path} cannot be read: {unusable.reason}") from unusable
            raise Difference(step, f"{name} cannot be read: {unusable}") from unusable
        there, fp = loaded.meta.get("state_fp"), f"{state_fp(loaded.tensors):016x}"
        if there not in (None, fp):
            raise Difference(step, f"state_fp is {there!r} in {name}, and {fp!r} of its tensors")
        return replace(loaded, meta=loaded.meta | {"state_fp": fp})

    def _check_beside_its_line(self, state: SavedState) -> None:
        """Compare log and ledger with the first checkpoint, whose step is not recomputed."""
        line, where = self.recorded.lines.get(state.step, {}), f"in {state.name}"
        logged = [(it, line[it]) for it in ("state_fp", "chain_fp", "tokens") if it in line]
        prints = self.recorded.prints.get(state.step, ())
        for there, name in ((logged, "the log"), (prints, LEDGER)):
            if wrong := unlike(state.step, there, state.meta, name, where):
                raise wrong

    def _check_checkpoint(self, path: Path, state: SavedState) -> None:
        """Compare a checkpoint with the recomputed state of its step, and release it."""
        if (saved := self._loaded(path)) is None:
            return
        said, found = _flat(saved.meta), _flat(state.meta)
        for name in sorted((said.keys() | found.keys()) - {"train_s"}):  # a time
            if said.get(name) != found.get(name):
                what = f"{said.get(name)!r} in {saved.name}, and {found.get(name)!r} recomputed"
                raise Difference(saved.step, f"{name} is {what}")


def _flat(meta: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of a checkpoint's `meta`; the fields of `data` as `data.NAME`."""
    return {k: v for k, v in meta.items() if k != "data"} | {
        f"data.{name}": value for name, value in dict(meta.get("data", {})).items()
    }


def describe(it: Audit) -> str:
    """The result of an audit as a few lines of text."""
    recorded = it.recorded
    lines = [f"wrong: {wrong}" for wrong in recorded.wrong]
    if (count := it.end - it.begin) > 0:
        steps, share = f"{it.begin + 1} to {it.end}", 100 * count // recorded.last
        lines.append(f"same bits: steps {steps} of {recorded.last} ({share}%)")
    elif it.exit_code == 2:
        lines.append("nothing recomputed: no step is between two checkpoints; give --whole")
    lines += [f"not counted: {aside}" for aside in recorded.aside]
    codes = {life: start.get("code") for life, start in recorded.starts.items()}
    lines += [f"made by: {code}" for code in made_by(recorded.lives, codes)]
    lines.append(f"compared: {', '.join((*FIELDS, *DUE))}. Not: times, speeds, world sizes")
    return "\n".join(lines)
