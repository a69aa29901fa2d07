"""Rank 0's Prometheus metrics, set by the events of a life."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import prometheus_client as prom
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from gptddp.budget import whole_last_step
from gptddp.config import Config
from gptddp.distributed import environment
from gptddp.run.owners import LOSSES, goodput
from gptddp.training.clock import PHASES, STATES, RankSeconds
from gptddp.training.events import Event

_STATES = (*STATES.values(), "training", "draining", "finished")
_Counter, _Gauge = prom.Counter, GaugeMetricFamily
_Steps = partial(
    prom.Histogram,
    buckets=(0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60),
)
_Waits = partial(prom.Histogram, buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30))
_Saves = partial(prom.Histogram, buckets=(0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600))
_NAMES = ("slow_rank", "slow_pod")

# Counters and histograms belong to this process and start at 0; values of the run are gauges.
# After the text: the label, and its values that exist from the first scrape on.
_FAMILIES: Sequence[tuple[Any, ...]] = (
    (_Counter, "steps", "Optimizer steps of this process."),
    (_Counter, "tokens", "Tokens trained by this process's world, over all ranks."),
    (_Counter, "nonfinite_steps", "Steps skipped: loss or gradient not finite."),
    (_Counter, "worlds", "Changes of the world, as ranks were lost or joined."),
    (_Counter, "checkpoints", "Checkpoints by result.", ["result"], ("success", "failure")),
    (_Gauge, "quarantined_row_groups", "Row groups skipped as unreadable."),
    (_Gauge, "step", "Last finished step of the run."),
    (_Gauge, "max_steps", "Step at which the run is expected to end: for the ETA."),
    (_Gauge, "tokens_seen", "Tokens trained by the run."),
    (_Gauge, "last_step_timestamp_seconds", "When the last step finished."),
    (_Gauge, "loss", "Nats a token, over all ranks.", ["split"], ("train", "val")),
    (_Gauge, "grad_norm", "Gradient norm before clipping."),
    (_Gauge, "learning_rate", "Learning rate of the last step."),
    (_Gauge, "mfu_ratio", "Model FLOPs utilisation of the last step."),
    (_Gauge, "world_size", "Ranks in the present world."),
    (_Gauge, "nodes", "Pods in the present world."),
    (_Gauge, "last_pause_seconds", "Pause of the steps at the last change of the world."),
    (_Gauge, "nodes_max", "Pods that the job asks for."),
    (_Gauge, "incarnation", "Generation: lives, and rank 0s that took over."),
    (_Gauge, "agent_restarts", "Restarts of workers by rank 0's launcher."),
    (_Gauge, "last_checkpoint_step", "Step of the last durable checkpoint."),
    (_Gauge, "last_checkpoint_timestamp_seconds", "Commit of the last checkpoint; else the start."),
    (_Gauge, "checkpoint_every_seconds", "Configured time between two saves."),
    (_Gauge, "checkpoint_size_bytes", "Size of the last durable checkpoint."),
    (_Gauge, "storage_trouble", "1 while the run directory cannot be written."),
    (_Gauge, "run_goodput_ratio", "Part of all rank-seconds in training. NaN before a fault."),
    (_Gauge, "run_lost_seconds", "Rank-seconds of the run by owner.", ["cause"], LOSSES),
    (_Gauge, "rank_busy_seconds", "Busy time in the last step.", ["stat"], ("min", "mean", "max")),
    (_Gauge, "slowest_rank", "The rank that was busy longest in the last step."),
    (_Gauge, "straggler_ratio", "Busy time of a slow rank, relative to the median.", _NAMES, ()),
    (_Gauge, "stuck_rank", "1: a step stalls, and the other ranks wait for this one.", _NAMES, ()),
    (_Gauge, "stall_seconds", "Duration of the present stall, as last reported."),
    (_Gauge, "peak_memory_bytes", "Recent peak memory of any rank.", ["kind"], ()),
    (_Steps, "step_duration_seconds", "Wall time of a step."),
    (_Waits, "data_wait_duration_seconds", "Wait of rank 0 for the rows of a step."),
    (_Saves, "checkpoint_duration_seconds", "Duration of a save, of its stall, and of a load.",
     ["op"], ("stall", "save", "load")),
)  # fmt: skip
# By kind of event: the gauges that take a field of the event, or of its line of the log.
_SETS = {
    "start": {
        "step": "step",
        "tokens_seen": "tokens",
        "quarantined_row_groups": "quarantined",
        "world_size": "world_size",
        "nodes": "nodes",
        "incarnation": "generation",
        "agent_restarts": "restarts",
        "last_checkpoint_timestamp_seconds": "time",  # a lower limit of its age
    },
    "world": {"world_size": "world_size", "nodes": "nodes", "last_pause_seconds": "pause_s"},
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


class Metrics(Collector):
    """A sink of events: the families of this process."""

    def __init__(
        self, config: Config, spent: RankSeconds | None, peak: float | None = None, **info: str
    ) -> None:
        """`spent`: the clocks of all ranks; `peak`: FLOP/s of all devices, None if unknown."""
        self.registry = registry = prom.CollectorRegistry()
        self.state: Callable[[], str] = lambda: "starting"  # of rank 0, now
        self._config, self._spent, self.peak = config, spent, peak
        self._tokens = self._flops = 0  # of the run, at the last step; of a token
        prom.disable_created_metrics()  # type: ignore[no-untyped-call]
        registry.register(self)  # first: no scrape has a gauge that is ahead of a counter
        prom.ProcessCollector(registry=registry)
        prom.PlatformCollector(registry=registry)
        prom.Info("gptddp_run", "Identity of the run.", registry=registry).info(info)
        self._made: dict[str, Any] = {}  # counters and histograms
        self._gauges: dict[str, dict[tuple[str, ...], float]] = {}  # by the values of labels
        for kind, name, text, *labels in _FAMILIES:
            values = [(it,) for it in labels[1]] if labels else [()]
            if kind is _Gauge:  # NaN: an unknown value is not 0
                self._gauges[name] = dict.fromkeys(values, math.nan)
            else:
                self._made[name] = kind(f"gptddp_{name}", text, *labels[:1], registry=registry)
                for value in values if labels else ():
                    self._made[name].labels(*value)
        if spent:
            self._set_each("peak_memory_bytes", dict.fromkeys(spent.memory.kinds, math.nan))
        self._set(last_step_timestamp_seconds=time.time(), stall_seconds=0)  # a hang shows at once
        self._set_each("run_lost_seconds", dict.fromkeys(LOSSES, 0))

    def _set(self, **values: float) -> None:
        for gauge, value in values.items():
            self._gauges[gauge][()] = value

    def _set_each(self, gauge: str, values: Mapping[str, float]) -> None:
        self._gauges[gauge].update({(label,): value for label, value in values.items()})

    def collect(self) -> Iterator[Metric]:
        """The gauges, and the values of the moment; it costs the loop nothing."""
        spent, phases = self._spent, dict.fromkeys(PHASES, 0.0)
        if spent and spent.micros.any():  # the ranks have met
            phases = dict(zip(PHASES, (spent.micros[0] / 1e6).tolist(), strict=True))
            busy_s = spent.busy_s
            stats = {"min": busy_s.min(), "mean": busy_s.mean(), "max": busy_s.max()}
            self._set_each("rank_busy_seconds", stats)
            self._set(slowest_rank=int(busy_s.argmax()))
            peaks = zip(spent.memory.kinds, spent.peaks.max(0).tolist(), strict=True)
            self._set_each("peak_memory_bytes", dict(peaks))
        text = "Seconds of rank 0 by phase."
        seconds = CounterMetricFamily("gptddp_phase_seconds", text, labels=["phase"])
        for phase, value in phases.items():
            seconds.add_metric([phase], value)
        yield seconds
        now = self.state()
        states = {state: state == now for state in _STATES}
        yield StateSetMetricFamily("gptddp_state", "What rank 0 does now.", states)
        for kind, name, text, *labels in _FAMILIES:
            if kind is _Gauge and (self.peak or name != "mfu_ratio"):
                gauge = GaugeMetricFamily(
                    f"gptddp_{name}", text, labels=labels[0] if labels else ()
                )
                for of_labels, value in self._gauges[name].items():
                    gauge.add_metric(of_labels, value)
                yield gauge

    def __call__(self, event: Event) -> None:
        """Take an event: its counters before its gauges."""
        if action := getattr(self, f"_on_{event['event']}", None):
            action(event)
        fields = {**event.get("line", {}), **event}
        for gauge, field in _SETS.get(event["event"], {}).items():
            if fields.get(field) is not None:
                self._gauges[gauge][()] = fields[field]

    def _on_start(self, event: Event) -> None:
        self._tokens, self._flops = event["tokens"], event["flops_per_token"]
        _, most = environment.nodes() or (0, event["nodes"])
        self._set(nodes_max=most, checkpoint_every_seconds=self._config.checkpoint_every)
        self._set(storage_trouble=0)
        self._expect(event["step"], event["tokens"], event["train_s"])

    def _expect(self, *done: Any) -> None:
        """Set the last step that the budgets of tokens and time let expect."""
        self._set(max_steps=whole_last_step(self._config, *done))

    def _on_step(self, event: Event) -> None:
        made, line = self._made, event["line"]
        made["steps"].inc()
        made["tokens"].inc(line["tokens"] - self._tokens)
        self._tokens = line["tokens"]
        self._expect(line["step"], line["tokens"], event["train_s"])
        made["step_duration_seconds"].observe(event["step_s"])
        made["data_wait_duration_seconds"].observe(line["data_wait_s"])
        if self.peak:
            self._set(mfu_ratio=self._flops * line["tok_s"] / self.peak)
        if line["loss"] is None:
            made["nonfinite_steps"].inc()
        else:
            self._set_each("loss", {"train": line["loss"]})
        self._on_completed(event)
        self._name_ranks("straggler_ratio", event["slow"])
        self._own(event["owned"])

    def _on_completed(self, event: Event) -> None:
        if "val_loss" in event["line"]:
            self._set_each("loss", {"val": event["line"]["val_loss"]})

    def _on_world(self, event: Event) -> None:
        self._made["worlds"].inc()

    def _on_quarantine(self, event: Event) -> None:
        self._gauges["quarantined_row_groups"][()] += len(event["row_groups"])

    def _on_checkpoint(self, event: Event) -> None:
        made = self._made
        made["checkpoints"].labels("failure" if event.get("error") else "success").inc()
        if not event.get("error"):
            self._set(
                last_checkpoint_step=event["step"],
                last_checkpoint_timestamp_seconds=event["time"],
                checkpoint_size_bytes=event["nbytes"],
            )
            seconds = made["checkpoint_duration_seconds"]
            seconds.labels("stall").observe(event["stall_s"])
            seconds.labels("save").observe(event["stall_s"] + event["write_s"])

    def _on_loaded(self, event: Event) -> None:
        self._made["checkpoint_duration_seconds"].labels("load").observe(event["seconds"])

    def _on_stall(self, event: Event) -> None:
        """Set or clear a step that stalls, and the ranks that it waits for."""
        lasts = event["event"] != "stall_end"
        self._set(stall_seconds=event["seconds"] if lasts else 0)
        self._name_ranks("stuck_rank", dict.fromkeys(event["names"] if lasts else (), 1.0))

    _on_still = _on_stall_end = _on_stall

    def _name_ranks(self, gauge: str, values: Mapping[str, float]) -> None:
        """Set by `rank 3 (demo-worker-3)` or `rank 3`; other ranks have no series."""
        named: dict[tuple[str, ...], float] = {}
        for name, value in values.items():
            rank, _, pod = name.removeprefix("rank ").partition(" ")
            named[rank, pod.strip("()")] = value
        self._gauges[gauge] = named

    def _own(self, owned: Mapping[str, float] | None) -> None:
        """Set the owners of all rank-seconds of the run so far, if they are known."""
        if owned:
            self._set_each("run_lost_seconds", {cause: owned[cause] for cause in LOSSES})
            if (part := goodput(owned)) is not None:
                self._set(run_goodput_ratio=part)

    def _on_last(self, event: Event) -> None:
        self._own(event["owned"])
        self.state = lambda: "finished"
