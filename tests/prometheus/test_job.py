"""A real Prometheus scrapes a real job with faults; its numbers are those of log and ledger.

It finds the pods as on a cluster, by the relabelling of the PodMonitor, and has our rules loaded.
One job has all faults in turn; the tests then query Prometheus.
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
LATE = 2  # a pod that joins later
STEPS = 450  # at most twenty a second; the faults end before the last one
JOB = f'{{namespace="{NAMESPACE}", pytorchjob="{NAME}"}}'
# Panels of other exporters, of GPUs, and of slow ranks: there are none here.
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


class Scenario:
    """A job, its faults in turn, and the Prometheus that scrapes it."""

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
        self.at: dict[str, tuple[float, float]] = {}  # fault -> its begin and end

    def starts(self) -> int:
        return sum(event["event"] == "start" for event in read_ledger(self.job.folder))

    def scraped(self) -> None:
        """Wait for a scrape of the newest rank 0, after its first step."""
        starts, query = self.starts(), "max(gptddp_incarnation and gptddp_steps_total > 0)"
        until(lambda: self.prometheus.value(query) == starts, "a scrape")

    def moves(self, world_size: int) -> None:
        """Wait until this many ranks train with another rank 0, and Prometheus has scraped it."""
        starts = self.starts()
        self.job.goes_on(world_size)
        until(lambda: self.starts() > starts, "another rank 0")
        self.scraped()

    def cause_faults(self) -> None:
        job = self.job
        with socket.socket() as held:  # a forked worker may have inherited the last socket
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
        job.pods.pop(1).kill()  # rank 0 moves back, while the late pod goes on
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
def scenario(corpus, tmp_path_factory) -> Iterator[Scenario]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_MARGIN_S", "3")
        made = Scenario(tmp_path_factory.mktemp("prometheus"), corpus)
        try:
            made.cause_faults()
            yield made
        finally:
            made.close()


def test_the_last_gauges_equal_log_and_ledger(scenario):
    """Step, tokens, generation and checkpoint are exact, as the job waits for its last scrape."""

    def last(name: str) -> float:
        return scenario.prometheus.value(f"max(last_over_time({scenario.range(name)}))")

    *_, (_, line) = logged(scenario.job.folder)
    assert last("gptddp_step") == last("gptddp_max_steps") == STEPS == line["step"]
    assert last("gptddp_tokens_seen") == line["tokens"]
    assert last("gptddp_incarnation") == scenario.starts() == 3
    assert last("gptddp_last_checkpoint_step") == STEPS
    assert last('gptddp_loss{split="val"}') == pytest.approx(line["val_loss"])


def test_counters_count_the_steps_and_tokens_of_their_process(scenario):
    """This holds at every scrape; each new rank 0 begins at 0."""
    starts = {e["generation"]: e for e in read_ledger(scenario.job.folder) if e["event"] == "start"}
    tokens = {0: 0} | {line["step"]: line["tokens"] for _, line in logged(scenario.job.folder)}
    lives, steps, counted, of_tokens = (
        {
            (dict(labels)["instance"], at): int(value)
            for labels, samples in scenario.prometheus.ask(scenario.range(f"gptddp_{name}")).items()
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


def test_world_changes_equal_those_of_the_ledger(scenario):
    """The last rank 0 counts those of its generation; the pause is that of its last one."""
    worlds = [event for event in read_ledger(scenario.job.folder) if event["event"] == "world"]
    of_last = [event for event in worlds if event["generation"] == 3]
    assert scenario.last("gptddp_worlds_total", "")[""] == len(of_last) > 0
    assert scenario.last("gptddp_last_pause_seconds", "")[""] == of_last[-1]["pause_s"]
    assert len(worlds) >= 6  # a worker and a hung one leave and return, a pod joins, one leaves


def test_phases_of_the_last_rank_0_equal_those_of_the_ledger(scenario):
    """They agree to 2 ms, except for the last save, which ends after the ledger's record."""
    stop = read_ledger(scenario.job.folder)[-1]
    assert (stop["event"], stop["generation"]) == ("stop", 3)
    found = scenario.last("gptddp_phase_seconds_total", "phase")
    told = {phase: seconds[0] for phase, seconds in stop["phases"].items()}
    saved_s = found.pop("checkpoint") - told.pop("checkpoint") - stop["since_s"]
    assert -2e-3 < saved_s < 1.0  # the end of the save, and the marker of a finished run
    assert {phase: value for phase, value in found.items() if value} == pytest.approx(
        told, abs=2e-3
    )


