"""Rank 0's Prometheus metrics, and the clock that gives every second to one phase."""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import prometheus_client as prom

from gptddp.budget import whole_last_step
from gptddp.config import Config
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress

log = logging.getLogger(__name__)

PHASES = ("init", "restore", "warmup", "step", "data_wait", "checkpoint", "eval", "other")
_RETRY_S = 5.0
_STEP_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)  # buckets


class PhaseClock:
    """Each second since the start belongs to exactly one phase; the parts add up to the whole."""

    def __init__(self, phase: str = "init"):
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._phase, self._since = phase, time.monotonic()
        self.began = time.time()

    def enter(self, phase: str) -> float:
        """End the present phase and begin `phase`; seconds of the one that ended.

        A phase is added when it ends, so that a hang is never counted as a step.
        """
        now = time.monotonic()
        spent, ended = now - self._since, self._phase
        self.seconds[ended] += spent
        self._phase, self._since = phase, now
        return spent


class _Registry(prom.CollectorRegistry):
    """Of the families `gptddp_...`, and of the process's own."""

    def __init__(self) -> None:
        super().__init__()
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]
        prom.ProcessCollector(registry=self)
        prom.PlatformCollector(registry=self)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> prom.Gauge:
        """NaN until its value is known, because an untouched gauge would export 0."""
        made = prom.Gauge(f"gptddp_{name}", text, labels, registry=self)
        if not labels:
            made.set(float("nan"))
        return made

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> prom.Counter:
        """Of this process: it starts at 0."""
        return prom.Counter(f"gptddp_{name}", text, labels, registry=self)


class Metrics:
    """The families of one process. Counters start at 0; what belongs to the run is a gauge."""

    def __init__(self, **info: str):
        self.registry = registry = _Registry()
        gauge, counter = registry.gauge, registry.counter
        prom.Info("gptddp_run", "Identity of the run.", registry=registry).info(info)
        self.steps = counter("steps", "Optimizer steps of this process.")
        self.tokens = counter("tokens", "Tokens trained by this process's world, over all ranks.")
        self.nonfinite = counter("nonfinite_steps", "Steps skipped: loss or gradient not finite.")
        self.phases = counter("phase_seconds", "Seconds of rank 0 by phase.", ("phase",))
        self.quarantined = gauge("quarantined_row_groups", "Row groups skipped as unreadable.")
        self.saves = counter("checkpoints", "Checkpoints by result.", ("result",))
        self.step = gauge("step", "Last finished step of the run.")
        self.max_steps = gauge("max_steps", "Step at which the run is expected to end.")
        self.tokens_seen = gauge("tokens_seen", "Tokens trained by the run.")
        self.last_step_time = gauge("last_step_timestamp_seconds", "When the last step finished.")
        self.loss = gauge("loss", "Nats a token, over all ranks.", ("split",))
        self.grad_norm = gauge("grad_norm", "Gradient norm before clipping.")
        self.lr = gauge("learning_rate", "Learning rate of the last step.")
        self.world_size = gauge("world_size", "Ranks in the present world.")
        self.nodes = gauge("nodes", "Pods in the present world.")
        self.incarnation = gauge("incarnation", "Lives of the run so far: its generation.")
        self.checkpoint_step = gauge("last_checkpoint_step", "Step of the last durable checkpoint.")
        self.checkpoint_time = gauge(
            "last_checkpoint_timestamp_seconds",
            "When it was committed; until then, when this life began.",
        )
        self.storage_trouble = gauge("storage_trouble", "1 while the run directory takes nothing.")
        self.step_s = prom.Histogram(
            "gptddp_step_duration_seconds",
            "Wall time of a step.",
            registry=registry,
            buckets=_STEP_S,
        )
        self._export_labels()
        self.last_step_time.set_to_current_time()  # a hang before the first step shows as well
        self._phase_seen = dict.fromkeys(PHASES, 0.0)
        self._tokens = 0  # of the run, as of the last step

    def _export_labels(self) -> None:
        """From the first scrape on, every series is there."""
        for phase in PHASES:
            self.phases.labels(phase)
        for result in ("success", "failure"):
            self.saves.labels(result)
        for split in ("train", "val"):
            self.loss.labels(split).set(float("nan"))

    def began(self, origin: Origin, progress: Progress, world_size: int, nodes: int) -> None:
        """Where a life goes on, in which world."""
        self.world_size.set(world_size)
        self.nodes.set(nodes)
        self.incarnation.set(origin.generation)
        self.step.set(origin.step)
        self.expect(origin.config, progress)
        self.tokens_seen.set(progress.tokens)
        self.quarantined.set(len(progress.data.get("quarantined", ())))
        self._tokens = progress.tokens
        self.checkpoint_time.set_to_current_time()  # so that its age is known to be no less

    def expect(self, c: Config, progress: Progress) -> None:
        """When the run will end, as far as its budgets of tokens and time let expect."""
        self.max_steps.set(whole_last_step(c, progress.step, progress.tokens, progress.train_s))

    def stepped(self, line: Mapping[str, Any], progress: Progress, step_s: float) -> None:
        """One finished step, by its line of the log."""
        self.steps.inc()
        self.tokens.inc(progress.tokens - self._tokens)
        self._tokens = progress.tokens
        self.step.set(progress.step)
        self.tokens_seen.set(progress.tokens)
        self.step_s.observe(step_s)
        self.last_step_time.set_to_current_time()
        self.lr.set(line["lr"])
        if line["loss"] is None:
            self.nonfinite.inc()
        else:
            self.loss.labels("train").set(line["loss"])
            self.grad_norm.set(line["grad_norm"])
        if "val_loss" in line:
            self.evaluated(line)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """The loss of an evaluation."""
        self.loss.labels("val").set(line["val_loss"])

    def saved(self, step: int, error: str | None) -> None:
        """The end of one save."""
        self.saves.labels("failure" if error else "success").inc()
        if not error:
            self.checkpoint_step.set(step)
            self.checkpoint_time.set_to_current_time()

    def saved_late(self, step: int, when: float) -> None:
        """The newest save, by a launcher; `when`: it began, in unix seconds."""
        self.checkpoint_step.set(step)
        self.checkpoint_time.set(when)

    def add_phases(self, clock: PhaseClock) -> None:
        """Bring the phase counter up to the clock."""
        for phase, seconds in clock.seconds.items():
            self.phases.labels(phase).inc(seconds - self._phase_seen[phase])
            self._phase_seen[phase] = seconds


def serve(metrics: Metrics, port: int, address: str = "") -> None:
    """Serve /metrics from a thread. A port that is taken is tried again; training never waits."""

    def run() -> None:
        warned = False
        while True:
            try:
                prom.start_http_server(port, addr=address or "0.0.0.0", registry=metrics.registry)
            except OSError as error:
                if not warned:
                    log.warning(
                        "metrics port %d: %s; training goes on, trying again every %g s. "
                        "Choose another with --metrics-port.",
                        port,
                        error.strerror,
                        _RETRY_S,
                    )
                warned = True
                time.sleep(_RETRY_S)
                continue
            log.info("metrics: http://%s:%d/metrics", address or "localhost", port)
            return

    threading.Thread(target=run, name="metrics", daemon=True).start()
