"""A real Prometheus discovers a job's pods by itself, with what the PodMonitor comes to.

It runs on this machine, asks the API server with the token of a ServiceAccount that may only list
and watch the pods of its namespace, and scrapes them by their own addresses.
"""

import base64
import math
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.cluster_jobs import TINY, Job
from support.prometheus_server import (
    Prometheus,
    of_api_server,
    of_page,
    of_pod_monitor,
    page_selectors,
)
from support.waiting import until

STEPS = 400
NAME = "found"
SMALL_PODS = ["--data=data/corpus", "--replicas=2", "--cpu=400m", "--memory=1500Mi"]
# A job of the kind that many set-ups have: whatever pod is annotated, by port and address.
ANNOTATED = [
    {"source_labels": ["__meta_kubernetes_pod_annotation_prometheus_io_scrape"],
     "regex": "true", "action": "keep"},
    {"source_labels": ["__meta_kubernetes_pod_ip",
                       "__meta_kubernetes_pod_annotation_prometheus_io_port"],
     "regex": "(.+);(.+)", "replacement": "$1:$2", "target_label": "__address__"},
    {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
]  # fmt: skip
RBAC = """
apiVersion: v1
kind: ServiceAccount
metadata: {name: prometheus}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: prometheus}
rules:
- {apiGroups: [""], resources: [pods], verbs: [list, watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: prometheus}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: prometheus}
subjects:
- {kind: ServiceAccount, name: prometheus}
"""


@pytest.fixture
def routes(prepared) -> Iterator[None]:
    """This machine reaches the pods, through the containers that are their nodes."""
    if not shutil.which("ip") or os.geteuid():
        pytest.skip("needs root, and ip of iproute2, for routes to the pods")
    made = []
    for node in prepared.get("nodes"):
        addresses = {it["type"]: it["address"] for it in node["status"]["addresses"]}
        made.append([node["spec"]["podCIDR"], "via", addresses["InternalIP"]])
        subprocess.run(["ip", "route", "replace", *made[-1]], check=True)
    yield
    for route in made:
        subprocess.run(["ip", "route", "del", *route], check=True)


def credentials(prepared, folder: Path) -> str:
    """The API server's address; a token of the ServiceAccount, and the certificate, as files."""
    prepared.kubectl("apply", "-f", "-", stdin=RBAC)
    token = prepared.kubectl("create", "token", "prometheus", "--duration=1h").stdout.strip()
    (folder / "token").write_text(token)
    cluster = yaml.safe_load(prepared.kubeconfig.read_text())["clusters"][0]["cluster"]
    (folder / "ca").write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
    return str(cluster["server"])


@pytest.fixture
def prometheus(prepared, routes, tmp_path) -> Iterator[Prometheus]:
    """With the three scrape jobs: the PodMonitor's, that of docs/alerts.md, and a generic one."""
    where = credentials(prepared, tmp_path), tmp_path
    here = {"namespaces": {"names": [prepared.namespace]}}
    configs = [
        of_pod_monitor(of_api_server(*where, **here), prepared.namespace, "1s"),
        of_page(of_api_server(*where, **here, selectors=page_selectors()), "1s"),
        {"job_name": "annotated", **of_api_server(*where, **here), "relabel_configs": ANNOTATED},
    ]
    every = {"scrape_interval": "1s"}
    server = Prometheus(tmp_path / "server", {"global": every, "scrape_configs": configs})
    yield server
    server.close()


def test_pods_are_found_scraped_lost_and_found_again(prepared, prometheus):
    """Both pods, by the PodMonitor's relabelling, the page's and a generic job's: rank 0's is up.

    It is deleted: the other pod has rank 0, and keeps it. The run's numbers are the log's.
    """
    job = Job(prepared, NAME)
    job.submit(*SMALL_PODS, "--", *TINY, f"--steps={STEPS}")

    def targets(pool: str) -> dict[str, dict]:
        """What is scraped by this scrape job, by address."""
        found = [it for it in prometheus.targets() if it["scrapePool"].startswith(pool)]
        return {it["scrapeUrl"]: it for it in found}

    def answers(pool: str) -> dict:
        """Its one target that is up."""
        found = [it for it in targets(pool).values() if it["health"] == "up"]
        return found[0] if len(found) == 1 else {}

    def step() -> float:
        found = prometheus.value(f'max(last_over_time(gptddp_step{{pytorchjob="{NAME}"}}[10m]))')
        return -1 if math.isnan(found) else found

    job.reach(5, 2, timeout_s=400)
    until(lambda: all(map(answers, ("podMonitor", "gptddp"))), "a scrape of both", 60)
    labels = dict.fromkeys(("pod", "instance"), f"{NAME}-worker-0")
    labels |= {"namespace": prepared.namespace, "container": "pytorch", "pytorchjob": NAME}
    about = {"job": f"{prepared.namespace}/gptddp", "endpoint": "metrics"}
    assert answers("podMonitor")["labels"] == {**labels, **about}
    assert answers("gptddp")["labels"] == {**labels, "job": "gptddp"}
    old = f"http://{job.pod(0)['status']['podIP']}:9464/metrics"
    wanted = {f"{NAME}-worker-{i}": "up" if i == 0 else "down" for i in range(2)}

    def health(pool: str) -> dict[str, str]:
        return {it["labels"]["pod"]: it["health"] for it in targets(pool).values()}

    for pool in ("podMonitor", "gptddp", "annotated"):
        until(lambda pool=pool: health(pool) == wanted, f"{wanted} of {pool}", 60)
    until(lambda: step() > 5, "a step", 60)

    prepared.kubectl("delete", "pod", f"{NAME}-worker-0", "--grace-period=0", "--force")
    for pool in ("podMonitor", "gptddp", "annotated"):
        until(lambda pool=pool: old not in targets(pool), f"{pool} without the lost pod", 60)
    until(lambda: all(map(answers, ("podMonitor", "gptddp"))), "the new rank 0", 300)
    labels |= dict.fromkeys(("pod", "instance"), f"{NAME}-worker-1")
    assert answers("podMonitor")["labels"] == {**labels, **about}

    until(lambda: step() == STEPS, "the last step", 600, poll_s=0.5)
    job.cli("wait", "--timeout=120")
    lives = prometheus.value('max(last_over_time(gptddp_incarnation{job="gptddp"}[30m]))')
    assert lives == max(job.lives()) > 1
    assert [it["step"] for it in job.lines()][-1] == STEPS
    until(lambda: not targets("podMonitor") and not targets("gptddp"), "no target is left", 120)
