"""Two jobs on one dashboard: a real Prometheus scrapes both, and each panel keeps them apart."""

import time
from collections.abc import Iterator

import prometheus_client as prom
import pytest
from support.prometheus import queries, write_rules
from support.prometheus_server import Prometheus
from support.waiting import until

from gptddp.config import Config
from gptddp.run.owners import OWNERS
from gptddp.training.clock import PhaseClock, RankSeconds
from gptddp.training.metrics import Metrics

JOBS = {"slow-job": 2.0, "job": 1.0}  # seconds of a step; one name is the end of the other
CONFIG = Config(steps=1000, checkpoint_every=60.0, max_tokens=0, max_time=0.0)
LINE = {"loss": 3.0, "val_loss": 3.1, "grad_norm": 1.0, "lr": 1e-3, "data_wait_s": 0.1}
START = {"event": "start", "step": 0, "tokens": 0, "train_s": 0.0, "generation": 1, "restarts": 0}
START |= {"world_size": 4, "nodes": 4, "quarantined": 0, "flops_per_token": 6}


class Job:
    """Rank 0 of a job with GPUs that sends all events, and the metrics that others export."""

    def __init__(self, name: str, step_s: float) -> None:
        self.pod, self.step_s, self.step = f"{name}-worker-0", step_s, 0
        world = type("World", (), {"rank": 0, "world_size": 2, "view": None})
        self.spent = RankSeconds(PhaseClock("step"), world)
        self.metrics = Metrics(CONFIG, self.spent, peak=1e6, run_id=name)
        about = {"registry": self.metrics.registry, "labelnames": ("pod",)}
        for other in ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"):
            prom.Gauge(other, "of others", **about).labels(self.pod).set(50.0)
        restarts = prom.Counter("kube_pod_container_status_restarts", "of others", **about)
        restarts.labels(self.pod).inc()
        self.server, _ = prom.start_http_server(0, "127.0.0.1", self.metrics.registry)
        self.metrics(START | {"time": time.time()})

    def scrape(self, name: str) -> dict:
        """The scrape_config, with the labels of the PodMonitor."""
        labels = {"namespace": "ml", "pytorchjob": name, "instance": self.pod}
        target = {"targets": [f"127.0.0.1:{self.server.server_port}"], "labels": labels}
        return {"job_name": name, "honor_labels": True, "static_configs": [target]}

    def go_on(self) -> None:
        self.step += 1
        now = time.time()
        line = LINE | {"step": self.step, "tokens": 1000 * self.step, "time": now}
        line["tok_s"] = 1000 / self.step_s
        about = {"step_s": self.step_s, "train_s": 1.0, "slow": {"rank 1 (pod-1)": 1.5}}
        about["owned"] = dict.fromkeys(OWNERS, self.step_s)
        saved = {"event": "checkpoint", "step": self.step, "nbytes": 9, "time": now, "stall_s": 0.1}
        self.spent.take(self.spent.mine())
        world = {"event": "world", "world_size": 4, "nodes": 4, "pause_s": self.step_s}
        loaded = {"event": "loaded", "step": 1, "seconds": 1.0}
        for event in (
            {"event": "step", "line": line, **about},
            saved | {"write_s": 1.0},
            world,
            loaded,
        ):
            self.metrics(event)


@pytest.fixture
def prometheus(tmp_path) -> Iterator[Prometheus]:
    """A Prometheus with our rules that has scraped both jobs for some seconds."""
    jobs = {name: Job(name, step_s) for name, step_s in JOBS.items()}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(write_rules(tmp_path / "rules.yaml"))],
        "scrape_configs": [job.scrape(name) for name, job in jobs.items()],
    }
    made = Prometheus(tmp_path / "server", config)

    def scraped() -> bool:
        for job in jobs.values():
            job.go_on()
        time.sleep(0.2)
        return len(made.ask("pytorchjob:gptddp_step_duration_seconds:p99_5m > 0")) == 2

    try:
        until(scraped, "rates of both jobs")
        yield made
    finally:
        made.close()
        for job in jobs.values():
            job.server.shutdown()
            job.server.server_close()


def test_every_panel_keeps_two_jobs_apart(prometheus):
    """A panel of both jobs has the series of each job alone, and is not empty: no query sums over
    jobs or confuses two names."""
    now = time.time()
    both, *each = (queries("ml", names, rate="5s") for names in ("(slow-job|job)", *JOBS))
    for panel, query in both.items():
        shown = prometheus.ask(query, now)
        alone = [prometheus.ask(of_one[panel], now) for of_one in each]
        assert all(alone) or panel == "Restarts", panel
        assert shown == alone[0] | alone[1] and len(shown) == sum(map(len, alone)), panel
