"""One life of a run, around the loop of `train`: what stands between the lines of its model step.

A life begins from the newest state, and hands its own on to the next: by the storage at its end and
now and then before, by memory when a peer is lost (guard.py).
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp.budget import BUDGETS, used_up
from gptddp.checkpoint import snapshot
from gptddp.checkpoint.load import copy_into
from gptddp.checkpoint.saved_state import SavedState
from gptddp.data.dataset import Dataset
from gptddp.data.loader import Batch
from gptddp.distributed import environment, pulse
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import machine
from gptddp.distributed.replicas import CHECK_EVERY, check_replicas
from gptddp.errors import NonFiniteError, Stopped
from gptddp.model.evaluate import evaluate
from gptddp.model.gpt import GPT
from gptddp.run import crash_loop
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.training import quarantine
from gptddp.training.agree import Agreed, agree
from gptddp.training.clock import PhaseClock, RankSeconds
from gptddp.training.end import save_last, wait_for_scrape
from gptddp.training.go_back import way_back
from gptddp.training.guard import Guard
from gptddp.training.late_save import LateSave
from gptddp.training.live_state import LiveState
from gptddp.training.recorder import Recorder
from gptddp.training.rows import Rows
from gptddp.training.samples import sample
from gptddp.training.stalls import Stalls
from gptddp.training.stop import StopFlag

_PATIENCE = 8  # so many times as long as a step takes, a silent peer is waited for


class Life:
    """A life of the run as the loop sees it. Methods are for all ranks alike.

    The live state (tensors and progress) is whole except within `stepping`: only then is there none
    to hand on. Storage, log and metrics are rank 0's, in `recorder`.
    """

    def __init__(
        self,
        origin: Origin,
        state: SavedState,
        lease: Lease | None,
        dataset: Dataset,
        world: World,
        stop: StopFlag,
        clock: PhaseClock,
    ) -> None:
        """`lease`: on rank 0 only, and not in an audit."""
        self.origin, self.config = origin, origin.config  # the run's, every field closed
        self.world, self.stop, self.clock = world, stop, clock
        self.progress = Progress.from_meta(state.meta)
        self.spent = RankSeconds(clock, world, world.device)
        self.recorder = Recorder(origin, dataset, lease, world, self.spent) if lease else None
        memory, run_dir = environment.shared_memory(), origin.config.run_dir
        path = snapshot.path_of(memory, run_dir) if memory else None
        self.live = LiveState(path, origin, self.spent)
        self.live.identity = {"life": world.life, "pods": world.pods}
        self.late = LateSave(self.live)
        # Why the loop ends: "stopped", or the budget that is used up; "" while it goes on.
        self.cause = used_up(origin.config, self.progress.step, self.progress.tokens)
        self.line: dict[str, Any] = {}  # of the log, of the last finished step
        self._state: SavedState | None = state  # until it is restored
        self._dataset, self.tokenizer = dataset, dataset.tokenizer()
        self._rows: Rows  # from `guard` on
        self._net: GPT  # from `restore` on
        self._tensors: Mapping[str, Tensor]  # the live ones, likewise
        self._save_due = False  # on rank 0, by rank 0's own clock
        self._began_step = 0.0  # monotonic
        self._parts, self._beats = 0, 0  # micro-batches of the step; of the pulse, at its beginning
        self.stalls = Stalls(world, clock, self.recorder.stalled if self.recorder else None)
        self._guard = Guard(self.live, self.progress, self.recorder, world, stop, self.stalls)
        stop.holds = origin.source == "memory"
        stop.last_words = lambda: self.live.leave_snapshot(stop.cause)
        stop.unfinished = self._unfinished
        stop.hung, stop.silent = self._guard.hung, self.stalls.silent
        if self.recorder:
            self.recorder.metrics.state = lambda: clock.state(stop.asked)

    @property
    def step(self) -> int:
        """Finished optimizer steps of the run."""
        return self.progress.step

    @property
    def goes_on(self) -> bool:
        """Is there another step to do?"""
        return not self.cause

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around all of it: rows are read, and how the life ends is recorded, see guard.py."""
        self._rows = Rows(self._dataset, self.config, self.world, self.progress.data)
        try:
            with self._guard.around():
                if not self.step:  # a mistake is told at once; a recovery must not wait for them
                    _ = self._rows.validation
                yield
        finally:
            self._rows.close()

    def restore(self, net: GPT, tensors: Mapping[str, Tensor]) -> None:
        """All ranks: the newest state into these live tensors, by name; then the life has begun.

        Raises CheckpointError where the state is another model's or not the one that was saved,
        Diverged where ranks differ.
        """
        self.clock.enter("restore")
        state, self._state = self._state, None  # a mapped snapshot would leave no room for the next
        assert state is not None
        if saved := state.tensors:  # one rank only
            # weights alone begin a run: the optimizer is as it is made
            copy_into(tensors if self.step else {n: tensors[n] for n in saved}, saved)
        if self.step or self.config.init_sha256:
            self.world.broadcast(tensors.values(), self.origin.holder)  # all ranks
        fp = check_replicas(tensors, self.step, self.world)  # all ranks
        self.progress.confirm(fp, self.origin.source)
        self._net, self._tensors, self._guard.restored = net, tensors, True
        lines = {it["step"]: it for it in state.lines if it["step"] <= self.step}
        self.live.take_over(lines, state.events)  # rank 0 may be lost before it has them on disk
        self.live.mark_whole(tensors, self.progress)
        machines = sorted(set(map(str, self.world.gather(machine(self.world.device)))))  # all ranks
        if self.recorder:
            self.recorder.begin(tensors, net.n_params(), self.progress, state, machines)
        pending = self.recorder.ledger.pending if self.recorder else None
        begun = self.world.broadcast_value(pending() if pending else [], 0)  # all ranks
        self.live.begun(begun, pending)
        chain = f"{self.progress.chain_fp:016x}"  # the log may be another run's
        known = filter(None, (self.origin.line, lines.get(self.step)))
        self.line = next((it for it in known if it.get("chain_fp") == chain), {})
        self.stop.holds = True
        if verdict := environment.verdict():
            crash_loop.forget(verdict.parent)

    # -- a step ------------------------------------------------------------------------------------

    def next_batch(self) -> Batch:
        """This rank's rows of the next step; none, and `bad`, where a row group cannot be read."""
        self.clock.enter("data_wait")
        pulse.beat(self.step + 1)
        decided = self.origin.quarantine.get(self.step, ())
        batch = quarantine.next_batch(self._rows.loader, self.config.on_bad, decided)
        redo = self.step < self.origin.step + self.origin.redo
        self.clock.enter("warmup" if self.step == self.origin.step else "redo" if redo else "step")
        self._began_step, self._beats = time.monotonic(), pulse.beats()
        rows = self.config.batch // self.config.lanes  # of a slot
        self._parts = len(batch.tokens) // rows * -(-rows // self.config.micro_batch)
        return batch

    def _unfinished(self) -> str:
        """In a thread: the step that a stop waits for; "" where there is none."""
        if self.clock.phase not in ("warmup", "redo", "step") or environment.ranks().local_rank:
            return ""
        took_s, done = time.monotonic() - self._began_step, pulse.beats() - self._beats
        left_s = (self.stalls.usual_s or took_s * self._parts / max(done, 1)) - took_s
        more = f"about {left_s:.0f} s more" if left_s > 0 else "which takes longer than usual"
        return f"finishing step {self.step + 1}, {more}"

    def agree(self, batch: Batch) -> Agreed:
        """All ranks: what this step is, and whether it is done at all; no rank decides alone."""
        self.late.look()
        self._save_due = self.recorder is not None and self.recorder.saves.is_due
        save, late = self._save_due or self.late.wants_state, self.late.in_progress
        logged = self.recorder.log.durable_step if self.recorder else 0
        stop, now = self.stop.asked, self.progress
        agreed = agree(batch, stop, now.train_s, save, late, logged, self.spent, self.world)
        self.live.forget(agreed.logged)
        now.train_s = agreed.train_s  # whichever rank's state is gone on from, it has what decided
        budget = used_up(self.config, now.step, now.tokens, now.train_s)
        self.cause = "stopped" if agreed.stop else budget
        if not self.cause:  # else rank 0 saves this state, and has the volume to itself
            self.late.hand_over(agreed.logged)
        if self.recorder:
            self.recorder.saves.delegate(agreed.late)
        return agreed

    def quarantine(self, batch: Batch) -> None:
        """All ranks: leave out for good what some rank cannot read; the step is tried again."""
        self.clock.enter("data_wait")
        decision = quarantine.decide(batch, self._rows.loader, self.progress, self.world)
        about = {"time": time.time(), "generation": self.origin.generation, "step": self.step}
        if self.recorder:  # before any rank acts on it
            self.recorder.events.emit("quarantine", **about, **decision)
        # every rank keeps it, as rank 0 may be lost
        self.live.keep_event({"event": "quarantine", **about, **decision}, self.step)
        self._rows.reopen(self.progress.data)

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
        self.live.mark_changing()
        yield finite
        self._guard.since = time.monotonic()
        step_s = self._guard.since - self._began_step
        data = self._rows.loader.state(agreed.cursors)
        self.progress.advance(agreed.targets, agreed.fp, finite, step_s + batch.wait_s, data)
        self.cause = used_up(self.config, self.step, self.progress.tokens)
        self.world.set_timeout(_PATIENCE * self.stalls.stepped(step_s))
        skipped = {} if finite else {"loss": None, "grad_norm": None}
        self.line = self._make_line(batch, agreed, step_s, {**numbers, **skipped})
        self.live.keep(self.line)
        self.live.mark_whole(self._tensors, self.progress)

    def _make_line(
        self, batch: Batch, agreed: Agreed, step_s: float, numbers: Mapping[str, float | None]
    ) -> dict[str, Any]:
        """The line of the log: every rank makes the same one, as rank 0 may be lost."""
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
        """All ranks: evaluate the last step. Where a stop cuts it off, the next life does it."""
        self.clock.enter("eval")
        c, stop = self.config, self.stop
        model = self._net, self._rows.validation, self.tokenizer
        result = evaluate(*model, c, self.world, lambda: stop.asked)  # all ranks
        if result is None:
            self.cause = "stopped"
            return
        self.line |= {"val_loss": result.loss, "val_bpb": result.bpb}
        if self.recorder and c.sample_tokens:
            text = sample(self._net, self.tokenizer, c)
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
        if self.cause == "stopped":
            return
        if unchecked:
            self.check_replicas()  # all ranks
        self.live.keep(self.line)
        if self.recorder:
            self.recorder.completed(self.line, missed)

    def record(self) -> None:
        """Log the step. Raises NonFiniteError after too many in a row that are not finite."""
        if self.recorder:
            self.clock.enter("books")
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
        """Is it time to compare the ranks, checkpoint or not?"""
        return self.cause in BUDGETS or self.step % CHECK_EVERY == 0

    def check_replicas(self) -> None:
        """All ranks: the fingerprint of the state; raise Diverged unless all have the same."""
        self.clock.enter("checkpoint")
        fp = check_replicas(self._tensors, self.step, self.world)  # all ranks
        self.progress.state_fp = fp
        self.line["state_fp"] = f"{fp:016x}"

    def save(self) -> None:
        """Begin to write a checkpoint, here or in a launcher; the loop waits for a copy only."""
        self.clock.enter("checkpoint")
        self.late.copy(self.step)
        if self.recorder and self._save_due:
            known = self.recorder.of_step(self.progress)
            self.recorder.saves.save(self._tensors, self.progress, known)
        elif self.recorder:  # a launcher saves it, when the log is on the disk up to this step
            self.recorder.log.sync_soon()
            self.recorder.saves.look_in_ledger()

    def end(self) -> None:
        """All ranks wait for the last state to be on disk. Raises Stopped for a stop, OSError."""
        self.check_replicas()  # all ranks
        self.stalls.over = True
        self.spent.take(self.world.all_reduce(torch.from_numpy(self.spent.mine())).numpy())
        state = self.live, self.world, lambda: self.stop.asked, self._tensors, self.progress
        saved = save_last(self.recorder, *state, self.cause)
        if saved and self.config.metrics_port and self.cause != "stopped":
            wait_for_scrape(self.recorder, self.world, self.stop, finished=True)  # all ranks
        self.world.leave_together()  # all ranks
        if self.cause == "stopped" or not saved:
            raise Stopped(f"{self.stop.cause} after step {self.step}")
        self.live.remove_snapshot()
