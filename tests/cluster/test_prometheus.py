"""A Prometheus beside the cluster finds a job by its pods, and follows it over a lost pod.

It reaches the metrics port through the API server, as the pods' network is not this machine's.
"""

import base64
import math
import subprocess
from pathlib import Path

import pytest
import yaml
from support.cluster_jobs import PODS, TINY, Job, until
from support.paths import ROOT
from support.prometheus import FOLDER, write_rules
from support.prometheus_server import Prometheus, of_file, of_pod_monitor, write_pods

STEPS = 150


def through_the_api_server(scrape: dict, kubeconfig: Path, folder: Path) -> dict:
    """A scrape_config whose targets are reached by the proxy of the API server."""
    config = yaml.safe_load(kubeconfig.read_text())
    server, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    files = {"ca": server, "cert": user, "key": user}
    names = {"ca": "certificate-authority", "cert": "client-certificate", "key": "client-key"}
    for name, part in files.items():
        (folder / name).write_bytes(base64.b64decode(part[f"{names[name]}-data"]))
    proxy = "/api/v1/namespaces/$1/pods/$2:9464/proxy/metrics"
    relabel = [
        *scrape["relabel_configs"],
        {
            "source_labels": ["namespace", "pod"],
            "regex": "(.+);(.+)",
            "target_label": "__metrics_path__",
            "replacement": proxy,
        },
        {"target_label": "__address__", "replacement": server["server"].rpartition("/")[2]},
    ]
    tls = {f"{name}_file": str(folder / name) for name in files}
    return {**scrape, "scheme": "https", "tls_config": tls, "relabel_configs": relabel}


@pytest.fixture
def prometheus(prepared, tmp_path):
    """With our rules; its targets are the pods that `discover` has been given."""
    write_pods(tmp_path / "pods.json", [])
    monitored = of_pod_monitor(of_file(tmp_path / "pods.json"), prepared.namespace, "1s")
    scrape = through_the_api_server(monitored, prepared.kubeconfig, tmp_path)
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    rules = str(write_rules(tmp_path / "rules.yaml"))
    config = {"global": every, "rule_files": [rules], "scrape_configs": [scrape]}
    server = Prometheus(tmp_path / "server", config)
    yield server
    server.close()


def test_a_job_is_followed_over_a_lost_pod(prepared, prometheus, tmp_path):
    """One target, worker 0, named by the job; step and lives end as log and ledger have them."""
    job = Job(prepared, "scraped")
    job.submit(*PODS, "--replicas=4", "--", *TINY, f"--steps={STEPS}")

    def step() -> float:
        write_pods(tmp_path / "pods.json", job.pods())
        found = prometheus.value('max(last_over_time(gptddp_step{pytorchjob="scraped"}[10m]))')
        return -1 if math.isnan(found) else found

    job.reach(5, timeout_s=300)
    until(lambda: step() > 5, "a scrape", 60)
    (target,) = prometheus.targets()
    assert target["labels"]["instance"] == target["labels"]["pod"] == "scraped-worker-0"
    assert target["labels"]["namespace"] == prepared.namespace
    prepared.kubectl("delete", "pod", "scraped-worker-0", "--grace-period=0", "--force")
    until(lambda: step() == STEPS, "the last step", 300, poll_s=0.5)
    job.cli("wait", "--timeout=120")
    lives = prometheus.value("max(last_over_time(gptddp_incarnation[10m]))")
    assert lives == max(job.lives()) > 1
    assert [it["step"] for it in job.lines()][-1] == STEPS


def test_the_component_builds(cluster, tmp_path):
    """In a kustomization with our namespace, as docs/alerts.md has it."""
    page = (ROOT / "docs/alerts.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    for name in ("k8s/base", "k8s/components/monitoring"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "kustomization.yaml").write_text(text)
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {it["kind"]: it for it in yaml.safe_load_all(done.stdout)}
    assert made["ConfigMap"]["data"]["gptddp.json"] == (FOLDER / "dashboard.json").read_text()
    for kind in ("PodMonitor", "PrometheusRule", "ConfigMap"):
        assert made[kind]["metadata"]["namespace"] == "gptddp"
        assert made[kind]["metadata"]["labels"]["release"] == "monitoring"
