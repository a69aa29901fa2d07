"""Rank 0's books of one life: the log and the ledger, and with them metrics, saves and console."""

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
from gptddp.distributed import environment, lives
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import peak_flops
from gptddp.errors import Diverged
from gptddp.files import patiently
from gptddp.run import crash_loop, log_check, summary
from gptddp.run.code import named
from gptddp.run.history import Ledger, RunLog, complete, recover
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.owners import goodput
from gptddp.run.progress import Progress
from gptddp.run.quarantine import Decision
from gptddp.run.recovery import Last, last_life, seconds
from gptddp.run.summary import Summary
from gptddp.training import results
from gptddp.training.changes import fields_of
from gptddp.training.choose import NewestState
from gptddp.training.clock import RankSeconds
from gptddp.training.console import Console
from gptddp.training.metrics import Metrics
from gptddp.training.saves import Saves
from gptddp.training.scrapes import Scrapes
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
            spent.memory.kinds,
            self._peak and self._peak * world.world_size,
            run_id=run.name,
            version=__version__,
            torch=torch.__version__,
            precision=str(c.precision),
            model=str(c.preset),
        )
        self.console = Console(origin)
        self.saves = Saves(origin, lease, self.log, self.ledger, self.metrics, self.console)
        self._line: Mapping[str, Any] = origin.line or {}  # of the last step
        self._sums = Summary()  # of the run's events
        self._batch_fp: str | None = None  # of it, if this life has done it
        self._last: Last | None = None  # the life before, until this one has done a step
        slots = (lanes.owned(rank, world.world_size, c.lanes) for rank in range(world.world_size))
        self._stragglers = Stragglers([len(it) for it in slots])
        self._stall: Stall | None = None  # that is told and lasts
        self._ready = 0.0  # unix seconds at which the first step began
        self._goodput: float | None = None  # of the run, as far as it is known
        self._stepped_at = time.monotonic()  # when the last step was recorded
        self._scrapes: Scrapes | None = None
        if c.metrics_port:
            loopback = world.address if world.address.startswith("127.") else ""
            self._scrapes = Scrapes(self.metrics.registry, c.metrics_port, loopback)

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
        origin, world = self.origin, self.world
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
        self.metrics.began(origin, progress, world, self._run_began, self._flops)
        self.saves.begin(tensors, ledger)
        self.saves.changes.record(self.ledger)
        self._tell_of_code(ledger)
        self._start(ledger, progress, machines)
        patiently(lambda: complete(run, self.log, state.lines, origin.step))  # behind the start
        if origin.source not in ("scratch", "memory"):
            self.metrics.loaded(state.read_s + self.clock.seconds["restore"], origin.step)
        self.console.began(params, world.device.type, world.world_size)
        settled = self.ledger.settle(5.0)  # a late writer of an older life looks for it
        trouble = None if settled else self.ledger.trouble(0.0) or "the ledger waits for the disk"
        self.saves.changes.try_to_save(trouble)
        self._ready = time.time()

    def _start(self, ledger: Summary, progress: Progress, machines: Sequence[str]) -> None:
        """The event of this life, and a warning where it may not have one kind of bits."""
        origin, world = self.origin, self.world
        self._event(
            "start",
            origin.generation,
            step=origin.step,
            source=origin.source,
            redo=origin.redo,
            world_size=world.world_size,
            nodes=world.nodes,
            restarts=world.restarts,
            goes_on=len(world.follows) > 1,  # a launcher of its has been in a life before
            device=world.device.type,
            seconds=int(self.clock.micros().sum()) / 1e6,
            chain_fp=f"{progress.chain_fp:016x}",
            state_fp=f"{progress.state_fp:016x}",
            machines=machines,
            run_id=origin.run_id,
            version=__version__,
            **({"code": code} if (code := environment.code()) else {}),
            config=json.loads(json.dumps(fields_of(self.config))),
            **self._from_scratch(),
        )
        if len(machines) > 1 and self.config.reduce == "exact":
            log.warning(
                "the ranks compute on different machines (%s): which of them has a lane decides "
                "the last bits; use nodes of one kind for the same bits as an undisturbed run",
                "; ".join(machines),
            )

    def _tell_of_code(self, ledger: Summary) -> None:
        """Say, and record, that the life before this one has run other code."""
        old, new = ledger.code, environment.code()
        if ledger.life and old != new:
            self.event("changed", step=self.origin.step, field="code", old=old, new=new)
            what = self.origin.step, named(old), named(new)
            log.info("changed after step %d: code: %s -> %s", *what)

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
        newest = max(lines, key=lambda line: line["step"], default=None)
        run = Path(self.config.run_dir)
        fault = self._with_name(state.fault)
        last = self._last = patiently(lambda: last_life(ledger, newest, fault, run))
        if last and last.cause:
            at = last.failed_time or last.step_time
            cause = crash_loop.first(run, last.generation) or last.cause
            end = {"step": last.step, "cause": cause, "at": at, **last.spent}
            self._event("end", last.generation, **end)
            self.console.fault(last.generation, last.step, cause)

    def _with_name(self, fault: dict[str, Any] | None) -> dict[str, Any] | None:
        """Its cause with the rank that was lost, where a survivor knew of a connection only."""
        with suppress(LookupError, TypeError, ValueError):  # a snapshot may have anything
            if not fault or not (closed := fault["closed"]):
                return fault
            if who := lives.lost(fault["life"], fault["pods"], self.world.came):
                after = str(fault["cause"]).partition(": ")[0]  # after step N
                return {**fault, "cause": f"{after}: lost: {who}; noticed in {closed}"}
        return fault

    def step(self, line: dict[str, Any], progress: Progress, step_s: float) -> None:
        """Log one finished step and bring the metrics up to it."""
        self.log.append(line)
        self._line, self._batch_fp = line, line["batch_fp"]
        if self._last:  # this was the first step of a life that is not the first
            parts = seconds(self._last, self.clock.began, self._ready, line["time"])
            self.event("recovered", step=line["step"], world_size=line["world_size"], **parts)
            self._last = None
        self.metrics.stepped(line, progress, step_s)
        self.metrics.expect(self.config, progress)
        self.metrics.spent(self.spent)
        if "phases" in line or line["step"] % self.config.log_every == 0:  # it will be said
            self._sums.owners.phases = line.get("phases") or self.spent.told()
            owned = self._sums.owners.so_far()
            self.metrics.owned(owned)
            self._goodput = goodput(owned)
        self._judge_pace(line, step_s)
        self._stepped_at = time.monotonic()
        slow = [(self.world.names[it.rank], it.ratio) for it in self._stragglers.shown]
        trouble = self.saves.trouble is not None
        self.console.step(line, progress, step_s, self._goodput, slow, trouble)
        self.saves.watch()

    def _judge_pace(self, line: Mapping[str, Any], step_s: float) -> None:
        """Who is slow, and that a step has moved after all, into ledger, metrics and console."""
        step, names = line["step"], self.world.names
        if stall := self._stall:
            self._stall = None
            self.metrics.moves()
            # not by the pulse, which counts less where its listener could not run either
            seconds = round(max(stall.seconds, time.monotonic() - self._stepped_at), 1)
            self.event("stall_end", step=step, seconds=seconds)
            self.console.moves(step, seconds)
        if step <= self.origin.step + 2:  # the clocks are of the step before; the first warms up
            return
        busy_s = self.spent.busy_s
        new, over = self._stragglers.add(step, step_s + line["data_wait_s"], busy_s)
        for it in new:
            self.event("slow", step=step, rank=it.rank, name=names[it.rank], ratio=it.ratio)
            self.console.slow(step, names[it.rank], it.ratio)
        for it in over:
            about = {"rank": it.rank, "name": names[it.rank], "seconds": round(it.seconds, 1)}
            self.event("slow_end", step=step, **about)
            self.console.fast(step, names[it.rank])
        self.metrics.slow({names[it.rank]: it.ratio for it in self._stragglers.shown})

    def stalled(self, stall: Stall) -> None:
        """In a thread: a step does not move. It may be told again while it lasts."""
        names = [self.world.names[rank] for rank in stall.missing]
        if self._stall is None:
            where = {"ranks": stall.missing, "names": names, "where": stall.text}
            self.event("stall", step=stall.step, seconds=round(stall.seconds, 1), **where)
        self._stall = stall
        self.metrics.stalled(stall.seconds, names)
        self.console.stalled(stall)

    def completed(self, line: dict[str, Any], evaluated: bool) -> None:
        """Log the last step again, with what its line lacked; `evaluated`: that was the losses."""
        self.log.append(line)
        self._line = line
        if evaluated:
            self.metrics.evaluated(line)
            self.console.evaluated(line)

    def quarantine(self, decision: Decision, progress: Progress) -> None:
        """Record, before any rank acts on it, which row groups are skipped from now on."""
        self.event("quarantine", step=progress.step, **vars(decision))
        self.metrics.quarantined.set(len(progress.data["quarantined"]))
        self.console.quarantined(progress.step, decision.names)

    def diverged(self, error: Diverged, progress: Progress) -> None:
        """Record that no memory of this generation, or an older one, may ever be gone on from."""
        self.event("diverged", step=progress.step, ranks=error.ranks, names=error.names)

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
        return {**prints, "phases": self.spent.told()}

    def results(self, progress: Progress) -> None:
        """Say what has come out of the run; the MFU is that of this life, as is its world."""
        c, world, device = self.config, self.world, self.world.device
        tokens, train_s = self._before
        done = progress.tokens - tokens, progress.train_s - train_s
        ended = time.time() if done[0] else self._line.get("time", time.time())
        self.console.results(
            results.lines(
                c,
                self._line,
                progress,
                params=self._params,
                total_s=ended - self._run_began,
                peak_vram_bytes=self.spent.memory.most if device.type == "cuda" else 0,
                mfu=results.mfu(self._flops, *done, world.world_size, self._peak),
            )
        )

    def last_numbers(self, finished: bool = False) -> None:
        """Bring the metrics up to the end of this life, or of the run."""
        self.spent.micros[0] = self.clock.micros()  # with the last save
        self.metrics.spent(self.spent)
        self.metrics.owned(self._sums.owners.so_far())
        if finished:
            self.metrics.state = lambda: "finished"

    def wait_for_scrape(self, asked: Callable[[], bool]) -> None:
        """Until Prometheus has the last numbers, or a stop is `asked` for."""
        if self._scrapes:
            self._scrapes.wait_for_last(asked)

    def _event(self, event: str, generation: int, **fields: Any) -> None:
        """Append an event to the ledger, and count it; a start has the sums of all before it."""
        about = {"event": event, "time": time.time(), "generation": generation}
        self._sums.add({**about, **fields})
        if event == "start":
            fields["sums"] = self._sums.sums()
        self.ledger.event(event, generation, **fields)

    def event(self, event: str, **fields: Any) -> None:
        """Append an event of this life to the ledger."""
        self._event(event, self.origin.generation, **fields)

    def close(self) -> None:
        """Close the files; what the disk has not taken is written if it takes it now."""
        self.log.close()
        self.ledger.close()
        self.lease.close()
