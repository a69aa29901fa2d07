"""Rank 0's part of a life: what happens in it, as events; its saves, and the last scrape."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp import __version__
from gptddp.data import lanes
from gptddp.distributed import environment, known_lives
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import peak_flops
from gptddp.files import patiently
from gptddp.run import crash_loop, log_check, summary
from gptddp.run.history import Ledger, RunLog, complete, recover
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.run.recovery import Last, last_life, seconds
from gptddp.run.summary import Summary
from gptddp.training import results
from gptddp.training.changes import fields_of
from gptddp.training.choose import NewestState
from gptddp.training.clock import RankSeconds
from gptddp.training.console import Console
from gptddp.training.events import Events, to_ledger, to_log
from gptddp.training.metrics import Metrics
from gptddp.training.samples import to_samples
from gptddp.training.saves import Saves
from gptddp.training.scrapes import Scrapes
from gptddp.training.spikes import Spikes
from gptddp.training.stalls import Stall
from gptddp.training.stragglers import Stragglers

log = logging.getLogger(__name__)


class Recorder:
    """Made on rank 0 only. Nothing in it is a collective, and no full disk stops the training."""

    def __init__(self, origin: Origin, lease: Lease, world: World, spent: RankSeconds):
        c = self.config = origin.config
        self.origin, self.lease, self.world = origin, lease, world
        self.spent, self.clock = spent, spent.clock
        run = Path(c.run_dir)
        self.ledger = Ledger(run)
        self.log = RunLog(run, origin.generation, self.ledger)
        on_gpu = world.device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(world.device), c) if on_gpu else None
        self.metrics = Metrics(
            c,
            spent,
            self._peak and self._peak * world.world_size,
            run_id=run.name,
            version=__version__,
            torch=torch.__version__,
            precision=str(c.precision),
            model=str(c.preset),
        )
        self._sums = Summary()  # of the run's events
        records = to_ledger(self.ledger), to_log(self.log)
        views = self._count, self.metrics, Console(origin), to_samples(run)
        self.events = Events(origin.generation, records, views)
        self.saves = Saves(origin, lease, self.log, self.ledger, self.events)
        self._line: Mapping[str, Any] = origin.line or {}  # of the last step
        self._batch_fp: str | None = None  # of it, if this life has done it
        self._last: Last | None = None  # the life before, until this one has done a step
        slots = (lanes.owned(rank, world.world_size, c.lanes) for rank in range(world.world_size))
        self._stragglers = Stragglers([len(it) for it in slots])
        self._spikes = Spikes()
        self._stall: Stall | None = None  # that is told and lasts
        self._ready = 0.0  # unix seconds at which the first step began
        self._stepped_at = time.monotonic()  # when the last step was recorded
        self._scrapes: Scrapes | None = None
        if c.metrics_port:
            loopback = world.address if world.address.startswith("127.") else ""
            self._scrapes = Scrapes(self.metrics.registry, c.metrics_port, loopback)

    def _count(self, event: Mapping[str, Any]) -> None:
        """A sink: the state of the run, as the ledger will say it."""
        self._sums.add(event)

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        params: int,
        progress: Progress,
        state: NewestState,
        machines: Sequence[str],
    ) -> None:
        """Record how this life begins, before its first step, and how the one before has ended.

        What memory has kept of log and ledger (`state`) is added to them where it is missing.
        """
        origin = self.origin
        run = self.config.run_dir
        ledger = patiently(lambda: summary.read(run))
        self._sums = ledger
        self._params, self._flops = params, results.flops_per_token(self.config, tensors)
        self._before = progress.tokens, progress.train_s
        self._run_began = ledger.began_time or self.clock.began
        for event in patiently(lambda: recover(run, self.ledger, state.events)):
            with suppress(LookupError, TypeError, ValueError):  # as where the ledger is read
                ledger.add(event)
        self._look_at_log(progress, state.lines)
        self._end_of_last(ledger, state)
        self.saves.changes.record(self.events)
        if ledger.life and ledger.code != (code := environment.code()):
            about = {"field": "code", "old": ledger.code, "new": code}
            self.events.emit("changed", step=origin.step, **about)
        self._start(ledger, progress, machines)
        self.saves.begin(tensors, ledger)
        patiently(lambda: complete(run, self.log, state.lines, origin.step))  # behind the start
        if origin.source not in ("scratch", "memory"):
            read_s = state.read_s + self.clock.seconds["restore"]
            self.events.emit("loaded", step=origin.step, seconds=read_s)
        settled = self.ledger.settle(5.0)  # a late writer of an older life looks for it
        trouble = None if settled else self.ledger.trouble(0.0) or "the ledger waits for the disk"
        self.saves.changes.try_to_save(trouble)
        self._ready = time.time()

    def _start(self, ledger: Summary, progress: Progress, machines: Sequence[str]) -> None:
        """The event of this life, and a warning where it may not have one kind of bits."""
        origin, world = self.origin, self.world
        about: dict[str, Any] = dict(
            step=origin.step,
            source=origin.source,
            redo=origin.redo,
            world_size=world.world_size,
            nodes=world.nodes,
            restarts=world.restarts,
            goes_on=len(world.follows) > 1,  # a launcher of its has been in a life before
            device=world.device.type,
            seconds=int(self.clock.micros().sum()) / 1e6,
            tokens=progress.tokens,
            train_s=progress.train_s,
            quarantined=len(progress.data.get("quarantined", ())),
            chain_fp=f"{progress.chain_fp:016x}",
            state_fp=f"{progress.state_fp:016x}",
            params=self._params,
            flops_per_token=self._flops,
            machines=machines,
            run_id=origin.run_id,
            run_began=self._run_began,
            version=__version__,
            **({"code": code} if (code := environment.code()) else {}),
            config=json.loads(json.dumps(fields_of(self.config))),
            **self._from_scratch(),
        )
        self._sums.add(
            {"event": "start", "generation": origin.generation, "time": time.time(), **about}
        )
        self.events.emit("start", **about, sums=self._sums.sums())
        if len(machines) > 1 and self.config.reduce == "exact":
            log.warning(
                "the ranks compute on different machines (%s): which of them has a lane decides "
                "the last bits; use nodes of one kind for the same bits as an undisturbed run",
                "; ".join(machines),
            )

    def _look_at_log(self, progress: Progress, kept: Iterable[Mapping[str, Any]]) -> None:
        """Say so where it is not the log of the state that this life goes on from."""
        run, step = self.config.run_dir, progress.step
        chain, kept_steps = f"{progress.chain_fp:016x}", {line["step"] for line in kept}
        line = self.origin.line
        if wrong := patiently(lambda: log_check.at_start(run, step, chain, line, kept_steps)):
            log.warning("%s", log_check.told(run, wrong))

    def _from_scratch(self) -> dict[str, Any]:
        """Whose start was given --from-scratch: it counts for that one, see `opening`."""
        start = {"job": self.world.job, "life": self.world.life}
        return {"from_scratch": start} if self.config.from_scratch else {}

    def _end_of_last(self, ledger: Summary, state: NewestState) -> None:
        """Record the end of a life that could not do so itself."""
        lines = [*filter(None, [self.origin.last_line]), *state.lines]
        # by time: a life that does steps again has not come as far as the one before it
        newest = max(lines, key=lambda line: line["time"], default=None)
        run = Path(self.config.run_dir)
        fault = self._with_name(state.fault)
        last = self._last = patiently(lambda: last_life(ledger, newest, fault, run))
        if last and last.cause:
            at = last.failed_time or last.step_time
            cause = crash_loop.first(run, last.generation) or last.cause
            about = {"generation": last.generation, "step": last.step, "cause": cause, "at": at}
            self.events.emit("end", **about, **last.spent)

    def _with_name(self, fault: dict[str, Any] | None) -> dict[str, Any] | None:
        """Its cause with the rank that was lost, where a survivor knew of a connection only."""
        with suppress(LookupError, TypeError, ValueError):  # a snapshot may have anything
            if not fault or not (closed := fault["closed"]):
                return fault
            if who := known_lives.lost(fault["life"], fault["pods"], self.world.came):
                after = str(fault["cause"]).partition(": ")[0]  # after step N
                return {**fault, "cause": f"{after}: lost: {who}; noticed in {closed}"}
        return fault

    # -- a step ------------------------------------------------------------------------------------

    def step(self, line: dict[str, Any], progress: Progress, step_s: float) -> None:
        """One finished step, and what it shows."""
        self._line, self._batch_fp = line, line["batch_fp"]
        owned = None
        if "phases" in line or line["step"] % self.config.log_every == 0:  # it will be said
            self._sums.owners.phases = line.get("phases") or self.spent.by_phase()
            owned = self._sums.owners.so_far()
        self._end_stall(line["step"])
        self._judge_pace(line, step_s)
        slow = {self.world.names[it.rank]: it.ratio for it in self._stragglers.shown}
        about = {"train_s": progress.train_s, "step_s": step_s, "owned": owned, "slow": slow}
        self.events.emit("step", line=line, **about)
        for spike in self._spikes.add(line):
            self.events.emit("spike", step=line["step"], **spike)
        if self._last:  # this was the first step of a life that is not the first
            parts = seconds(self._last, self.clock.began, self._ready, line["time"])
            world_size = line["world_size"]
            self.events.emit("recovered", step=line["step"], world_size=world_size, **parts)
            self._last = None
        self._stepped_at = time.monotonic()
        self.saves.watch()

    def _end_stall(self, step: int) -> None:
        """A step that was told to stall has moved after all."""
        if stall := self._stall:
            self._stall = None
            # not by the pulse, which counts less where its listener could not run either
            seconds = max(stall.seconds, time.monotonic() - self._stepped_at)
            self.events.emit("stall_end", step=step, seconds=round(seconds, 1))

    def _judge_pace(self, line: Mapping[str, Any], step_s: float) -> None:
        """Which ranks are slow from now on, and which are so no longer."""
        step, names = line["step"], self.world.names
        if step <= self.origin.step + 2:  # the clocks are of the step before; the first warms up
            return
        new, over = self._stragglers.add(step, step_s + line["data_wait_s"], self.spent.busy_s)
        for it in new:
            about = {"rank": it.rank, "name": names[it.rank]}
            self.events.emit("slow", step=step, **about, ratio=it.ratio)
        for it in over:
            about = {"rank": it.rank, "name": names[it.rank]}
            self.events.emit("slow_end", step=step, **about, seconds=round(it.seconds, 1))

    def stalled(self, stall: Stall) -> None:
        """In a thread: a step does not move. The ledger has it once, however long it lasts."""
        names = [self.world.names[rank] for rank in stall.missing]
        where = {"ranks": stall.missing, "names": names, "where": stall.text}
        kind, self._stall = "still" if self._stall else "stall", stall
        self.events.emit(kind, step=stall.step, seconds=round(stall.seconds, 1), **where)

    # -- beside the steps --------------------------------------------------------------------------

    def completed(self, line: dict[str, Any], evaluated: bool) -> None:
        """The last step has what its line lacked; `evaluated`: that was the losses."""
        self._line = line
        self.events.emit("completed", line=line, evaluated=evaluated)

    def save(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Stage a copy and let the writer's thread commit it; the loop goes on at once."""
        self.saves.save(tensors, progress, self.of_step(progress))

    def leave_save(self) -> None:
        """A launcher saves the state of this step, when the log is on the disk up to it."""
        self.log.sync_soon()
        self.saves.look_in_ledger()

    def of_step(self, progress: Progress) -> dict[str, Any]:
        """What the ledger has of the last step: its fingerprints, and where the seconds have gone.

        batch_fp is null before this life's first step.
        """
        state_fp = None if progress.state_fp is None else f"{progress.state_fp:016x}"
        chain_fp = f"{progress.chain_fp:016x}"
        prints = {"batch_fp": self._batch_fp, "chain_fp": chain_fp, "state_fp": state_fp}
        return {**prints, "phases": self.spent.by_phase()}

    # -- the end -----------------------------------------------------------------------------------

    def ended(self, progress: Progress, cause: str, where: str) -> None:
        """The life is over; `where` its last state is. A run that is finished has results."""
        found = None if cause == "stopped" else self._results(progress)
        self.events.emit("ended", step=progress.step, cause=cause, where=where, results=found)

    def _results(self, progress: Progress) -> dict[str, float | None]:
        """By the keys of results.py; the MFU is that of this life, as is its world."""
        tokens, train_s = self._before
        done = progress.tokens - tokens, progress.train_s - train_s
        ended = time.time() if done[0] else self._line.get("time", time.time())
        mfu = results.mfu(self._flops, *done, self.world.world_size, self._peak)
        on_gpu = self.world.device.type == "cuda"
        return {
            "val_bpb": self._line.get("val_bpb"),
            "training_seconds": progress.train_s,
            "total_seconds": ended - self._run_began,
            "peak_vram_mb": self.spent.memory.most / 2**20 if on_gpu else 0.0,
            "mfu_percent": mfu and 100 * mfu,
            "total_tokens_M": progress.tokens / 1e6,
            "num_steps": progress.step,
            "num_params_M": self._params / 1e6,
            "depth": self.config.n_layer,
        }

    def last_numbers(self, finished: bool = False) -> None:
        """Bring the metrics up to the end of this life, or of the run."""
        self.spent.micros[0] = self.clock.micros()  # with the last save
        self.events.emit("last", owned=self._sums.owners.so_far(), finished=finished)

    def wait_for_scrape(self, asked: Callable[[], bool]) -> None:
        """Until Prometheus has the last numbers, or a stop is `asked` for."""
        if self._scrapes:
            self._scrapes.wait_for_last(asked)

    def close(self) -> None:
        """Close the files; what the disk has not taken is written if it takes it now."""
        self.events.emit("closed")
        self.log.close()
        self.ledger.close()
        self.lease.close()