def test_goodput_and_losses_equal_those_of_the_ledger(scenario):
    """Both count all rank-seconds of the run up to its end, the losses by cause."""
    owners = Owners()
    for event in read_ledger(scenario.job.folder):
        owners.add(event)
    seconds = owners.so_far()
    goodput = scenario.last("gptddp_run_goodput_ratio", "")[""]
    assert goodput == pytest.approx(part_of(seconds), abs=1e-3)
    lost = scenario.last("gptddp_run_lost_seconds", "cause")
    assert lost == pytest.approx({it: seconds[it] for it in seconds if it != "training"}, abs=0.05)


def test_a_taken_metrics_port_costs_scrapes_and_no_step(scenario):
    """Training continues without the port; later the counters include the steps done before."""
    began, ended = scenario.at["held"]
    up = scenario.prometheus.ask(scenario.range(f'up{{instance="{NAME}-worker-0"}}'))
    (samples,) = up.values()
    assert all(value == 0 for at, value in samples if at < ended)
    done = sum(line["time"] < ended for _, line in logged(scenario.job.folder))
    (counted,) = scenario.prometheus.ask(
        scenario.range(f'gptddp_steps_total{{instance="{NAME}-worker-0"}}')
    ).values()
    assert counted[0][1] >= done > 0


def test_a_hang_shows_in_the_age_of_the_last_step_and_not_in_up(scenario):
    """Rank 0 answers scrapes while it waits for a rank that sleeps."""
    began, ended = scenario.at["hung"]
    age = "time() - gptddp_last_step_timestamp_seconds and on (instance) up == 1"
    found = scenario.prometheus.over(age, began, ended, 0.25)
    assert max(value for samples in found.values() for _, value in samples) > 1.5


def test_no_number_decreases_when_rank_0_moves(scenario):
    """Old series stay for a while, but `max` of the step never falls, and no step counts twice."""
    (samples,) = scenario.prometheus.over(
        f"max(gptddp_step{JOB})", scenario.began, scenario.ended, 0.5
    ).values()
    values = [value for _, value in samples]
    assert values == sorted(values)
    instances = {
        dict(it)["instance"] for it in scenario.prometheus.ask(scenario.range("gptddp_step"))
    }
    assert instances == {f"{NAME}-worker-0", f"{NAME}-worker-1"}
    increase = scenario.prometheus.value(f"sum(increase({scenario.range('gptddp_steps_total')}))")
    assert increase == pytest.approx(STEPS, rel=0.25)


def test_only_the_alert_for_a_nonfinite_step_fires(scenario):
    """No alert fires for a kill, a taken port, a moved rank 0 or a short hang."""
    fired = scenario.prometheus.ask(scenario.range('ALERTS{alertstate="firing"}'))
    found = {(dict(it)["alertname"], dict(it)["pytorchjob"]) for it in fired}
    assert found == {("GptddpNonFinite", NAME)}


def test_no_panel_of_the_dashboard_is_empty(scenario):
    """Each query has numbers, except those of other exporters, of GPUs and of slow ranks."""
    empty = set()
    for name, query in queries(NAMESPACE, NAME, rate="5s").items():
        found = scenario.prometheus.over(query, scenario.began, scenario.ended, 1.0)
        finite = [value for samples in found.values() for _, value in samples if value == value]
        if not finite:
            empty.add(name)
    assert empty == ELSEWHERE
