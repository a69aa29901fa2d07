"""Debian's Prometheus and promtool, and the files of k8s/components/monitoring for them."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.paths import ROOT

from gptddp.config import Config
from gptddp.training.metrics import Metrics

FOLDER = ROOT / "k8s/components/monitoring"
UNPACKED = ROOT / ".prometheus/usr/bin"  # by tests/prometheus/install


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; without it a test is skipped, in .ci/run it fails."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), str(UNPACKED)]))
    if not found:
        assert not os.environ.get("GPTDDP_CI"), f"no {name}: tests/prometheus/install gets it"
        pytest.skip(f"no {name}: tests/prometheus/install gets it")
    return found


def groups() -> list[dict[str, Any]]:
    """The groups of the PrometheusRule."""
    spec = yaml.safe_load((FOLDER / "rules.yaml").read_text())["spec"]
    return list(spec["groups"])


def rules() -> list[dict[str, Any]]:
    return [rule for group in groups() for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def write_rules(path: Path, of: list[dict[str, Any]] | None = None) -> Path:
    """A file of rules as Prometheus reads it; `of`: other groups than the PrometheusRule's."""
    path.write_text(yaml.safe_dump({"groups": of or groups()}, sort_keys=False, width=200))
    return path


def names(query: str) -> set[str]:
    """Our own metrics in a query."""
    return set(re.findall(r"(?<![\w:])(?:pytorchjob:)?gptddp_\w+(?::\w+)*", query))


def exported() -> set[str]:
    """The names of all series that rank 0 serves, and of those that the rules record."""
    families = Metrics(Config(), None, run_id="r").registry.collect()
    ends = {"counter": ["_total"], "info": ["_info"], "histogram": ["_bucket", "_count", "_sum"]}
    served = {f.name + end for f in families for end in ends.get(f.type, [""])}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    return served | recorded | {"gptddp_mfu_ratio"}  # served only if the peak is known


def dashboard() -> dict[str, Any]:
    return dict(json.loads((FOLDER / "dashboard.json").read_text()))


def queries(namespace: str, pytorchjob: str, rate: str = "1m") -> dict[str, str]:
    """The dashboard's queries by panel and target, and its annotations', with variables filled in.

    `rate`: the value of Grafana's $__rate_interval.
    """
    board = dashboard()
    found = {it["name"]: it["expr"] for it in board["annotations"]["list"]}
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            found[f"{panel['title']}, {target['refId']}"] = target["expr"]
    values = {"$namespace": namespace, "$pytorchjob": pytorchjob, "$__rate_interval": rate}
    for name, query in found.items():
        for variable, value in values.items():
            query = query.replace(variable, value)
        found[name] = query
    return found
