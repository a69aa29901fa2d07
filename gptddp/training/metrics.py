"""Rank 0's Prometheus metrics."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import prometheus_client as prom
from prometheus_client.core import StateSetMetricFamily
from prometheus_client.registry import Collector

from gptddp.budget import whole_last_step
from gptddp.checkpoint.writer import Saved
from gptddp.config import Config
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.run.origin import Origin
from gptddp.run.owners import LOSSES, goodput
from gptddp.run.progress import Progress
from gptddp.training.clock import PHASES, STATES, RankSeconds

_WAIT_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30)
_SAVE_S = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STEP_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60)  # buckets


_STATES = (*STATES.values(), "training", "draining", "finished")


class _Registry(prom.CollectorRegistry):
    """Of the families `gptddp_...`, and of the process's own."""

    def __init__(self) -> None:
        super().__init__()
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]
        prom.ProcessCollector(registry=self)
        prom.PlatformCollector(registry=self)

    def histogram(
        self, name: str, text: str, buckets: Sequence[float], labels: tuple[str, ...] = ()
    ) -> prom.Histogram:
        """Of this process, in seconds."""
        return prom.Histogram(f"gptddp_{name}", text, labels, registry=self, buckets=buckets)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> prom.Gauge:
        """NaN until its value is known, because an untouched gauge would export 0."""
        made = prom.Gauge(f"gptddp_{name}", text, labels, registry=self)
        if not labels:
            made.set(float("nan"))
        return made

    def labelled(self, name: str, text: str, label: str, values: Sequence[str]) -> prom.Gauge:
        """One for each of these values of a label, from the first scrape on."""
        made = self.gauge(name, text, (label,))
        for value in values:
            made.labels(value).set(float("nan"))
        return made

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> prom.Counter:
        """Of this process: it starts at 0."""
        return prom.Counter(f"gptddp_{name}", text, labels, registry=self)


