"""A real Prometheus scrapes a real job that has its faults; what it says is what has happened.

It finds the pods as on a cluster, by the relabelling of the PodMonitor, and has our rules loaded.
One job takes all of the faults in turn; the tests then ask about it.
"""

import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launchers import Training
from support.manifests import pod_spec, render_job, worker
from support.prometheus import queries, write_rules
from support.prometheus_server import Prometheus, of_file, of_pod_monitor, write_pods
from support.waiting import until

from gptddp.run.history import logged, read_ledger
from gptddp.run.owners import Owners
from gptddp.run.owners import goodput as part_of

NAMESPACE, NAME, PORT = "ml", "gptddp", 9464
LATE = 2  # a pod that comes later
STEPS = 450  # of twenty a second at most; the faults take fewer
JOB = f'{{namespace="{NAMESPACE}", pytorchjob="{NAME}"}}'
# Panels of other exporters, what only a GPU has, and a rank that is slow: none is, here.
ELSEWHERE = {"MFU, A", "Container restarts, A", "GPU utilization, A", "GPU memory, A"}
ELSEWHERE |= {"Slow ranks, A"}


def pod(i: int, prefix: str) -> dict[str, Any]:
    """Pod `i` of the rendered job, with the label that the operator gives it."""
    rendered = render_job({"name": NAME})
    about = worker(rendered)["template"]["metadata"]
    about["labels"]["training.kubeflow.org/job-name"] = NAME
    return {
        "metadata": {"name": f"{NAME}-worker-{i}", "namespace": NAMESPACE, **about},
        "spec": pod_spec(rendered),
        "status": {"phase": "Running", "podIP": f"{prefix}.{100 + i}"},
    }


