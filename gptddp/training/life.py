"""One life of a run, around the loop of `train`: what stands between the lines of its model step.

A life begins from the newest state, and hands its own on to the next: by the storage at its end and
now and then before, by memory when a peer is lost.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp.budget import BUDGETS, used_up
from gptddp.checkpoint.load import copy_into
from gptddp.config import Config
from gptddp.data.loader import Batch
from gptddp.distributed import connect, environment, peers, pulse, storage
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import machine
from gptddp.distributed.replicas import CHECK_EVERY, check_replicas
from gptddp.distributed.report import report
from gptddp.errors import (
    Diverged,
    GptddpError,
    Hung,
    LostPeer,
    NonFiniteError,
    Stopped,
    Superseded,
)
from gptddp.model.evaluate import Evaluation
from gptddp.run import crash_loop
from gptddp.run.progress import Progress
from gptddp.training import line, quarantine
from gptddp.training.agree import Agreed, agree
from gptddp.training.choose import NewestState
from gptddp.training.clock import PhaseClock, RankSeconds
from gptddp.training.end import save_last, wait_for_scrape
from gptddp.training.late_save import LateSave
from gptddp.training.live_state import LiveState
from gptddp.training.recorder import Recorder
from gptddp.training.rows import Rows
from gptddp.training.stalls import Stalls
from gptddp.training.stop import StopFlag

_PATIENCE = 8  # so many times as long as a step takes, a silent peer is waited for


class Life:
    """A life of the run as the loop sees it; made by `begin`. Methods are for all ranks alike.

    The live state (tensors and progress) is whole but within `stepping`: only then is there none to
    hand on. Storage, books and metrics are rank 0's, in `recorder`.
    """

    def __init__(self, state: NewestState, world: World, stop: StopFlag, clock: PhaseClock) -> None:
        origin = self.origin = state.origin
        self.world, self.stop, self.clock = world, stop, clock
        self.progress = Progress.from_meta(origin.meta)
        self.spent = RankSeconds(clock, world, world.device)
        self.recorder = Recorder(origin, state.lease, world, self.spent) if state.lease else None
        self.live = LiveState(state.snapshot_path, origin, self.spent)
        self.live.of = {"life": world.life, "pods": world.pods}
        self.late = LateSave(self.live)
        # Why the loop ends: "stopped", or the budget that is used up; "" while it goes on.
        self.cause = used_up(origin.config, self.progress.step, self.progress.tokens)
        self.line: dict[str, Any] = {}  # of the log, of the last finished step
        self._state: NewestState | None = state  # until it is restored
        self._tensors: Mapping[str, Tensor] = {}  # the live ones
        self._save_due = False  # on rank 0, by rank 0's own clock
        self._began_step = self._ended_step = 0.0  # monotonic: of the last step
        stop.holds = origin.source == "memory"
        stop.last_words = lambda: self.live.leave_snapshot(stop.cause)
        stop.hung = self._hung
        self.stalls = Stalls(world, clock, self.recorder.stalled if self.recorder else None)
        stop.silent = self.stalls.silent
        if self.recorder:
            self.recorder.metrics.state = lambda: clock.state(stop.asked)

    @property
    def config(self) -> Config:
        """The run's configuration, every field closed."""
        return self.origin.config

    @property
    def step(self) -> int:
        """Finished optimizer steps of the run."""
        return self.progress.step

    @property
    def goes_on(self) -> bool:
        """Is there another step to do?"""
        return not self.cause

    # -- around all of it --------------------------------------------------------------------------

    @contextmanager
    def guard(self, rows: Rows) -> Iterator[None]:
        """Whatever ends the life inside: what the next one needs of it is left behind.

        A lost peer leaves the live state in memory (LostPeer), and so does another job that has
        taken over the run: it may end before it has saved anything. Ranks that differ leave nothing
        (Diverged), an error of the trainer's own is counted (CrashLoopError the third time).
        """
        self._rows, self._ended_step = rows, time.monotonic()
        try:
            yield
        except Superseded as error:
            self.live.leave_snapshot(str(error))
            raise
        except NonFiniteError:  # all ranks, in the same step
            self.stalls.over = True
            if self.config.metrics_port:
                with suppress(RuntimeError):  # a rank that is lost now changes nothing
                    wait_for_scrape(self.recorder, self.world, self.stop)  # all ranks
            raise
        except GptddpError:
            raise
        except Exception as error:
            pulse.allow(connect.FIRST_TIMEOUT_S)  # what follows may be long: a snapshot of any size
            if peers.is_lost_peer(error):  # no step is half done: its collectives come before it
                waited_s = time.monotonic() - self._ended_step
                blame, closed = peers.blame(error, self.world, waited_s)
                self.live.leave_snapshot(f"after step {self.step}: {blame}", closed)
                raise LostPeer(f"after step {self.step}: {blame}") from error
            if isinstance(error, Diverged):
                self.live.remove_snapshot()
                if self.recorder:
                    who = {"ranks": error.ranks, "names": error.names}
                    self.recorder.events.emit("diverged", step=self.step, **who)
            elif final := self._count_failure(error):
                if self.recorder:
                    self.recorder.last_numbers()
                    self.recorder.wait_for_scrape(lambda: self.stop.asked)
                raise final from error
            raise
        finally:
            self._rows.close()
            if self.recorder:
                self.recorder.close()

    def _count_failure(self, error: Exception) -> GptddpError | None:
        about = {"generation": self.origin.generation, "rank": self.world.rank}
        run = Path(self.config.run_dir)
        return crash_loop.final(error, run, step=self.step + 1, pod=environment.pod(), **about)

    def _hung(self, where: str) -> int:
        """In a thread: this rank hangs, and its process is about to end with this exit code.

        An error of the trainer's own, but for a hang on the way to the first step, where it is
        mostly a volume, and for a volume that is waited for: it may come back.
        """
        reads = storage.waited_for()
        hung = Hung(f"it {where}, waiting for {reads}" if reads else f"it {where}")
        if not self._tensors:
            return hung.exit_code
        self.live.leave_snapshot(f"rank {self.world.rank} ({environment.pod()}): {hung}")
        if reads or not (final := self._count_failure(hung)):
            return hung.exit_code
        report(final)
        return final.exit_code

    def restore(self, tensors: Mapping[str, Tensor], n_params: int) -> None:
        """All ranks: the newest state into these live tensors, by name; then the life has begun.

        Raises CheckpointError where the state is another model's or not the one that was saved,
        Diverged where ranks differ.
        """
        self.clock.enter("restore")
        state, self._state = self._state, None  # a mapped snapshot would leave no room for the next
        assert state is not None
        if (saved := state.tensors) is not None:  # one rank only
            # weights alone begin a run: the optimizer is as it is made
            copy_into(tensors if self.step else {n: tensors[n] for n in saved}, saved)
        if self.step or self.config.init_sha256:
            self.world.broadcast(tensors.values(), state.source)  # all ranks
        fp = check_replicas(tensors, self.step, self.world)  # all ranks
        self.progress.confirm(fp, self.origin.source)
        self._tensors = tensors
        lines = {it["step"]: it for it in state.lines if it["step"] <= self.step}
        self.live.take_over(lines, state.events)  # rank 0 may be lost before it has them on disk
        self.live.mark_whole(tensors, self.progress)
        machines = sorted(set(map(str, self.world.gather(machine(self.world.device)))))  # all ranks
        if self.recorder:
            self.recorder.begin(tensors, n_params, self.progress, state, machines)
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
        self._began_step = time.monotonic()
        return batch

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
        if self.recorder:  # before any rank acts on it
            self.recorder.quarantine(decision, self.progress)
        else:
            fields = {"time": time.time(), "generation": self.origin.generation, "step": self.step}
            self.live.keep_event({"event": "quarantine", **fields, **vars(decision)}, self.step)
        self._rows.reopen(self.progress.data)

    @contextmanager
    def stepping(
        self, batch: Batch, agreed: Agreed, wait_s: float, **numbers: float
    ) -> Iterator[bool]:
        """Around the change of the live state: whole before, whole after, nobody's in between.

        `wait_s`: for other ranks, in the step; `numbers`: loss, grad_norm and lr. Yields whether
        they are finite: the same on every rank, since they come out of sums over all of them. A
        step that is not has used its data all the same.
        """
        self.spent.waited(wait_s)
        finite = all(map(math.isfinite, numbers.values()))
        self.live.mark_changing()
        yield finite
        self._ended_step = time.monotonic()
        step_s = self._ended_step - self._began_step
        data = self._rows.loader.state(agreed.cursors)
        self.progress.advance(agreed.targets, agreed.fp, finite, step_s + batch.wait_s, data)
        self.cause = used_up(self.config, self.step, self.progress.tokens)
        self.world.set_timeout(_PATIENCE * self.stalls.stepped(step_s))
        no: dict[str, float | None] = {} if finite else {"loss": None, "grad_norm": None}
        done = batch, agreed, self.progress, step_s, numbers | no
        self.line = line.of_step(self.config, self.world, self.spent, *done)
        self.live.keep(self.line)
        self.live.mark_whole(self._tensors, self.progress)

    # -- after a step ------------------------------------------------------------------------------

    @property
    def is_evaluation_due(self) -> bool:
        """Every `eval_every` steps and at the last one, which may be earlier than was meant."""
        return self.cause in BUDGETS or self.step % self.config.eval_every == 0

    def evaluate(self, validate: Callable[[], Evaluation | None]) -> None:
        """All ranks: evaluate the last step. Where a stop cuts it off, the next life does it."""
        self.clock.enter("eval")
        if result := validate():
            self.line |= {"val_loss": result.loss, "val_bpb": result.bpb}
        else:
            self.cause = "stopped"

    def complete_line(self, validate: Callable[[], Evaluation | None]) -> None:
        """All ranks: the evaluation and the fingerprint that the line of the last step lacks.

        The life before was cut off in them. Or time is used up, which is known before the next step
        only: the one before it was the last.
        """
        unchecked = self.is_check_due and "state_fp" not in self.line
        missed = self.is_evaluation_due and "val_loss" not in self.line
        if not self.line or self.cause == "stopped" or not (missed or unchecked):
            return
        if missed:
            self.evaluate(validate)
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
            self.recorder.step(self.line, self.progress, self._ended_step - self._began_step)
        self.clock.enter("other")
        if self.progress.skipped > self.config.max_skipped:
            raise NonFiniteError(
                f"step {self.step}: loss or gradient not finite {self.progress.skipped} times "
                f"in a row (max_skipped is {self.config.max_skipped}): lower lr, or look at the "
                "data"
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
            self.recorder.save(self._tensors, self.progress)
        elif self.recorder:
            self.recorder.leave_save()

    def end(self) -> None:
        """All ranks: no rank leaves before the last state is on disk. Raises Stopped for a stop."""
        self.check_replicas()  # all ranks
        self.stalls.over = True
        self.spent.take(self.world.all_reduce(torch.from_numpy(self.spent.mine())).numpy())
        state = self.live, self.world, lambda: self.stop.asked, self._tensors, self.progress
        saved = save_last(self.recorder, *state, self.cause)
        if saved and self.config.metrics_port:
            finished = self.cause != "stopped"
            wait_for_scrape(self.recorder, self.world, self.stop, finished)  # all ranks
        self.world.leave_together()  # all ranks
        if self.cause == "stopped" or not saved:
            raise Stopped(f"{self.stop.cause} after step {self.step}")
        self.live.remove_snapshot()