class Metrics:
    """The families of one process. Counters start at 0; what belongs to the run is a gauge."""

    def __init__(self, memory: Sequence[str] = (), peak: float | None = None, **info: str) -> None:
        """`memory`: its kinds; `peak`: FLOP/s of all devices, None where that is not known."""
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
        self.loss = registry.labelled(
            "loss", "Nats a token, over all ranks.", "split", ("train", "val")
        )
        self.grad_norm = gauge("grad_norm", "Gradient norm before clipping.")
        self.lr = gauge("learning_rate", "Learning rate of the last step.")
        self.world_size = gauge("world_size", "Ranks in the present world.")
        self.nodes = gauge("nodes", "Pods in the present world.")
        self.incarnation = gauge("incarnation", "Lives of the run so far: its generation.")
        self.checkpoint_step = gauge("last_checkpoint_step", "Step of the last durable checkpoint.")
        self.checkpoint_time = gauge(
            "last_checkpoint_timestamp_seconds",
            "When it was committed; until then, since when nothing has been.",
        )
        self.storage_trouble = gauge("storage_trouble", "1 while the run directory takes nothing.")
        self.checkpoint_every = gauge("checkpoint_every_seconds", "As the run is told to save.")
        self.checkpoint_bytes = gauge("checkpoint_size_bytes", "Of the last durable checkpoint.")
        self.nodes_min = gauge("nodes_min", "Pods that are enough to go on.")
        self.nodes_max = gauge("nodes_max", "Pods that the job asks for.")
        self.agent_restarts = gauge("agent_restarts", "Restarts of workers by rank 0's launcher.")
        self.run_start = gauge("run_start_timestamp_seconds", "When the run began.")
        self.goodput = gauge("run_goodput_ratio", "Of all rank-seconds of the run: training.")
        self.lost = gauge("run_lost_seconds", "Rank-seconds of the run by owner.", ("cause",))
        self.busy = registry.labelled(
            "rank_busy_seconds", "Of the ranks, in the last step.", "stat", ("min", "mean", "max")
        )
        self.slowest = gauge("slowest_rank", "The rank that was busy longest in the last step.")
        named = ("slow_rank", "slow_pod")
        self.straggler = gauge("straggler_ratio", "Times the median: a rank that is slow.", named)
        self.stuck = gauge("stuck_rank", "1: the others wait for it, and a step stalls.", named)
        self.stall = gauge("stall_seconds", "Of a step that does not move, as last told.")
        self.stall.set(0)
        self.flops = gauge("model_flops_per_token", "Forward and backward.")
        self.peak_memory = registry.labelled(
            "peak_memory_bytes", "The most that a rank has held of late.", "kind", memory
        )
        self._peak, self._flops = peak, 0
        if peak:
            self.mfu = gauge("mfu_ratio", "Of what the devices can compute: the last step.")
        self.state: Callable[[], str] = lambda: "starting"  # of rank 0, now
        registry.register(_State(self))
        self.step_s = registry.histogram("step_duration_seconds", "Wall time of a step.", _STEP_S)
        self.data_s = registry.histogram(
            "data_wait_duration_seconds", "Wait of rank 0 for the rows of a step.", _WAIT_S
        )
        self.save_s = registry.histogram(
            "checkpoint_duration_seconds",
            "Of a save, its stall of training and all; of a load, all.",
            _SAVE_S,
            ("op",),
        )
        self._export_labels()
        self.last_step_time.set_to_current_time()  # a hang before the first step shows as well
        self._phase_seen = dict.fromkeys(PHASES, 0)  # microseconds
        self._tokens = 0  # of the run, as of the last step
        self._has_slow = False

    def _export_labels(self) -> None:
        """From the first scrape on, every series is there."""
        for phase in PHASES:
            self.phases.labels(phase)
        for result in ("success", "failure"):
            self.saves.labels(result)
        for cause in LOSSES:
            self.lost.labels(cause).set(0)
        for op in ("stall", "save", "load"):
            self.save_s.labels(op)

    def began(
        self, origin: Origin, progress: Progress, world: World, run_began: float, flops: int
    ) -> None:
        """Where a life goes on, in which world; `run_began`: unix seconds; `flops`: of a token."""
        self.world_size.set(world.world_size)
        self.nodes.set(world.nodes)
        least, most = environment.nodes() or (world.nodes, world.nodes)
        self.nodes_min.set(least)
        self.nodes_max.set(most)
        self.agent_restarts.set(world.restarts)
        self.run_start.set(run_began)
        self.flops.set(flops)
        self._flops = flops
        self.incarnation.set(origin.generation)
        self.checkpoint_every.set(origin.config.checkpoint_every)
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
        self.data_s.observe(line["data_wait_s"])
        self.last_step_time.set_to_current_time()
        self.lr.set(line["lr"])
        if self._peak:
            self.mfu.set(self._flops * line["tok_s"] / self._peak)
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

    def saved(self, save: Saved) -> None:
        """The end of one save."""
        self.saves.labels("failure" if save.error else "success").inc()
        if not save.error:
            self.checkpoint_step.set(save.step)
            self.checkpoint_time.set_to_current_time()
            self.checkpoint_bytes.set(save.nbytes)
            self.save_s.labels("stall").observe(save.stall_s)
            self.save_s.labels("save").observe(save.stall_s + save.write_s)

    def loaded(self, seconds: float, step: int) -> None:
        """The checkpoint of a step, from the storage into every rank."""
        self.save_s.labels("load").observe(seconds)
        self.checkpoint_step.set(step)

    def saved_late(self, step: int, when: float) -> None:
        """The newest save, by a launcher or an older life; `when`: it began, in unix seconds."""
        self.checkpoint_step.set(step)
        self.checkpoint_time.set(when)

    def unsaved(self, since: float) -> None:
        """The run has no checkpoint; `since`: it began, in unix seconds."""
        self.checkpoint_time.set(since)

    def spent(self, spent: RankSeconds) -> None:
        """Bring phases, memory, and who was slow, up to the last agreement of the ranks."""
        for phase, micros in zip(PHASES, spent.micros[0].tolist(), strict=True):
            self.phases.labels(phase).inc(max(0, micros - self._phase_seen[phase]) / 1e6)
            self._phase_seen[phase] = micros
        for stat in ("min", "mean", "max"):
            self.busy.labels(stat).set(float(getattr(spent.busy_s, stat)()))
        self.slowest.set(int(spent.busy_s.argmax()))
        for kind, nbytes in zip(spent.memory.kinds, spent.peaks.max(0).tolist(), strict=True):
            self.peak_memory.labels(kind).set(nbytes)

    def slow(self, ratios: Mapping[str, float]) -> None:
        """The ranks that are slow now, by name; of the others there is no series."""
        if ratios or self._has_slow:
            self.straggler.clear()
        self._has_slow = bool(ratios)
        for name, ratio in ratios.items():
            self.straggler.labels(*_rank_and_pod(name)).set(ratio)

    def stalled(self, seconds: float, names: Sequence[str]) -> None:
        """A step does not move, as these ranks are missing."""
        self.stall.set(seconds)
        self.stuck.clear()
        for name in names:
            self.stuck.labels(*_rank_and_pod(name)).set(1)

    def moves(self) -> None:
        """It has moved."""
        self.stalled(0, [])

    def owned(self, rank_seconds: Mapping[str, float]) -> None:
        """Where all rank-seconds of the run have gone so far, by owner."""
        for cause in LOSSES:
            self.lost.labels(cause).set(rank_seconds[cause])
        if (part := goodput(rank_seconds)) is not None:
            self.goodput.set(part)


def _rank_and_pod(name: str) -> tuple[str, str]:
    """Of `rank 3 (demo-worker-3)`: "3" and the pod, which may be ""."""
    rank, _, pod = name.removeprefix("rank ").partition(" ")
    return rank, pod.strip("()")


class _State(Collector):
    """What rank 0 does, as of the scrape: it costs the loop nothing."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[StateSetMetricFamily]:
        now = self._metrics.state()
        states = {state: state == now for state in _STATES}
        yield StateSetMetricFamily("gptddp_state", "What rank 0 does now.", states)
