"""One life of a run: all that the loop of `train` needs around its model step.

A life begins from the newest state on the storage, and saves its state there, at intervals and at
its end. A rank that joins a running life gets the state from another rank. worlds.py handles ranks
that are lost or join.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp import live
from gptddp.budget import BUDGETS, used_up
from gptddp.checkpoint.load import SavedState, copy_into
from gptddp.data.dataset import Dataset
from gptddp.data.loader import Batch
from gptddp.distributed import environment, pulse
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import machine
from gptddp.distributed.replicas import CHECK_EVERY, check_replicas, keys_of
from gptddp.errors import NonFiniteError, Stopped
from gptddp.model.evaluate import evaluate
from gptddp.model.gpt import GPT
from gptddp.model.sums import Sums
from gptddp.run import crash_loop
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.training import quarantine
from gptddp.training.agree import Agreed, agree
from gptddp.training.begin import pack_first_rows, post_rows
from gptddp.training.clock import PhaseClock
from gptddp.training.end import Ending, save_last, wait_for_readers
from gptddp.training.go_back import way_back
from gptddp.training.guard import Guard
from gptddp.training.parts import LifeParts
from gptddp.training.rows import Rows
from gptddp.training.samples import sample
from gptddp.training.stop import StopFlag
from gptddp.training.worlds import Worlds

_PATIENCE = 8  # timeout of a collective, in usual times of a step
_POST_S = 1.0  # between two posts of the place of the lanes


class Life(LifeParts):
    """A life of the run, as the loop sees it. All ranks call the same methods.

    The live state (tensors and progress) is complete except within `stepping`: only there no other
    rank can get it. Only rank 0 has a `recorder`: storage, log and metrics.
    """

    def __init__(
        self,
        origin: Origin,
        state: SavedState | None,
        lease: Lease | None,
        dataset: Dataset,
        world: World,
        stop: StopFlag,
        clock: PhaseClock,
    ) -> None:
        """`state`: None on a joiner; its tensors: rank 0 only. `lease`: rank 0, not in an audit."""
        super().__init__(origin, state.meta if state else {}, lease, dataset, world, stop, clock)
        self._state: SavedState | None = state  # until it is restored
        self.tokenizer = dataset.tokenizer()
        self.worlds: Worlds  # from `restore` on
        self._began_step = self._posted = 0.0  # monotonic
        self._ending: Ending | None = None  # rank 0 only
        self._guard = Guard(self)
        stop.hung, stop.silent = self._guard.hung, self.stalls.silent

    @property
    def goes_on(self) -> bool:
        """Is there another step to do in this world?"""
        return not self.cause and not self.worlds.ends

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around the life: read rows, and record how the life ends, see guard.py."""
        data = self.progress.data if self._state else None
        self.rows = Rows(self.dataset, self.config, self.world, data)
        try:
            with self._guard.around():
                if not self.step:  # report a mistake at once; a recovery must not wait
                    live.phase("reading the validation data")
                    _ = self.rows.validation
                live.phase("building the model")
                yield
        finally:
            self.rows.close()

    def restore(self, net: GPT, tensors: Mapping[str, Tensor], sums: Sums) -> None:
        """All ranks: load the newest state into these live tensors, by name, and begin the life.

        A rank that joins later loads nothing here. Raises CheckpointError if the state is of
        another model, or differs from what was saved; Diverged if ranks differ.
        """
        self.clock.enter("restore")
        self.net, self.tensors = net, tensors
        self.worlds = Worlds(self, sums)
        state, self._state = self._state, None
        if state is None:
            keys_of(self.world.device)  # made now: all ranks would wait at this rank's first check
            pack_first_rows(self)
            return
        if saved := state.tensors:  # one rank only
            # a run begins with weights only: the optimizer keeps its initial state
            copy_into(tensors if self.step else {n: tensors[n] for n in saved}, saved)
        if self.step or self.config.init_sha256:
            self.world.broadcast(tensors.values(), 0)  # all ranks
        fp = check_replicas(tensors, self.step, self.world)  # all ranks
        self.progress.confirm(fp, self.origin.source)
        self.live.is_whole = True
        self.machines = sorted(
            set(map(str, self.world.gather(machine(self.world.device))))
        )  # all ranks
        if self.recorder:
            self.recorder.begin(tensors, net.n_params(), self.progress, self.machines)
        self._begun()  # all ranks
        chain = f"{self.progress.chain_fp:016x}"  # the line may be another run's
        known = self.origin.line or {}
        self.line = known if known.get("chain_fp") == chain else {}

    def _begun(self) -> None:
        """All ranks: keep rank 0's first ledger events in memory until they are on its disk."""
        begun = self.recorder.ledger.pending() if self.recorder else []
        self.live.begun(self.world.broadcast_value(begun, 0), self.step)  # all ranks

    def go_on(self, moved: bool) -> None:
        """All ranks, which have the same state now: do what is due before the next step.

        `moved`: this is another world than before.
        """
        self.stop.holds = self._guard.restored = True
        if verdict := environment.verdict():
            crash_loop.forget(verdict.parent)
        if not moved:
            return
        self.rows.enter(self.progress.data)
        self.cause = used_up(self.config, self.step, self.progress.tokens)
        if self.recorder and self.recorder.last_step < self.step:  # interrupted after the step
            self.recorder.step(self.line, self.progress, 0.0)
        elif self.recorder and self.line and self.recorder.line != self.line:
            # another rank's line had more
            self.recorder.completed(self.line, "val_loss" in self.line)

    # -- a step ------------------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """This rank's rows of the next step; `bad`, and no rows, if a row group is unreadable."""
        self.clock.enter("data_wait")
        pulse.beat(self.step + 1)
        decided = self.origin.quarantine.get(self.step, ())
        batch = quarantine.next_batch(self.rows.loader, self.config.on_bad, decided)
        redo = self.step < self.origin.step + self.origin.redo
        if self.step == self.origin.step:
            live.phase("the first step")
        self.clock.enter("warmup" if self.step == self.origin.step else "redo" if redo else "step")
        self._began_step = time.monotonic()
        return batch

    def agree(self, batch: Batch) -> Agreed:
        """All ranks: agree on this step, and whether to do it; no rank decides alone."""
        self.worlds.take_records()
        saves = self.recorder.saves if self.recorder else None
        due = saves is not None and saves.is_due(self.worlds.save_within_s)
        logged = self.recorder.log.durable_step if self.recorder else 0
        (asked, late), now = self.worlds.stops(), self.progress
        said = asked, late, self.worlds.has_news(), due
        of_0 = (self.recorder.generation if self.recorder else 0), logged, now.train_s
        agreed = agree(batch, said, of_0, self.spent, self.world)
        self.live.forget(agreed.logged)
        if agreed.generation > self.generation:  # a new rank 0 has the records
            self.generation = agreed.generation
            self._begun()  # all ranks
        now.train_s = agreed.train_s  # kept in the state of every rank
        self.cause = used_up(self.config, now.step, now.tokens, now.train_s)
        self.worlds.agreed(agreed.stop, agreed.late, asked, agreed.news)
        return agreed

    def quarantine(self, batch: Batch) -> None:
        """All ranks: leave out unreadable row groups for good; the step is repeated."""
        self.clock.enter("data_wait")
        decision = quarantine.decide(batch, self.rows.loader, self.progress, self.world)
        about = {"time": time.time(), "generation": self.generation, "step": self.step}
        event = {"event": "quarantine", **about, **decision}
        if self.recorder:  # before any rank acts on it
            self.recorder.events.emit("quarantine", **event)
        elif self.worlds.takeover:
            self.worlds.takeover.events.append(event)
        self.live.keep_event(event, self.step)  # on every rank, because rank 0 may be lost
        self.rows.enter(self.progress.data)

    @contextmanager
    def stepping(
        self, batch: Batch, agreed: Agreed, numbers: Mapping[str, float], wait_s: float
    ) -> Iterator[bool]:
        """Around the change of the live state, which is whole before and after but not within.

        `numbers`: loss, grad_norm and lr. Yields whether they are finite: the same on every rank,
        because they come from sums over all ranks. A skipped step uses up its rows too.
        `wait_s`: how long this rank has waited for others in the step.
        """
        self.spent.waited(wait_s)
        finite = all(map(math.isfinite, numbers.values()))
        self.live.is_changing = True
        yield finite
        self._guard.since = time.monotonic()
        step_s = self._guard.since - self._began_step
        data = self.rows.loader.state(agreed.cursors)
        self.progress.advance(agreed.targets, agreed.fp, finite, step_s + batch.wait_s, data)
        self.cause = used_up(self.config, self.step, self.progress.tokens)
        self.world.set_timeout(_PATIENCE * self.stalls.stepped(step_s))
        skipped = {} if finite else {"loss": None, "grad_norm": None}
        self.line = self._line_of(batch, agreed, step_s, {**numbers, **skipped})
        self.live.keep(self.line)
        self.live.is_changing = False

    def _line_of(
        self, batch: Batch, agreed: Agreed, step_s: float, numbers: Mapping[str, float | None]
    ) -> dict[str, Any]:
        """The line of the log for the finished step; `step_s`: without the wait for its rows.

        Every rank makes the same line, because rank 0 may be lost.
        """
        now, spent = self.progress, self.spent
        line: dict[str, Any] = {
            "step": now.step,
            **numbers,
            "tokens": now.tokens,
            "tok_s": agreed.targets / (step_s + batch.wait_s),
            "data_wait_s": batch.wait_s,
            "batch_fp": f"{agreed.fp:016x}",
            "chain_fp": f"{now.chain_fp:016x}",
            "world_size": self.world.world_size,
            "time": time.time(),
        }
        if self.config.max_time:  # otherwise step and tokens decide the learning rate
            line["train_s"] = agreed.train_s
        if spent.is_due:
            line |= {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3)}
        return line

    # -- after a step ------------------------------------------------------------------------------

    @property
    def is_evaluation_due(self) -> bool:
        """Every `eval_every` steps, and at the last step, which may come early."""
        return self.cause in BUDGETS or self.step % self.config.eval_every == 0

    def evaluate(self) -> None:
        """All ranks: evaluate the last step. If ranks must stop meanwhile, the others repeat it."""
        live.phase("evaluating")
        self.clock.enter("eval")
        c = self.config
        model = self.net, self.rows.validation, self.tokenizer
        result = evaluate(*model, c, self.world, lambda: self.worlds.stops()[1])  # all ranks
        if result is None:
            self.worlds.meet()  # all ranks
            return
        self.line |= {"val_loss": result.loss, "val_bpb": result.bpb}
        if self.recorder and c.sample_tokens:
            text = sample(self.net, self.tokenizer, c)
            self.recorder.events.emit("sample", step=self.step, text=text)

    def complete_line(self) -> None:
        """All ranks: add the missing evaluation and fingerprint to the line of the last step.

        They are missing if the previous life or world was interrupted in them. Or the time is used
        up, which only `agree` of the next step finds.
        """
        unchecked = self.is_check_due and "state_fp" not in self.line
        missed = self.is_evaluation_due and "val_loss" not in self.line
        if not self.line or self.cause == "stopped" or not (missed or unchecked):
            return
        if missed:
            self.evaluate()  # all ranks
        if self.cause == "stopped" or self.worlds.ends:
            return
        if unchecked:
            self.check_replicas()  # all ranks
        self.live.keep(self.line)
        if self.recorder:
            self.recorder.completed(self.line, missed)

    def record(self) -> None:
        """Log the step. Raises NonFiniteError after too many non-finite steps in a row."""
        if self.recorder:
            self.clock.enter("logging")
            self.recorder.step(self.line, self.progress, self._guard.since - self._began_step)
        self.clock.enter("other")
        if self.world.rank == 0 and time.monotonic() > self._posted + _POST_S:
            self._posted = time.monotonic()
            post_rows(self)
        if self.progress.skipped > self.config.max_skipped:
            first = self.step - self.progress.skipped + 1
            how = "rank 0's log says how to go back"
            if self.recorder:
                how = way_back(Path(self.config.run_dir), self.recorder.spikes.since or first)
            raise NonFiniteError(
                f"step {self.step}: loss or gradient not finite {self.progress.skipped} times in a "
                f"row (max_skipped is {self.config.max_skipped}): {how}, or look at the data"
            )

    @property
    def is_check_due(self) -> bool:
        """Is a comparison of the ranks due, even without a save? One is due after a rank joins."""
        has_come = self.step == self.handed_on + 1
        return has_come or self.cause in BUDGETS or self.step % CHECK_EVERY == 0

    def check_replicas(self) -> None:
        """All ranks: fingerprint the state; raise Diverged unless all ranks have the same."""
        self.clock.enter("checkpoint")
        fp = check_replicas(self.tensors, self.step, self.world)  # all ranks
        self.progress.state_fp = fp
        self.line["state_fp"] = f"{fp:016x}"

    def save(self) -> None:
        """Begin to write a checkpoint; the loop waits for a copy only."""
        self.clock.enter("checkpoint")
        self.worlds.save_soon = False
        if self.recorder:
            known = self.recorder.of_step(self.progress)
            self.recorder.saves.save(self.tensors, self.progress, known)

    def end(self) -> None:
        """All ranks: wait until the last state is on disk. Raises Stopped after a stop; OSError."""
        live.phase("saving the last checkpoint")
        self.check_replicas()  # all ranks
        self.stalls.over = True
        self.worlds.wait_for_records()  # all ranks
        self.spent.take(self.world.all_reduce(torch.from_numpy(self.spent.mine())).numpy())
        if self.recorder and (self._ending is None or self._ending.recorder is not self.recorder):
            self._ending = Ending(self.recorder, self.tensors, self.progress, self.cause)
            self._ending.start()
        ending, is_stopped = self._ending if self.recorder else None, self.cause == "stopped"
        saved = save_last(ending, self.world, lambda: self.stop.asked, self.step, is_stopped)
        with self.worlds.last_words():
            has_readers = self.config.metrics_port or self.config.track != "none"
            if saved and has_readers and self.cause != "stopped":
                wait_for_readers(self.recorder, self.world, self.stop)  # all ranks
            self.world.leave_together()  # all ranks
        if self.cause == "stopped" or not saved:
            raise Stopped(f"{self.stop.cause} after step {self.step}")
