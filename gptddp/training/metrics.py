"""Rank 0's Prometheus metrics: what a scrape shows of the events of a life."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import prometheus_client as prom
from prometheus_client.core import StateSetMetricFamily
from prometheus_client.registry import Collector

from gptddp.budget import whole_last_step
from gptddp.config import Config
from gptddp.distributed import environment
from gptddp.run.owners import LOSSES, goodput
from gptddp.training.clock import PHASES, STATES, RankSeconds
from gptddp.training.events import Event

_STATES = (*STATES.values(), "training", "draining", "finished")
_Counter, _Gauge = prom.Counter, prom.Gauge
_Steps = partial(
    prom.Histogram,
    buckets=(0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60),
)
_Waits = partial(prom.Histogram, buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30))
_Saves = partial(prom.Histogram, buckets=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600))
_NAMES = ("slow_rank", "slow_pod")

# Counters and histograms are of this process and start at 0; what belongs to the run is a gauge.
# Behind the text: labels, and the values of the label that are there from the first scrape on.
_FAMILIES: Sequence[tuple[Any, ...]] = (
    (_Counter, "steps", "Optimizer steps of this process."),
    (_Counter, "tokens", "Tokens trained by this process's world, over all ranks."),
    (_Counter, "nonfinite_steps", "Steps skipped: loss or gradient not finite."),
    (_Counter, "phase_seconds", "Seconds of rank 0 by phase.", ["phase"], PHASES),
    (_Counter, "checkpoints", "Checkpoints by result.", ["result"], ("success", "failure")),
    (_Gauge, "quarantined_row_groups", "Row groups skipped as unreadable."),
    (_Gauge, "step", "Last finished step of the run."),
    (_Gauge, "max_steps", "Step at which the run is expected to end."),
    (_Gauge, "tokens_seen", "Tokens trained by the run."),
    (_Gauge, "last_step_timestamp_seconds", "When the last step finished."),
    (_Gauge, "loss", "Nats a token, over all ranks.", ["split"], ("train", "val")),
    (_Gauge, "grad_norm", "Gradient norm before clipping."),
    (_Gauge, "learning_rate", "Learning rate of the last step."),
    (_Gauge, "mfu_ratio", "Of what the devices can compute: the last step."),
    (_Gauge, "world_size", "Ranks in the present world."),
    (_Gauge, "nodes", "Pods in the present world."),
    (_Gauge, "nodes_min", "Pods that are enough to go on."),
    (_Gauge, "nodes_max", "Pods that the job asks for."),
    (_Gauge, "incarnation", "Lives of the run so far: its generation."),
    (_Gauge, "agent_restarts", "Restarts of workers by rank 0's launcher."),
    (_Gauge, "last_checkpoint_step", "Step of the last durable checkpoint."),
    (_Gauge, "last_checkpoint_timestamp_seconds", "When it was committed, or since when none was."),
    (_Gauge, "checkpoint_every_seconds", "As the run is told to save."),
    (_Gauge, "checkpoint_size_bytes", "Of the last durable checkpoint."),
    (_Gauge, "storage_trouble", "1 while the run directory takes nothing."),
    (_Gauge, "run_start_timestamp_seconds", "When the run began."),
    (_Gauge, "run_goodput_ratio", "Of all rank-seconds of the run: training."),
    (_Gauge, "run_lost_seconds", "Rank-seconds of the run by owner.", ["cause"], LOSSES),
    (_Gauge, "rank_busy_seconds", "Of ranks, in the last step.", ["stat"], ("min", "mean", "max")),
    (_Gauge, "slowest_rank", "The rank that was busy longest in the last step."),
    (_Gauge, "straggler_ratio", "Times the median: a rank that is slow.", _NAMES, ()),
    (_Gauge, "stuck_rank", "1: the others wait for it, and a step stalls.", _NAMES, ()),
    (_Gauge, "stall_seconds", "Of a step that does not move, as last told."),
    (_Gauge, "model_flops_per_token", "Forward and backward."),
    (_Gauge, "peak_memory_bytes", "The most that a rank has held of late.", ["kind"], ()),
    (_Steps, "step_duration_seconds", "Wall time of a step."),
    (_Waits, "data_wait_duration_seconds", "Wait of rank 0 for the rows of a step."),
    (_Saves, "checkpoint_duration_seconds", "Of a save, its stall and all; of a load, all.",
     ["op"], ("stall", "save", "load")),
)  # fmt: skip
# By kind of event: the gauges that take a field of it, or of its line of the log.
_SETS = {
    "start": {
        "step": "step",
        "tokens_seen": "tokens",
        "quarantined_row_groups": "quarantined",
        "world_size": "world_size",
        "nodes": "nodes",
        "incarnation": "generation",
        "agent_restarts": "restarts",
        "run_start_timestamp_seconds": "run_began",
        "model_flops_per_token": "flops_per_token",
        "last_checkpoint_timestamp_seconds": "time",  # so that its age is known to be no less
    },
    "step": {
        "step": "step",
        "tokens_seen": "tokens",
        "last_step_timestamp_seconds": "time",
        "learning_rate": "lr",
        "grad_norm": "grad_norm",
    },
    "loaded": {"last_checkpoint_step": "step"},
    "newest": {"last_checkpoint_step": "step", "last_checkpoint_timestamp_seconds": "since"},
    "storage": {"storage_trouble": "fails"},
}


class Metrics:
    """A sink of events: the families of this process."""

    def __init__(
        self, config: Config, spent: RankSeconds | None, peak: float | None = None, **info: str
    ) -> None:
        """`spent`: the clocks of all ranks; `peak`: FLOP/s of all devices, None if not known."""
        self.registry = registry = prom.CollectorRegistry()
        self.state: Callable[[], str] = lambda: "starting"  # of rank 0, now
        self._config, self._spent, self._peak = config, spent, peak
        self._tokens = self._flops = 0  # of the run, as of the last step; of a token
        self._counted = dict.fromkeys(PHASES, 0)  # microseconds of rank 0
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]
        prom.ProcessCollector(registry=registry)
        prom.PlatformCollector(registry=registry)
        prom.Info("gptddp_run", "Identity of the run.", registry=registry).info(info)
        registry.register(_State(self))
        self._made = {it[1]: self._make(*it) for it in _FAMILIES if peak or it[1] != "mfu_ratio"}
        self._made["last_step_timestamp_seconds"].set_to_current_time()  # a hang shows at once
        self._made["stall_seconds"].set(0)
        self._set_each("run_lost_seconds", dict.fromkeys(LOSSES, 0))
        self._actions: dict[str, Callable[[Event], None]] = {
            "start": self._start,
            "step": self._step,
            "completed": self._evaluated,
            "quarantine": self._quarantine,
            "checkpoint": self._checkpoint,
            "loaded": self._loaded,
            "stall": self._stall,
            "still": self._stall,
            "stall_end": self._stall,
            "last": self._last,
        }

    def _make(
        self,
        kind: Callable[..., Any],
        name: str,
        text: str,
        labels: Sequence[str] = (),
        values: Iterable[str] = (),
    ) -> Any:
        """A family, with the series that are known; NaN, as one that is not set would export 0."""
        if name == "peak_memory_bytes" and self._spent:
            values = self._spent.memory.kinds
        made = kind(f"gptddp_{name}", text, labels, registry=self.registry)
        for one in [made.labels(it) for it in values] if labels else [made]:
            if kind is prom.Gauge:
                one.set(float("nan"))
        return made

    def _set_each(self, family: str, values: Mapping[str, float]) -> None:
        for label, value in values.items():
            self._made[family].labels(label).set(value)

    def __call__(self, event: Event) -> None:
        """Take an event."""
        fields = {**event.get("line", {}), **event}
        for gauge, field in _SETS.get(event["event"], {}).items():
            if fields.get(field) is not None:
                self._made[gauge].set(fields[field])
        if action := self._actions.get(event["event"]):
            action(event)

    def _start(self, event: Event) -> None:
        self._tokens, self._flops = event["tokens"], event["flops_per_token"]
        least, most = environment.nodes() or (event["nodes"], event["nodes"])
        self._made["nodes_min"].set(least)
        self._made["nodes_max"].set(most)
        self._made["checkpoint_every_seconds"].set(self._config.checkpoint_every)
        self._made["storage_trouble"].set(0)
        self._expect(event["step"], event["tokens"], event["train_s"])

    def _expect(self, *done: Any) -> None:
        """When the run will end, as far as its budgets of tokens and time let expect."""
        self._made["max_steps"].set(whole_last_step(self._config, *done))

    def _step(self, event: Event) -> None:
        made, line = self._made, event["line"]
        made["steps"].inc()
        made["tokens"].inc(line["tokens"] - self._tokens)
        self._tokens = line["tokens"]
        self._expect(line["step"], line["tokens"], event["train_s"])
        made["step_duration_seconds"].observe(event["step_s"])
        made["data_wait_duration_seconds"].observe(line["data_wait_s"])
        if self._peak:
            made["mfu_ratio"].set(self._flops * line["tok_s"] / self._peak)
        if line["loss"] is None:
            made["nonfinite_steps"].inc()
        else:
            made["loss"].labels("train").set(line["loss"])
        self._evaluated(event)
        self._name_ranks("straggler_ratio", event["slow"])
        self._seconds(event["owned"])

    def _evaluated(self, event: Event) -> None:
        if "val_loss" in event["line"]:
            self._made["loss"].labels("val").set(event["line"]["val_loss"])

    def _quarantine(self, event: Event) -> None:
        self._made["quarantined_row_groups"].inc(len(event["row_groups"]))

    def _checkpoint(self, event: Event) -> None:
        made = self._made
        made["checkpoints"].labels("failure" if event.get("error") else "success").inc()
        if not event.get("error"):
            made["last_checkpoint_step"].set(event["step"])
            made["last_checkpoint_timestamp_seconds"].set(event["time"])
            made["checkpoint_size_bytes"].set(event["nbytes"])
            seconds = made["checkpoint_duration_seconds"]
            seconds.labels("stall").observe(event["stall_s"])
            seconds.labels("save").observe(event["stall_s"] + event["write_s"])

    def _loaded(self, event: Event) -> None:
        self._made["checkpoint_duration_seconds"].labels("load").observe(event["seconds"])

    def _stall(self, event: Event) -> None:
        """A step does not move, as some ranks are missing; or it has moved."""
        lasts = event["event"] != "stall_end"
        self._made["stall_seconds"].set(event["seconds"] if lasts else 0)
        self._name_ranks("stuck_rank", dict.fromkeys(event["names"] if lasts else (), 1.0))

    def _name_ranks(self, family: str, values: Mapping[str, float]) -> None:
        """By `rank 3 (demo-worker-3)`, whose pod may be missing; other ranks have no series."""
        self._made[family].clear()
        for name, value in values.items():
            rank, _, pod = name.removeprefix("rank ").partition(" ")
            self._made[family].labels(rank, pod.strip("()")).set(value)

    def _seconds(self, owned: Mapping[str, float] | None) -> None:
        """Bring phases, memory, and the slowest rank, up to the last agreement of the ranks.

        `owned`: where all rank-seconds of the run have gone so far, where that is known.
        """
        made, spent = self._made, self._spent
        if spent:
            for phase, micros in zip(PHASES, spent.micros[0].tolist(), strict=True):
                made["phase_seconds"].labels(phase).inc(max(0, micros - self._counted[phase]) / 1e6)
                self._counted[phase] = micros
            busy_s = spent.busy_s
            stats = {"min": busy_s.min(), "mean": busy_s.mean(), "max": busy_s.max()}
            self._set_each("rank_busy_seconds", stats)
            made["slowest_rank"].set(int(busy_s.argmax()))
            peaks = zip(spent.memory.kinds, spent.peaks.max(0).tolist(), strict=True)
            self._set_each("peak_memory_bytes", dict(peaks))
        if owned:
            self._set_each("run_lost_seconds", {cause: owned[cause] for cause in LOSSES})
            if (part := goodput(owned)) is not None:
                made["run_goodput_ratio"].set(part)

    def _last(self, event: Event) -> None:
        self._seconds(event["owned"])
        if event["finished"]:
            self.state = lambda: "finished"


class _State(Collector):
    """What rank 0 does, as of the scrape: it costs the loop nothing."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[StateSetMetricFamily]:
        now = self._metrics.state()
        states = {state: state == now for state in _STATES}
        yield StateSetMetricFamily("gptddp_state", "What rank 0 does now.", states)
