"""A real Prometheus has the last numbers of a run that ends within an interval."""

from collections.abc import Iterator

import pytest
from support.launchers import Training
from support.prometheus import write_rules
from support.prometheus_server import Prometheus
from support.waiting import until

PORT, INTERVAL_S = 9464, 4.0
FLAGS = ("--steps", "1000000", "--max-skipped", "3", "--checkpoint-every", "600")


class Scraped(Training):
    """Two pods, and a Prometheus that scrapes the first now and then."""

    def scrapes(self) -> list[tuple[float, float]]:
        """Its samples of the run's step, that of the first scrape of this life on."""
        found = self.prometheus.ask("gptddp_step[1h]")
        return next(iter(found.values()), [])

    def just_scraped(self) -> None:
        """Wait for a scrape, after two more of this life: from them it knows the interval."""
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


def test_a_job_that_diverges_is_seen_to_its_end(job):
    """All of its steps, and those that were not finite, with their alert; no scrape was due."""
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
