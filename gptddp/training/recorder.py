"""Rank 0's books: the log, the ledger, the metrics and the checkpoints of one life of a run."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gptddp import __version__
from gptddp.checkpoint.writer import Saved, Writer
from gptddp.distributed.connect import World
from gptddp.errors import Diverged, Superseded
from gptddp.run import crash_loop
from gptddp.run.directory import finish
from gptddp.run.history import Ledger, RunLog, complete, read_ledger
from gptddp.run.lease import Lease
from gptddp.run.life import Life
from gptddp.run.lines import RETRY_S
from gptddp.run.progress import Progress
from gptddp.run.quarantine import Decision
from gptddp.run.recovery import Last, last_life, last_save_time, seconds
from gptddp.training.metrics import Metrics, PhaseClock, serve

log = logging.getLogger(__name__)


class Recorder:
    """Made on rank 0 only. Nothing in it is a collective, and no full disk stops the training."""

    def __init__(self, life: Life, lease: Lease, world: World, clock: PhaseClock):
        c = self.config = life.config
        self.life, self.lease, self.world, self.clock = life, lease, world, clock
        run = Path(c.run_dir)
        self.ledger = Ledger(run)
        self.log = RunLog(run, life.generation, self.ledger)
        # A committed checkpoint never knows more steps than the log.
        self.writer = Writer(
            run, life.generation, parent=life.parent, keep=c.keep, before_commit=self.log.sync,
            fence=lease.check,
        )  # fmt: skip
        self.metrics = Metrics(
            run_id=run.name, version=__version__, precision=str(c.precision), model=str(c.preset)
        )
        self.give_up = threading.Event()  # asked at the end, where the disk takes nothing
        self.ended = False
        self._patience_s = min(60.0, max(1.0, 2 * c.checkpoint_every))
        self.trouble: str | None = None  # with the storage, as told
        self._watching = threading.Lock()
        self._saved_at = time.monotonic()
        self._batch_fp: str | None = None  # of the last step
        self._last: Last | None = None  # the life before, until this one has done a step
        self._ready = 0.0  # unix seconds at which the first step began
        self._saving: dict[int, dict[str, str | None]] = {}  # fingerprints of the steps to save
        if c.metrics_port:
            loopback = world.address if world.address.startswith("127.") else ""
            serve(self.metrics, c.metrics_port, loopback)

    def begin(
        self, tensors: Mapping[str, Tensor], params: int, progress: Progress,
        lines: Sequence[Mapping[str, Any]], fault: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Record how this life begins, before its first step, and how the one before has ended.

        `lines` may be missing in the log; `fault` is the word of the rank that has left the state.
        """
        complete(self.config.run_dir, self.log, lines, self.life.step)
        events = read_ledger(self.config.run_dir)
        self._end_of_last(events, [*filter(None, [self.life.last_line]), *lines], fault)
        if self.life.source == "memory":  # lives that are short must not put off the save for ever
            now = time.time()
            since_s = now - last_save_time(events, now)
            self._saved_at -= since_s if since_s >= 0 else math.inf  # a clock was put back
        self.writer.prepare(tensors)  # its buffer now, so that no step has to wait for it
        life, world, m = self.life, self.world, self.metrics
        self._event(
            "start", step=life.step, source=life.source, redo=life.redo,
            world_size=world.world_size, nodes=world.nodes, restarts=world.restarts,
            device=world.device.type, seconds=sum(self.clock.seconds.values()),
            chain_fp=f"{progress.chain_fp:016x}",
        )  # fmt: skip
        m.world_size.set(world.world_size)
        m.nodes.set(world.nodes)
        m.incarnation.set(life.generation)
        m.step.set(life.step)
        m.max_steps.set(self.config.steps or 0)
        m.tokens_seen.set(progress.tokens)
        m.quarantined.set(len(progress.data.get("quarantined", ())))
        self._tokens = progress.tokens
        c = self.config
        log.info(
            "%s: %s, %.1f M parameters, %s on %s, %d ranks; %d rows of %d tokens a step",
            c.run_dir, c.preset, params / 1e6, c.precision, world.device.type, world.world_size,
            c.batch, c.seq_len,
        )  # fmt: skip
        redo = f", {life.redo} steps to do again" if life.redo else ""
        log.info(
            "life %d: from %s, step %d of %d%s",
            life.generation, life.source, life.step, c.steps, redo,
        )  # fmt: skip
        m.checkpoint_time.set_to_current_time()  # so that its age is known to be no less
        self.ledger.settle(5.0)  # a late writer of an older life looks for it
        self._ready = time.time()

    def _end_of_last(
        self, events: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]],
        fault: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Record the end of a life that could not do so itself."""
        newest = max(lines, key=lambda line: line["step"], default=None)
        last = self._last = last_life(events, newest, fault)
        if last and last.cause:
            at = last.failed_time or last.step_time
            cause = crash_loop.first(Path(self.config.run_dir), last.generation) or last.cause
            self.ledger.event("end", last.generation, step=last.step, cause=cause, at=at)

    def due(self) -> bool:
        """Is it time for a checkpoint, and is none being written?"""
        waited = time.monotonic() - self._saved_at
        return waited >= self.config.checkpoint_every and not self.writer.busy

    def step(self, line: dict[str, Any], progress: Progress, step_s: float) -> None:
        """Log one finished step and bring the metrics up to it."""
        self.log.append(line)
        self._batch_fp = line["batch_fp"]
        if self._last:  # this was the first step of a life that is not the first
            parts = seconds(self._last, self.clock.began, self._ready, line["time"])
            self._event("recovered", step=line["step"], world_size=line["world_size"], **parts)
            self._last = None
        m = self.metrics
        m.steps.inc()
        m.tokens.inc(progress.tokens - self._tokens)
        self._tokens = progress.tokens
        m.step.set(progress.step)
        m.tokens_seen.set(progress.tokens)
        m.step_s.observe(step_s)
        m.last_step_time.set_to_current_time()
        m.lr.set(line["lr"])
        if line["loss"] is None:
            m.nonfinite.inc()
            log.warning("step %d: loss or gradient not finite, step skipped", progress.step)
        else:
            m.loss.labels("train").set(line["loss"])
            m.grad_norm.set(line["grad_norm"])
        if "val_loss" in line:
            self._validated(line)
        if progress.step % self.config.log_every == 0:
            self._print(line, step_s)
        m.add_phases(self.clock)
        self.watch()

    def evaluated(self, line: dict[str, Any]) -> None:
        """Log again the step that this life began with: the life before had no time to evaluate."""
        self.log.append(line)
        self._validated(line)

    def _validated(self, line: dict[str, Any]) -> None:
        self.metrics.loss.labels("val").set(line["val_loss"])
        log.info(
            "step %d: validation loss %.4f, %.4f bits a byte",
            line["step"], line["val_loss"], line["val_bpb"],
        )  # fmt: skip

    def _print(self, line: dict[str, Any], step_s: float) -> None:
        left = int((self.config.steps - line["step"]) * step_s)
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.4f}"
        log.info(
            "step %d/%d  loss %s  lr %.2e  %.1fk tok/s  %d ranks  %d:%02d left",
            line["step"], self.config.steps, loss, line["lr"], line["tok_s"] / 1e3,
            line["world_size"], left // 60, left % 60,
        )  # fmt: skip

    def quarantine(self, decision: Decision, progress: Progress) -> None:
        """Record, before any rank acts on it, which row groups are skipped from now on."""
        self._event("quarantine", step=progress.step, **vars(decision))
        self.metrics.quarantined.set(len(progress.data["quarantined"]))
        log.warning(
            "step %d: in quarantine from now on: %s", progress.step, ", ".join(decision.names)
        )

    def diverged(self, error: Diverged, progress: Progress) -> None:
        """Record that no memory of this generation, or an older one, may ever be gone on from."""
        self._event("diverged", step=progress.step, ranks=error.ranks, names=error.names)

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Stage a copy and let the writer's thread commit it; the loop goes on at once."""
        self._saved_at = time.monotonic()
        self._saving[progress.step] = self._fingerprints(progress)
        self.writer.submit(progress.step, tensors, progress.to_meta())

    def watch(self) -> None:
        """Record the saves that have ended, and tell once when the storage fails or works again.

        Raises Superseded where this life has been found to be over.
        """
        with self._watching:
            while saved := self.writer.poll():
                self._record(saved)
            books = (self.writer, self.ledger, self.log)
            trouble = next(filter(None, (it.trouble(self._patience_s) for it in books)), None)
            self.metrics.storage_trouble.set(trouble is not None)
            if trouble and not self.trouble:
                log.error("STORAGE: %s; training goes on, and tries again", trouble)
            elif self.trouble and not trouble:
                log.warning("STORAGE: it works again")
            self.trouble = trouble
        if self.lease.lost or isinstance(self.writer.failure, Superseded):
            raise Superseded(self.lease.lost or str(self.writer.failure))

    def _record(self, saved: Saved) -> None:
        m, fingerprints = self.metrics, self._saving.pop(saved.step, {})
        if saved.error:
            m.saves.labels("failure").inc()
            self._event("checkpoint", step=saved.step, error=saved.error)
            return
        m.saves.labels("success").inc()
        m.checkpoint_step.set(saved.step)
        m.checkpoint_time.set_to_current_time()
        self._event(
            "checkpoint", step=saved.step, name=saved.name, nbytes=saved.nbytes,
            stall_s=saved.stall_s, write_s=saved.write_s, **fingerprints,
        )  # fmt: skip

    def end(self, tensors: Mapping[str, Tensor], progress: Progress, cause: str) -> None:
        """Have the last state on disk, then say how this life ended; in a thread, as it may hang.

        Tries again until the disk takes it or `give_up` is set. `ended` says if it did.
        """

        def save() -> None:
            self.writer.wait()
            if not self.writer.has(progress.step):
                self.save(tensors, progress)
                self.writer.wait()
            self.watch()
            if self.writer.failure:
                raise self.writer.failure

        def say() -> None:
            self.log.sync()
            if cause != "stopped":
                finish(self.life, progress.step, cause)

        where, error = "no step was done", None
        if progress.step > self.life.step or self.life.source == "memory":
            error = self._insist(save)
            where = error or f"checkpoint {self.writer.parent} is saved"
        if error is None or cause == "stopped":
            self._event("stop", step=progress.step, cause=cause, **self._fingerprints(progress))
            error = self._insist(say) or error
            self.lease.release()
            verb, why = ("stopped", "") if cause == "stopped" else ("finished", f" ({cause})")
            log.info("%s after step %d%s: %s", verb, progress.step, why, where)
        self.ended = error is None

    def _insist(self, work: Callable[[], None]) -> str | None:
        """Do it until the disk lets us; the error if we are told to give up."""
        while True:
            try:
                work()
                return None
            except OSError as error:
                if self.give_up.wait(RETRY_S):
                    return str(error)
            except Exception as error:  # no disk will mend it
                return str(error)

    def _fingerprints(self, progress: Progress) -> dict[str, str | None]:
        """Of the rows of the last step; batch_fp is null before this life's first."""
        return {"batch_fp": self._batch_fp, "chain_fp": f"{progress.chain_fp:016x}"}

    def _event(self, event: str, **fields: Any) -> None:
        self.ledger.event(event, self.life.generation, **fields)

    def close(self) -> None:
        """Close the files; what the disk has not taken is written if it takes it now."""
        self.log.close()
        self.ledger.close()
        self.lease.close()
