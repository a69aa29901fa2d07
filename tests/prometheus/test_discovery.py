"""A real Prometheus picks the targets of a job's pods, and names them, as docs/alerts.md says."""

import pytest
from support.cluster_pods import pod
from support.launchers import until
from support.prometheus_server import (
    Prometheus,
    of_file,
    of_page,
    of_pod_monitor,
    page_selector,
    write_pods,
)

STRANGER = {"app.kubernetes.io/name": "other"}


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    """Of all targets, by the PodMonitor and by the page."""
    folder = tmp_path_factory.mktemp("discovery")
    pods = [
        pod("ml", "big-worker-0", "127.99.0.1"),
        pod("ml", "big-worker-1", "127.99.0.2", role=""),
        pod("ml", "old-worker-0", "127.99.0.3", phase="Succeeded"),
        pod("ml", "bad-worker-0", "127.99.0.4", phase="Failed"),
        pod("ml", "new-worker-0", "", phase="Pending"),
        pod("ml", "stranger-worker-0", "127.99.0.5"),
    ]
    pods[-1]["metadata"]["labels"] |= STRANGER
    write_pods(folder / "all.json", pods)
    write_pods(folder / "selected.json", [it for it in pods if page_selector(it)])
    configs = [
        of_pod_monitor(of_file(folder / "all.json"), "ml", "1s"),
        of_page(of_file(folder / "selected.json"), "1s"),
    ]
    server = Prometheus(folder / "server", {"scrape_configs": configs})
    try:
        until("targets", lambda: len({it["scrapePool"] for it in server.targets()}) == 2)
        yield [it["labels"] for it in server.targets()]
    finally:
        server.close()


def test_one_pod_of_a_job_is_scraped(labels):
    """Worker 0 while it runs; its series have the job, and the name of the pod as instance."""
    found = [it for it in labels if it["job"] == "ml/gptddp"]
    wanted = {"namespace": "ml", "pytorchjob": "big", "pod": "big-worker-0", "container": "pytorch"}
    wanted |= {"job": "ml/gptddp", "instance": "big-worker-0", "endpoint": "metrics"}
    assert found == [wanted]


def test_without_the_operator_the_labels_are_the_same(labels):
    """Those of the scrape_config on the page, but for `job` and for `endpoint`, the operator's."""
    (monitored,) = [it for it in labels if "endpoint" in it]
    (paged,) = [it for it in labels if "endpoint" not in it]
    assert paged == {k: v for k, v in monitored.items() if k != "endpoint"} | {"job": "gptddp"}
