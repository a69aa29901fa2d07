"""The Grafana dashboard: its form, and that its queries ask for what there is."""

import json
import re
import subprocess
from itertools import combinations

import yaml
from support.prometheus import FOLDER, dashboard, exported, names, program, queries, write_rules

# Of others: Prometheus itself, kube-state-metrics, NVIDIA's exporter, the client's collectors.
OTHERS = {
    *("up", "ALERTS", "process_resident_memory_bytes"),
    *("kube_pod_container_status_restarts_total", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"),
}
SERIES = re.compile(r"\b([A-Za-z]\w*(?::\w+)*)\{")  # each has a selector


def test_every_query_is_valid(tmp_path):
    """As promtool parses it, with the variables filled in."""
    made = [
        {"record": f"q{i}", "expr": query} for i, query in enumerate(queries("n", "j").values())
    ]
    path = write_rules(tmp_path / "rules.yaml", [{"name": "queries", "rules": made}])
    done = subprocess.run([program("promtool"), "check", "rules", path], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_queries_ask_for_metrics_that_there_are():
    """Of rank 0, of the rules, or of the others that are named; each for one job."""
    for name, query in queries("the-namespace", "the-job").items():
        asked = set(SERIES.findall(query))
        assert asked and names(query) <= asked <= exported() | OTHERS, name
        for selector in re.findall(r"\{(.*?)\}", query):
            assert 'namespace="the-namespace"' in selector and "the-job" in selector, name
        assert "$" not in query


def test_every_panel_says_what_it_shows():
    """A title of its own, a unit, the data source that is chosen, and a place that no other has."""
    board = dashboard()
    panels = board["panels"]
    assert [it["name"] for it in board["templating"]["list"]] == [
        "datasource",
        "namespace",
        "pytorchjob",
    ]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            instant = [target.get("instant", False) for target in panel["targets"]]
            assert set(instant) == {panel["type"] == "stat"}  # one value: not of all the hours
    for a, b in combinations([panel["gridPos"] for panel in panels], 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


def test_the_component_makes_a_config_map_that_grafana_takes():
    """With the label of its sidecar, under a name that stays; and all files there are."""
    made = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (config_map,) = made["configMapGenerator"]
    assert config_map["options"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["options"]["disableNameSuffixHash"] is True
    files = [it.rpartition("=")[2] for it in config_map["files"]]
    there = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert {*made["resources"], *files} == there
    for name in files:
        json.loads((FOLDER / name).read_text())
