"""A Prometheus on a loopback port, and pods for it to discover as it does on a cluster."""

import contextlib
import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from support.paths import ROOT
from support.processes import free_port
from support.prometheus import FOLDER, program

from gptddp.files import write_atomic

Series = dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]  # (unix seconds, value)


def of_file(targets: Path) -> dict[str, Any]:
    """Discovery by the file of `write_pods`, in place of `kubernetes_sd_configs`."""
    return {"file_sd_configs": [{"files": [str(targets)]}]}


def of_api_server(server: str, folder: Path, **rest: Any) -> dict[str, Any]:
    """Discovery of pods by the API server, with the token and the certificate of this folder."""
    about = {"credentials_file": str(folder / "token")}
    tls = {"ca_file": str(folder / "ca")}
    config = {"role": "pod", "api_server": server, "authorization": about, "tls_config": tls}
    return {"kubernetes_sd_configs": [{**config, **rest}]}


def of_pod_monitor(discovery: dict[str, Any], namespace: str, interval: str) -> dict[str, Any]:
    """The scrape_config that the Prometheus operator makes of our PodMonitor, except `discovery`.

    The operator's has a `kubernetes_sd_configs` with `role: pod` in the namespace.
    """
    monitor = yaml.safe_load((FOLDER / "podmonitor.yaml").read_text())
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    relabel: list[dict[str, Any]] = [
        {
            "source_labels": [f"__meta_kubernetes_pod_{it}_{_meta(key)}" for it in _LABEL],
            "regex": f"({re.escape(value)});true",
            "action": "keep",
        }
        for key, value in monitor["spec"]["selector"]["matchLabels"].items()
    ]
    relabel += [
        _of("pod_container_port_name", regex=endpoint["port"], action="keep"),
        _of("namespace", target_label="namespace"),
        _of("pod_container_name", target_label="container"),
        _of("pod_name", target_label="pod"),
        {"target_label": "job", "replacement": f"{namespace}/{monitor['metadata']['name']}"},
        {"target_label": "endpoint", "replacement": endpoint["port"]},
    ]
    if endpoint.get("filterRunning", True):
        relabel.insert(0, _of("pod_phase", regex="(Failed|Succeeded)", action="drop"))
    for it in endpoint["relabelings"]:
        relabel.append({_snake(key): value for key, value in it.items()})
    return {
        "job_name": f"podMonitor/{namespace}/gptddp/0",
        "scrape_interval": interval,
        "sample_limit": endpoint["sampleLimit"],
        **discovery,
        "relabel_configs": relabel,
    }


_LABEL = ("label", "labelpresent")


def of_page(discovery: dict[str, Any], interval: str) -> dict[str, Any]:
    """The scrape_config of docs/alerts.md, for a Prometheus without its operator."""
    config = _of_page()
    del config["kubernetes_sd_configs"]
    return {**config, "scrape_interval": interval, **discovery}


def page_selectors() -> list[dict[str, str]]:
    """The selectors by which the API server chooses the pods of the page's scrape_config."""
    (discovery,) = _of_page()["kubernetes_sd_configs"]
    return list(discovery["selectors"])


def _of_page() -> dict[str, Any]:
    page = (ROOT / "docs/alerts.md").read_text()
    (block,) = re.findall(r"^```yaml\n(scrape_configs:\n.*?)^```", page, re.M | re.S)
    (config,) = yaml.safe_load(block)["scrape_configs"]
    return dict(config)


def _of(meta: str, **rest: str) -> dict[str, Any]:
    return {"source_labels": [f"__meta_kubernetes_{meta}"], **rest}


def _meta(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", key)


def _snake(key: str) -> str:
    return re.sub(r"[A-Z]", lambda found: "_" + found[0].lower(), key)


def discovered(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Targets and labels as Prometheus discovers pods (`role: pod`), for `file_sd_configs`.

    Debian's Prometheus cannot discover on Kubernetes; relabelling and scraping are real.
    """
    found = []
    for pod in pods:
        about, status = pod["metadata"], pod["status"]
        labels = {
            "namespace": about["namespace"],
            "pod_name": about["name"],
            "pod_ip": status.get("podIP", ""),
            "pod_phase": status["phase"],
            "pod_node_name": pod["spec"].get("nodeName", ""),
        }
        for kind in ("label", "annotation"):
            for key, value in (about.get(f"{kind}s") or {}).items():
                labels |= {f"pod_{kind}_{_meta(key)}": value}
                labels |= {f"pod_{kind}present_{_meta(key)}": "true"}
        for container in pod["spec"]["containers"] if status.get("podIP") else []:
            labels["pod_container_name"] = container["name"]
            for port in container.get("ports", []):
                labels["pod_container_port_name"] = port["name"]
                address = f"{status['podIP']}:{port['containerPort']}"
                named = {f"__meta_kubernetes_{key}": value for key, value in labels.items()}
                found.append({"targets": [address], "labels": named})
    return found


def write_pods(path: Path, pods: list[dict[str, Any]]) -> None:
    """Have a running Prometheus discover these pods, and no others."""
    write_atomic(path, json.dumps(discovered(pods)).encode())


class Prometheus:
    """The server, with a configuration; its data are in a folder of the test."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        folder.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        self.log = folder / "log"
        command = [
            program("prometheus"),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.address}",
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise AssertionError(self.log.read_text())
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError):  # no connection, or 503
            urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5).close()
            return True
        return False

    def get(self, what: str, **query: Any) -> Any:
        """The data of an answer of its API; AssertionError with the text of an error."""
        url = f"http://{self.address}/api/v1/{what}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from None

    def ask(self, query: str, at: float | None = None) -> Series:
        """A query at one time: a value, or a range of them, of each series."""
        found = self.get("query", query=query, **({} if at is None else {"time": at}))
        return _series(found["result"])

    def over(self, query: str, start: float, end: float, step: float) -> Series:
        """A query over a range of time, as a panel asks it."""
        found = self.get("query_range", query=query, start=start, end=end, step=step)
        return _series(found["result"])

    def value(self, query: str, at: float | None = None) -> float:
        """The value of the one series that a query gives; NaN if it gives none."""
        found = self.ask(query, at)
        assert len(found) < 2, found
        return next((samples[-1][1] for samples in found.values()), math.nan)

    def targets(self) -> list[dict[str, Any]]:
        return list(self.get("targets", state="active")["activeTargets"])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def _series(result: list[dict[str, Any]]) -> Series:
    return {
        tuple(sorted(it["metric"].items())): [
            (float(at), float(value)) for at, value in it.get("values") or [it["value"]]
        ]
        for it in result
    }