class Story:
    """What is done to the job, and when."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        flags = ("--steps", str(STEPS), "--checkpoint-every", "4", "--metrics-port", str(PORT))
        self.job = Training(folder / "job", corpus, 3, 31, 2, *flags)
        targets = folder / "pods.json"
        write_pods(targets, [pod(i, self.job.prefix) for i in (0, 1, LATE)])
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(write_rules(folder / "rules.yaml"))],
            "scrape_configs": [of_pod_monitor(of_file(targets), NAMESPACE, "1s")],
        }
        self.prometheus = Prometheus(folder / "server", config)
        self.began, self.ended = time.time(), math.nan
        self.at: dict[str, tuple[float, float]] = {}  # what -> from when, until when

    def starts(self) -> int:
        return sum(event["event"] == "start" for event in read_ledger(self.job.folder))

    def scraped(self) -> None:
        """Wait for a scrape of the newest rank 0, after its first step."""
        starts, query = self.starts(), "max(gptddp_incarnation and gptddp_steps_total > 0)"
        until(lambda: self.prometheus.value(query) == starts, "a scrape")

    def moves(self, world_size: int) -> None:
        """Wait until so many ranks go on, with another rank 0 that has the records."""
        starts = self.starts()
        self.job.goes_on(world_size)
        until(lambda: self.starts() > starts, "another rank 0")
        self.scraped()

    def tell(self) -> None:
        job = self.job
        with socket.socket() as held:  # a forked worker may have inherited the socket of the last
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((f"{job.prefix}.100", PORT))
            held.listen()
            job.start(0, 1)
            until(lambda: f"metrics port {PORT}" in job.log(0), "the warning")
            job.goes_on(2)
            self.at["held"] = self.began, time.time()
        self.scraped()

        os.kill(job.worker(0), signal.SIGKILL)  # rank 0 moves to the other pod
        self.moves(2)

        job.order(1, "nan")
        skipped = "max(gptddp_nonfinite_steps_total)"
        until(lambda: self.prometheus.value(skipped) > 0, "a skipped step")

        began, old = time.time(), job.worker(0)
        job.order(0, "sleep")
        until(lambda: job.worker(0) != old, "a new worker")
        self.at["hung"] = began, time.time()
        job.goes_on(2)
        self.scraped()

        job.start(LATE)
        job.goes_on(3)
        job.pods.pop(1).kill()  # and back, while the one that has come goes on
        self.moves(2)
        assert [pod.wait(400) for pod in job.pods.values()] == [0, 0], job.log(0)
        self.ended = time.time()

    def last(self, name: str, label: str) -> dict[str, float]:
        """The last values of a metric of worker 0, which has rank 0 in the end, by one label."""
        query = self.range(f'{name}{{instance="{NAME}-worker-0"}}')
        found = self.prometheus.ask(f"last_over_time({query})")
        return {dict(it).get(label, ""): samples[-1][1] for it, samples in found.items()}

    def range(self, metric: str) -> str:
        return f"{metric}[{time.time() - self.began + 1:.0f}s]"

    def close(self) -> None:
        self.job.close()
        self.prometheus.close()


@pytest.fixture(scope="module")
def story(corpus, tmp_path_factory) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_MARGIN_S", "3")
        made = Story(tmp_path_factory.mktemp("prometheus"), corpus)
        try:
            made.tell()
            yield made
        finally:
            made.close()


def test_gauges_of_the_run_end_at_what_log_and_ledger_say(story):
    """Step, tokens, generation, checkpoint: exactly, as the last scrape is waited for."""

    def last(name: str) -> float:
        return story.prometheus.value(f"max(last_over_time({story.range(name)}))")

    *_, (_, line) = logged(story.job.folder)
    assert last("gptddp_step") == last("gptddp_max_steps") == STEPS == line["step"]
    assert last("gptddp_tokens_seen") == line["tokens"]
    assert last("gptddp_incarnation") == story.starts() == 3
    assert last("gptddp_last_checkpoint_step") == STEPS
    assert last('gptddp_loss{split="val"}') == pytest.approx(line["val_loss"])


def test_counters_are_the_steps_and_tokens_of_their_process(story):
    """At every scrape, from 0 with each rank 0."""
    starts = {e["generation"]: e for e in read_ledger(story.job.folder) if e["event"] == "start"}
    tokens = {0: 0} | {line["step"]: line["tokens"] for _, line in logged(story.job.folder)}
    lives, steps, counted, of_tokens = (
        {
            (dict(labels)["instance"], at): int(value)
            for labels, samples in story.prometheus.ask(story.range(f"gptddp_{name}")).items()
            for at, value in samples
            if not math.isnan(value)
        }
        for name in ("incarnation", "step", "steps_total", "tokens_total")
    )
    assert len(lives) > 15 and set(lives.values()) == set(starts)
    seen = dict.fromkeys(starts, 0)
    for scrape, life in lives.items():
        begin = starts[life]["step"]
        more = steps[scrape] - begin - counted[scrape]
        assert more in (0, -1), (scrape, life)  # a scrape may come in the middle of an update
        assert of_tokens[scrape] in (
            tokens[begin + counted[scrape] - it] - tokens[begin]
            for it in (0, min(1, counted[scrape]))
        )
        seen[life] = max(seen[life], counted[scrape])
    assert seen[3] == STEPS - starts[3]["step"]


def test_changes_of_the_world_are_those_of_the_ledger(story):
    """Rank 0 counts what it has seen, its own coming included; the pause is that of the last."""
    worlds = [event for event in read_ledger(story.job.folder) if event["event"] == "world"]
    of_last = [event for event in worlds if event["generation"] == 3]
    assert story.last("gptddp_worlds_total", "")[""] == len(of_last) > 0
    assert story.last("gptddp_last_pause_seconds", "")[""] == of_last[-1]["pause_s"]
    assert len(worlds) >= 6  # lost and back: a worker, a hung one; come: a pod; lost: another


def test_phases_of_the_last_rank_0_are_those_of_the_ledger(story):
    """To the millisecond, in each phase; with the last save, which ends after the records do."""
    stop = read_ledger(story.job.folder)[-1]
    assert (stop["event"], stop["generation"]) == ("stop", 3)
    found = story.last("gptddp_phase_seconds_total", "phase")
    told = {phase: seconds[0] for phase, seconds in stop["phases"].items()}
    saved_s = found.pop("checkpoint") - told.pop("checkpoint") - stop["since_s"]
    assert -2e-3 < saved_s < 1.0  # the end of the records, and the marker of a run that is done
    assert {phase: value for phase, value in found.items() if value} == pytest.approx(
        told, abs=2e-3
    )


def test_goodput_and_losses_are_those_of_the_ledger(story):
    """Of all rank-seconds of the run up to its end, and each cause of a loss."""
    owners = Owners()
    for event in read_ledger(story.job.folder):
        owners.add(event)
    seconds = owners.so_far()
    goodput = story.last("gptddp_run_goodput_ratio", "")[""]
    assert goodput == pytest.approx(part_of(seconds), abs=1e-3)
    lost = story.last("gptddp_run_lost_seconds", "cause")
    assert lost == pytest.approx({it: seconds[it] for it in seconds if it != "training"}, abs=0.05)


def test_a_held_port_costs_the_first_scrapes_and_no_step(story):
    """Training went on; the gauges then say what had been done, the counters go on from there."""
    began, ended = story.at["held"]
    up = story.prometheus.ask(story.range(f'up{{instance="{NAME}-worker-0"}}'))
    (samples,) = up.values()
    assert all(value == 0 for at, value in samples if at < ended)
    done = sum(line["time"] < ended for _, line in logged(story.job.folder))
    (counted,) = story.prometheus.ask(
        story.range(f'gptddp_steps_total{{instance="{NAME}-worker-0"}}')
    ).values()
    assert counted[0][1] >= done > 0


def test_a_hang_is_seen_by_the_age_of_the_last_step_and_not_by_up(story):
    """Rank 0 answers while it waits for a rank that sleeps."""
    began, ended = story.at["hung"]
    age = "time() - gptddp_last_step_timestamp_seconds and on (instance) up == 1"
    found = story.prometheus.over(age, began, ended, 0.25)
    assert max(value for samples in found.values() for _, value in samples) > 1.5


def test_rank_0_moves_and_no_number_goes_back(story):
    """Its old series stay for a while; `max` of the run's gauges never falls, none counts twice."""
    (samples,) = story.prometheus.over(
        f"max(gptddp_step{JOB})", story.began, story.ended, 0.5
    ).values()
    values = [value for _, value in samples]
    assert values == sorted(values)
    instances = {dict(it)["instance"] for it in story.prometheus.ask(story.range("gptddp_step"))}
    assert instances == {f"{NAME}-worker-0", f"{NAME}-worker-1"}
    increase = story.prometheus.value(f"sum(increase({story.range('gptddp_steps_total')}))")
    assert increase == pytest.approx(STEPS, rel=0.25)


def test_alerts_fire_for_what_was_wrong_and_for_nothing_else(story):
    """A step that is not finite; not a kill, a port, a moved rank 0 or a hang."""
    fired = story.prometheus.ask(story.range('ALERTS{alertstate="firing"}'))
    found = {(dict(it)["alertname"], dict(it)["pytorchjob"]) for it in fired}
    assert found == {("GptddpNonFinite", NAME)}


def test_no_panel_of_the_dashboard_is_empty(story):
    """Each query has numbers, but those of other exporters and of GPUs."""
    empty = set()
    for name, query in queries(NAMESPACE, NAME, rate="5s").items():
        found = story.prometheus.over(query, story.began, story.ended, 1.0)
        finite = [value for samples in found.values() for _, value in samples if value == value]
        if not finite:
            empty.add(name)
    assert empty == ELSEWHERE
