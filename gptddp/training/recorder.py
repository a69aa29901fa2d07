"""Rank 0's part of a life: its events, its saves, and the last scrape."""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp import __version__
from gptddp.checkpoint import run_state
from gptddp.data import inventory, lanes
from gptddp.data.dataset import Dataset
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import peak_flops
from gptddp.errors import ConfigError
from gptddp.files import explain, may_pass, patiently
from gptddp.flags import to_saved
from gptddp.run import copies, crash_loop
from gptddp.run.history import Ledger, RunLog, complete, history, newest_line, recover
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.run.recovery import unsaid_end
from gptddp.run.summary import Summary
from gptddp.training import changes, results
from gptddp.training.clock import RankSeconds
from gptddp.training.console import Console
from gptddp.training.events import IN_LEDGER, Events
from gptddp.training.metrics import Metrics
from gptddp.training.samples import to_samples
from gptddp.training.saves import Saves
from gptddp.training.scrapes import Scrapes
from gptddp.training.spikes import WINDOW, Spikes
from gptddp.training.stalls import Stall
from gptddp.training.stop import StopFlag
from gptddp.training.stragglers import Stragglers
from gptddp.training.tracking import Tracking

log = logging.getLogger(__name__)


class Recorder:
    """Made on rank 0 only. It runs no collective, and a full disk never stops the training."""

    def __init__(
        self,
        origin: Origin,
        dataset: Dataset,
        lease: Lease,
        world: World,
        spent: RankSeconds,
        stop: StopFlag,
    ) -> None:
        c = self.config = origin.config
        self._dataset = dataset
        self._copies: threading.Thread | None = None  # after the first step
        self.origin, self.lease, self.world = origin, lease, world
        self.generation = origin.generation
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
        self.metrics.state = lambda: self.clock.state(stop.asked)
        self._sums = Summary()  # of the run's events
        views = self.metrics, Console(origin), to_samples(run)
        self.events = Events(origin.generation, [self._record], views)
        self.saves = Saves(origin, lease, self.log, self.ledger, self.events)
        self.line: Mapping[str, Any] = origin.line or {}  # of the last step
        self._batch_fp: str | None = None  # of the last step, if this life has done it
        self._stragglers = self._of_world()
        self.spikes = Spikes()
        self._machines: Sequence[str] = ()  # hardware of the ranks
        self._stall: Stall | None = None  # reported, and not over
        self._stepped_at = time.monotonic()  # when the last step was recorded
        self._scrapes: Scrapes | None = None
        self._tracking = Tracking()
        if c.metrics_port:
            loopback = world.address if world.address.startswith("127.") else ""
            self._scrapes = Scrapes(self.metrics.registry, c.metrics_port, loopback)

    def _of_world(self) -> Stragglers:
        ids = self.world.ids  # once: another world may be formed meanwhile
        slots = lanes.shares(self.config.lanes, ids)
        return Stragglers(self.world.names, [slots[it] for it in ids])

    def _record(self, event: Mapping[str, Any]) -> None:
        """A sink: lines of the log, and the ledger's events; also adds up the sums of these."""
        if event["event"] in IN_LEDGER:
            self.ledger.append(event)
            self._sums.add(event)
        elif event["event"] in ("step", "completed"):
            self.log.append(event["line"])

    def begin(
        self,
        tensors: Mapping[str, Tensor],
        params: int,
        progress: Progress,
        machines: Sequence[str],
        lines: Sequence[Mapping[str, Any]] = (),
        events: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Record how this life begins, before its first step, and how the previous life ended.

        `lines` and `events`, kept in memory, are added where log and ledger lack them.
        """
        origin = self.origin
        run = self.config.run_dir
        recorded = patiently(lambda: run_state.read(run))
        self._sums, is_new = recorded, not recorded.life and origin.source == "scratch"
        self._params, self._flops = params, results.flops_per_token(self.config, tensors)
        self._before = progress.tokens, progress.train_s
        self._run_began = recorded.began_time or self.clock.began
        for event in patiently(lambda: recover(run, self.ledger, events)):
            with suppress(LookupError, TypeError, ValueError):  # a foreign event
                recorded.add(event)
        self._end_of_last(recorded)
        with suppress(OSError):  # then no checkpoint is committed either
            self.lease.check()  # it may have been suspended while another began this generation
        changes.record(recorded, self.config, origin.step, self.events)
        self._start(progress, machines)
        self.saves.begin(tensors, recorded)
        patiently(lambda: complete(run, self.log, lines, origin.step))  # after the start
        if step := origin.step:  # earlier lives give the usual values
            for line in patiently(lambda: [*history(run, step - WINDOW, step)]):
                with suppress(LookupError, TypeError):  # a foreign line
                    self.spikes.add(line)
        if origin.source not in ("scratch", "memory"):
            read_s = self.clock.seconds["restore"]
            self.events.emit("loaded", step=origin.step, seconds=read_s)
        if not self.ledger.settle(5.0):
            self._check_writable(is_new)
        if self.config.track != "none":
            self._tracking.begin(run, self.config.track)

    def _check_writable(self, is_new: bool) -> None:
        """A new run needs its start on disk before its first step; a continued run does not."""
        try:
            if is_new:
                return patiently(self.ledger.sync)
        except OSError as error:
            self.lease.release()
            if may_pass(error):
                raise
            raise ConfigError(
                f"run {self.config.run_dir} cannot be written: {explain(error)}"
            ) from error
        trouble = self.ledger.trouble(0.0) or "the ledger waits for the disk"
        log.warning("the run continues, but its directory cannot be written: %s", trouble)

    def _start(self, progress: Progress, machines: Sequence[str]) -> None:
        """Emit the start of this life; warn where the ranks' machines may change its bits."""
        origin, world, spent = self.origin, self.world, self.spent
        about: dict[str, Any] = dict(
            step=origin.step,
            source=origin.source,
            redo=origin.redo,
            world_size=world.world_size,
            nodes=world.nodes,
            restarts=world.restarts,
            device=world.device.type,
            seconds=int(spent.own().sum()) / 1e6,
            tokens=progress.tokens,
            train_s=progress.train_s,
            quarantined=len(progress.data.get("quarantined", ())),
            chain_fp=f"{progress.chain_fp:016x}",
            **({} if (fp := progress.state_fp) is None else {"state_fp": f"{fp:016x}"}),
            params=self._params,
            flops_per_token=self._flops,
            machines=machines,
            run_id=origin.run_id,
            run_began=self._run_began,
            version=__version__,
            **({"code": code} if (code := environment.code()) else {}),
            config=to_saved(self.config),
            dataset=self._dataset.sha256,
        )
        if self.config.from_scratch:  # it counts for this start, see opening.py
            about["from_scratch"] = {"job": world.job}
        self.events.emit("start", **about, sums=self._sums.sums())
        self._warn_of(machines)

    def _warn_of(self, machines: Sequence[str]) -> None:
        """Warn of different machines, once for each set of them."""
        is_new, self._machines = machines != self._machines, machines
        if is_new and len(machines) > 1 and self.config.reduce == "exact":
            log.warning(
                "the ranks compute on different machines (%s): the machine of each lane decides "
                "the last bits; use nodes of one kind for the same bits as an undisturbed run",
                "; ".join(machines),
            )

    def _end_of_last(self, recorded: Summary) -> None:
        """Record the end of a life that could not do so itself."""
        run = Path(self.config.run_dir)
        newest = patiently(lambda: newest_line(run))
        if end := patiently(lambda: unsaid_end(recorded, newest, run)):
            cause = crash_loop.first(run, end["generation"]) or end["cause"]
            self.events.emit("end", **{**end, "cause": cause})

    def moved(self, event: Mapping[str, Any]) -> None:
        """The life continues in another world, described by the event."""
        self._stragglers = self._of_world()
        self._warn_of(event["machines"])
        self.metrics.peak = self._peak and self._peak * self.world.world_size
        self.events.emit("world", **event)

    # -- a step ------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return int(self.line.get("step", self.origin.step))

    def step(self, line: dict[str, Any], progress: Progress, step_s: float) -> None:
        """Record a finished step, and the events that it shows."""
        emit, step, spent = self.events.emit, line["step"], self.spent
        self.line, self._batch_fp = dict(line), line["batch_fp"]  # as written now
        owned = None
        if "phases" in line or step % self.config.log_every == 0:  # it will be logged
            self._sums.owners.phases = line.get("phases") or spent.by_phase()
            owned = self._sums.owners.so_far()
        if stall := self._stall:  # the stall is over
            self._stall = None
            # not only by the pulse, whose listener may have been stopped too
            stalled_s = max(stall.seconds, time.monotonic() - self._stepped_at)
            emit("stall_end", step=step, seconds=round(stalled_s, 1))
        if step > self.origin.step + 2:  # clocks of the previous step; the first step warms up
            seconds = step_s + line["data_wait_s"]
            for kind, about in self._stragglers.add(seconds, spent.busy_s):
                emit(kind, step=step, **about)
        slow = self._stragglers.shown
        emit("step", line=line, train_s=progress.train_s, step_s=step_s, owned=owned, slow=slow)
        for about in self.spikes.add(line):
            emit("spike", step=step, **about)
        self._stepped_at = time.monotonic()
        if self._copies is None:
            self._copies = self._begin_copies()
        self.saves.watch()

    def _begin_copies(self) -> threading.Thread:
        """Write the run's configuration and data for people: a step was done with them."""
        origin, dataset = self.origin, self._dataset
        about = {"version": __version__, "torch": str(torch.__version__), "run_id": origin.run_id}
        config = {**about, "generation": origin.generation, "config": to_saved(self.config)}
        files = {"sha256": dataset.sha256, "files": inventory.files(dataset.manifest)}
        return copies.begin(Path(self.config.run_dir), config, files)

    def stalled(self, stall: Stall) -> None:
        """In a thread: record a stall. The ledger has it once, however long it lasts."""
        names = [self.world.names[rank] for rank in stall.missing]
        where = {"ranks": stall.missing, "names": names, "where": stall.text}
        kind, self._stall = "still" if self._stall else "stall", stall
        self.events.emit(kind, step=stall.step, seconds=round(stall.seconds, 1), **where)

    # -- beside the steps --------------------------------------------------------------------------

    def completed(self, line: dict[str, Any], evaluated: bool) -> None:
        """Record the completed line of the last step; `evaluated`: it lacked the losses."""
        self.line = dict(line)
        self.events.emit("completed", line=line, evaluated=evaluated)

    def of_step(self, progress: Progress) -> dict[str, Any]:
        """The ledger's fields of the last step: its fingerprints, and the seconds by phase.

        batch_fp is null before this life's first step.
        """
        state_fp = None if progress.state_fp is None else f"{progress.state_fp:016x}"
        chain_fp = f"{progress.chain_fp:016x}"
        prints = {"batch_fp": self._batch_fp, "chain_fp": chain_fp, "state_fp": state_fp}
        return {**prints, "phases": self.spent.by_phase()}

    # -- the end -----------------------------------------------------------------------------------

    def copy_finished(self, stop: Mapping[str, Any]) -> None:
        """Write the marker of a finished run, for people; a disk error is only logged."""
        if self._copies:
            self._copies.join(copies.WAIT_S)
        about = {"generation": self.origin.generation, **stop}
        try:
            config = to_saved(self.config)
            copies.finish(Path(self.config.run_dir), self.origin.run_id, config, about)
        except OSError as error:
            log.warning("%s", explain(error))

    def results(self, progress: Progress) -> dict[str, float | None]:
        """The results, by the keys of results.py. The MFU is of this life and its world.

        A CPU run lacks the keys of a GPU.
        """
        tokens, train_s = self._before
        done = progress.tokens - tokens, progress.train_s - train_s
        ended = time.time() if done[0] else self.line.get("time", time.time())
        of_gpu: dict[str, float | None] = {}
        if self.world.device.type == "cuda":
            mfu = results.mfu(self._flops, *done, self.world.world_size, self._peak)
            vram_mb = self.spent.memory.most / 2**20
            of_gpu = {"peak_vram_mb": vram_mb, "mfu_percent": mfu and 100 * mfu}
        return {
            "val_bpb": self.line.get("val_bpb"),
            "training_seconds": progress.train_s,
            "total_seconds": ended - self._run_began,
            **of_gpu,
            "total_tokens_M": progress.tokens / 1e6,
            "num_steps": progress.step,
            "num_params_M": self._params / 1e6,
            "depth": self.config.n_layer,
        }

    def last_numbers(self) -> None:
        """Bring the metrics up to the end of the run, for a last scrape."""
        self.spent.micros[0] = self.spent.own()  # with the last save
        self.events.emit("last", owned=self._sums.owners.so_far())
        if self._scrapes:
            self._scrapes.expect_last()
        self._tracking.end()

    @property
    def awaits_readers(self) -> bool:
        """Does Prometheus or a tracker still wait for the last numbers?"""
        return self._tracking.busy or (self._scrapes is not None and self._scrapes.awaited)

    def close(self) -> None:
        """Close the files; try once more to write what the disk has not taken."""
        if self._scrapes:
            self._scrapes.close()
        self._tracking.end()
        if self._copies:
            self._copies.join(copies.WAIT_S)
        self.log.close()
        self.ledger.close()
        self.lease.close()
