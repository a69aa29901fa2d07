"""One life of a run, around the loop of `train`: what stands between the lines of its model step.

A life begins from the newest state on the storage, or comes into the world of one that goes on. It
saves its own there, now and then and at its end. What becomes of it as ranks are lost and come is
in worlds.py.
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
from gptddp.distributed.replicas import CHECK_EVERY, check_replicas
from gptddp.errors import NonFiniteError, Stopped
from gptddp.model.evaluate import evaluate
from gptddp.model.gpt import GPT
from gptddp.model.sums import Sums
from gptddp.run import crash_loop
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.training import quarantine
from gptddp.training.agree import Agreed, agree
from gptddp.training.clock import PhaseClock
from gptddp.training.end import Ending, save_last, wait_for_readers
from gptddp.training.go_back import way_back
from gptddp.training.guard import Guard
from gptddp.training.parts import LifeParts
from gptddp.training.rows import Rows
from gptddp.training.samples import sample
from gptddp.training.stop import StopFlag
from gptddp.training.worlds import Worlds

_PATIENCE = 8  # so many times as long as a step takes, a silent peer is waited for


class Life(LifeParts):
    """A life of the run as the loop sees it. Methods are for all ranks alike.

    The live state (tensors and progress) is whole except within `stepping`: only then is there none
    to hand on. Storage, log and metrics are rank 0's, in `recorder`.
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
        """`state`: None on a rank that gets it from others. `lease`: on rank 0 only, and not in an
        audit.
        """
        super().__init__(origin, state.meta if state else {}, lease, dataset, world, stop, clock)
        self._state: SavedState | None = state  # until it is restored
        self.tokenizer = dataset.tokenizer()
        self.worlds: Worlds  # from `restore` on
        self._began_step = 0.0  # monotonic
        self._ending: Ending | None = None  # rank 0 only
        self._guard = Guard(self)
        stop.hung, stop.silent = self._guard.hung, self.stalls.silent

    @property
    def goes_on(self) -> bool:
        """Is there another step to do in this world?"""
        return not self.cause and not self.worlds.ends

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around all of it: rows are read, and how the life ends is recorded, see guard.py."""
        data = self.progress.data if self._state else None
        self.rows = Rows(self.dataset, self.config, self.world, data)
        try:
            with self._guard.around():
                if not self.step:  # a mistake is told at once; a recovery must not wait for them
                    live.phase("reading the validation data")
                    _ = self.rows.validation
                live.phase("building the model")
                yield
        finally:
            self.rows.close()

    def restore(self, net: GPT, tensors: Mapping[str, Tensor], sums: Sums) -> None:
        """All ranks: the newest state into these live tensors, by name; then the life has begun.

        Not on a rank that comes later. Raises CheckpointError where the state is another model's or
        not the one that was saved, Diverged where ranks differ.
        """
        self.clock.enter("restore")
        self.net, self.tensors = net, tensors
        self.worlds = Worlds(self, sums)
        state, self._state = self._state, None
        if state is None:
            return
        if saved := state.tensors:  # one rank only
            # weights alone begin a run: the optimizer is as it is made
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
        chain = f"{self.progress.chain_fp:016x}"  # the log may be another run's
        known = self.origin.line or {}
        self.line = known if known.get("chain_fp") == chain else {}

    def _begun(self) -> None:
        """All ranks: keep how these records begin, as long as it is not on rank 0's disk."""
        begun = self.recorder.ledger.pending() if self.recorder else []
        self.live.begun(self.world.broadcast_value(begun, 0), self.step)  # all ranks

    def go_on(self, moved: bool) -> None:
        """All ranks, which have the same state: what is due before the next step; `moved`: into
        another world.
        """
        self.stop.holds = self._guard.restored = True
        if verdict := environment.verdict():
            crash_loop.forget(verdict.parent)
        if not moved:
            return
        self.rows.move(self.progress.data, self.world.rank, self.world.world_size)
        self.cause = used_up(self.config, self.step, self.progress.tokens)
        if self.recorder and self.recorder.last_step < self.step:  # cut off behind the step
            self.recorder.step(self.line, self.progress, 0.0)
        elif self.recorder and self.line and self.recorder.line != self.line:  # another had more
            self.recorder.completed(self.line, "val_loss" in self.line)

    # -- a step ------------------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """This rank's rows of the next step; none, and `bad`, where a row group cannot be read."""
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
        """All ranks: what this step is, and whether it is done at all; no rank decides alone."""
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
        now.train_s = agreed.train_s  # whichever rank's state is gone on from, it has what decided
        self.cause = used_up(self.config, now.step, now.tokens, now.train_s)
        self.worlds.agreed(agreed.stop, agreed.late, asked, agreed.news)
        return agreed

    def quarantine(self, batch: Batch) -> None:
        """All ranks: leave out for good what some rank cannot read; the step is tried again."""
        self.clock.enter("data_wait")
        decision = quarantine.decide(batch, self.rows.loader, self.progress, self.world)
        about = {"time": time.time(), "generation": self.generation, "step": self.step}
        event = {"event": "quarantine", **about, **decision}
        if self.recorder:  # before any rank acts on it
            self.recorder.events.emit("quarantine", **event)
        elif self.worlds.takeover:
            self.worlds.takeover.events.append(event)
        self.live.keep_event(event, self.step)  # every rank keeps it, as rank 0 may be lost
        self.rows.reopen(self.progress.data)

    @contextmanager
    def stepping(
        self, batch: Batch, agreed: Agreed, numbers: Mapping[str, float], wait_s: float
    ) -> Iterator[bool]:
        """Around the change of the live state: whole before and after, and not to be left within.

        `numbers`: loss, grad_norm and lr. Yields whether they are finite, which is the same on
        every rank, as they come out of sums over all of them. A step that is not has used its data
        all the same. `wait_s`: how long this rank has waited for others in it.
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
        """Of the log, for the step that is just finished; `step_s`: without the wait for its rows.

        Every rank makes the same one, as rank 0 may be lost.
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
        if self.config.max_time:  # without it the rate is a function of step and tokens
            line["train_s"] = agreed.train_s
        if spent.is_due:
            line |= {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3)}
        return line

    # -- after a step ------------------------------------------------------------------------------

    @property
    def is_evaluation_due(self) -> bool:
        """Every `eval_every` steps and at the last one, which may be earlier than was meant."""
        return self.cause in BUDGETS or self.step % self.config.eval_every == 0

    def evaluate(self) -> None:
        """All ranks: evaluate the last step. Where a stop cuts it off, who goes on does it."""
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
        """All ranks: the evaluation and the fingerprint that the line of the last step lacks.

        The life before was cut off in them. Or time is used up, which is known before the next step
        only: the one before it was the last.
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
        """Log the step. Raises NonFiniteError after too many in a row that are not finite."""
        if self.recorder:
            self.clock.enter("logging")
            self.recorder.step(self.line, self.progress, self._guard.since - self._began_step)
        self.clock.enter("other")
        if self.progress.skipped > self.config.max_skipped:
            first = self.step - self.progress.skipped + 1
            how = "rank 0 says how to go back"
            if self.recorder:
                how = way_back(Path(self.config.run_dir), self.recorder.spikes.since or first)
            raise NonFiniteError(
                f"step {self.step}: loss or gradient not finite {self.progress.skipped} times in a "
                f"row (max_skipped is {self.config.max_skipped}): {how}, or look at the data"
            )

    @property
    def is_check_due(self) -> bool:
        """Is it time to compare the ranks, checkpoint or not? Soon, where one has just come."""
        has_come = self.step == self.handed_on + 1
        return has_come or self.cause in BUDGETS or self.step % CHECK_EVERY == 0

    def check_replicas(self) -> None:
        """All ranks: the fingerprint of the state; raise Diverged unless all have the same."""
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
        """All ranks wait for the last state to be on disk. Raises Stopped for a stop, OSError."""
        live.phase("saving the last checkpoint")
        self.check_replicas()  # all ranks
        self.stalls.over = True
        self.worlds.wait_for_books()  # all ranks
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
