"""A real Prometheus has the last numbers of a run that ends between two scrapes."""

from collections.abc import Iterator

import pytest
from support.launchers import Training
from support.prometheus import write_rules
from support.prometheus_server import Prometheus
from support.waiting import until

PORT, INTERVAL_S = 9464, 4.0
FLAGS = ("--steps", "1000000", "--max-skipped", "3", "--checkpoint-every", "600")


class Scraped(Training):
    """Two pods, and a Prometheus that scrapes the first of them."""

    def scrapes(self) -> list[tuple[float, float]]:
        """The samples of the run's step in Prometheus."""
        found = self.prometheus.ask("gptddp_step[1h]")
        return next(iter(found.values()), [])

    def just_scraped(self) -> None:
        """Wait for the third scrape of this life: after two, rank 0 knows the interval."""
        before = len(self.scrapes())
        self.goes_on(2)
        until(lambda: len(self.scrapes()) >= before + 3, "three scrapes")

    def last(self, name: str) -> float:
        return self.prometheus.value(f"last_over_time({name}[1h])")


@pytest.fixture
def job(corpus, tmp_path) -> Iterator[Scraped]:
    it = Scraped(tmp_path / "job", corpus, 2, 33, 2, *FLAGS, "--metrics-port", str(PORT))
    labels = {"namespace": "ml", "pytorchjob": "short", "pod": "short-worker-0"}
    scrape = {
        "job_name": "gptddp",
        "scrape_interval": f"{INTERVAL_S:g}s",
        "static_configs": [{"targets": [f"{it.prefix}.100:{PORT}"], "labels": labels}],
    }
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": [str(write_rules(tmp_path / "rules.yaml"))],
        "scrape_configs": [scrape],
    }
    it.prometheus = Prometheus(tmp_path / "server", config)
    yield it
    it.close()
    it.prometheus.close()


def test_prometheus_has_the_last_steps_of_a_job_that_diverges(job):
    """All steps and non-finite steps are scraped before the job ends; the alert fires."""
    job.start(0, 1)
    job.just_scraped()
    counted = job.last("gptddp_steps_total")
    assert job.last("gptddp_nonfinite_steps_total") == 0
    job.order(1, "nan", "1+")
    lines = job.finish(code=3)
    assert job.last("gptddp_step") == lines[-1]["step"]
    assert job.last("gptddp_nonfinite_steps_total") == 4
    assert job.last("gptddp_steps_total") == lines[-1]["step"] > counted
    firing = 'ALERTS{alertname="GptddpNonFinite", alertstate="firing", pytorchjob="short"}'
    until(lambda: job.prometheus.ask(firing), "the alert")
