"""k8s/components/monitoring: rules, PodMonitor, dashboard, and their page."""

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from support.manifests import container, render_job, worker
from support.paths import ROOT
from support.prometheus import (
    FOLDER,
    alerts,
    dashboard,
    exported,
    names,
    program,
    queries,
    rules,
    write_rules,
)

from gptddp.k8s.render.companions import JOB_NAME

CASES = sorted(Path(__file__).with_name("alerts").glob("*.yaml"))
PAGE = (ROOT / "docs/alerts.md").read_text()
# Metrics of others: Prometheus, kube-state-metrics, NVIDIA's exporter, the client's collectors.
OTHERS = {
    *("up", "ALERTS", "process_resident_memory_bytes"),
    *("kube_pod_container_status_restarts_total", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"),
}


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_and_queries_are_valid(tmp_path):
    """promtool parses the rules, and the dashboard's queries with their variables filled in."""
    asked = [
        {"record": f"q{i}", "expr": query} for i, query in enumerate(queries("n", "j").values())
    ]
    for groups in (None, [{"name": "queries", "rules": asked}]):
        path = write_rules(tmp_path / "rules.yaml", groups)
        run(program("promtool"), "check", "rules", path, cwd=tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should(tmp_path, case):
    """promtool runs the tests: each alert fires for its problem, and not for normal events."""
    promtool = program("promtool")
    write_rules(tmp_path / "rules.yaml")
    shutil.copy(case, tmp_path)
    run(promtool, "test", "rules", case.name, cwd=tmp_path)


def test_every_alert_is_tested_both_ways():
    """The test files have a case where each alert fires, and one where it does not."""
    found = [
        (it["alertname"], bool(it.get("exp_alerts")))
        for path in CASES
        for test in yaml.safe_load(path.read_text())["tests"]
        for it in test.get("alert_rule_test", [])
    ]
    assert set(found) == {(name, fires) for name in alerts() for fires in (True, False)}


def test_every_alert_has_its_heading_and_every_heading_its_alert():
    """The annotation `runbook` links to the heading; its text begins with the severity."""
    text = PAGE.split("\n## Alerts\n")[1]
    found = dict(re.findall(r"^### (\w+)\n\n(\w+)\. ", text, re.M))
    assert found == {name: it["labels"]["severity"].title() for name, it in alerts().items()}
    assert re.findall(r"^### (.*)$", text, re.M) == list(alerts())  # in the order of the rules
    for name, alert in alerts().items():
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"


def test_every_recording_rule_is_on_the_page_and_used():
    """An unused rule would cost every Prometheus time and memory."""
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    asked = "".join([*queries("n", "j").values(), *(it["expr"] for it in alerts().values())])
    for name in recorded:
        assert name in PAGE and name in asked, name


def test_rules_and_queries_use_existing_metrics():
    """With a metric that nothing exports, a rule would never fire, and a panel would be empty."""
    assert {name for rule in rules() for name in names(rule["expr"])} <= exported()
    for name, query in queries("the-namespace", "the-job").items():
        asked = set(re.findall(r"\b([A-Za-z]\w*(?::\w+)*)\{", query))  # each has a selector
        assert asked and names(query) <= asked <= exported() | OTHERS, name


def test_every_series_has_its_job():
    """A rule aggregates by namespace and job, and ignores series without a job; a query of the
    dashboard selects the chosen job."""
    for rule in rules():
        of_rank_0 = re.sub(r"pytorchjob:\S+", "", rule["expr"])
        for name, selector in re.findall(r"\b(gptddp_\w+)(\{[^}]*\})?", of_rank_0):
            right_side = f"unless on (namespace, pytorchjob) {name}" in rule["expr"]
            assert 'pytorchjob!=""' in selector or right_side, (rule, name)
    for name, query in queries("the-namespace", "the-job").items():
        for selector in re.findall(r"\{(.*?)\}", query):
            assert 'namespace="the-namespace"' in selector and "the-job" in selector, name
        assert "$" not in query


def check_thresholds(thresholds):
    values = [step["value"] for step in thresholds["steps"]]
    assert thresholds["mode"] == "absolute" and all(step["color"] for step in thresholds["steps"])
    assert values[0] is None and values[1:] == sorted(values[1:])


def test_every_panel_has_a_unit_a_description_and_thresholds():
    """A panel has its own title and place, and the chosen data source; one to three sentences on
    what it shows, what is good and what to do; rising thresholds that begin with a colour for all
    values."""
    board = dashboard()
    panels = board["panels"]
    variables = [it["name"] for it in board["templating"]["list"]]
    assert variables == ["datasource", "namespace", "pytorchjob"]
    assert all(it["label"] for it in board["templating"]["list"])
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            instant = [target.get("instant", False) for target in panel["targets"]]
            assert set(instant) == {panel["type"] == "table"}  # one value, not one per hour
            assert 1 <= len(re.findall(r"[.](?: |$)", panel["description"])) <= 3
            assert panel["description"].endswith(".")
            defaults = panel["fieldConfig"]["defaults"]
            check_thresholds(defaults["thresholds"])
            judged = len(defaults["thresholds"]["steps"]) > 1
            assert judged is ("thresholdsStyle" in defaults.get("custom", {}))  # a line shows them
    for a, b in combinations([panel["gridPos"] for panel in panels], 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert beside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]


def test_several_jobs_are_shown_beside_each_other():
    """All jobs are chosen at first. A series is named by its job or its pod, except in the table,
    which has a column for it, and in the row that is repeated for each job."""
    board = dashboard()
    (job,) = (it for it in board["templating"]["list"] if it["name"] == "pytorchjob")
    assert job["multi"] and job["includeAll"] and job["current"]["value"] == ["$__all"]
    of_one = False
    for panel in board["panels"]:
        of_one = panel.get("repeat") == "pytorchjob" if panel["type"] == "row" else of_one
        for target in panel.get("targets", []):
            legend, query = target.get("legendFormat", ""), target["expr"]
            named = "{{pytorchjob}}" in legend or legend == "{{pod}}"
            assert named is not (of_one or panel["type"] == "table"), panel["title"]
            assert "pytorchjob=" not in query.replace('pytorchjob=~"$pytorchjob"', "")
    assert of_one  # the last row


def test_the_table_of_jobs_has_a_name_for_each_of_its_queries():
    """One row per job: hidden columns are excluded, and coloured columns have thresholds."""
    (panel,) = (it for it in dashboard()["panels"] if it["type"] == "table")
    join, organize = panel["transformations"]
    assert join == {"id": "joinByField", "options": {"byField": "pytorchjob", "mode": "outer"}}
    names = organize["options"]["renameByName"]
    values = {f"Value #{target['refId']}" for target in panel["targets"]}
    left_out = {f"Time {i + 1}" for i in range(len(values))} | {"Value #A"}
    assert organize["options"]["excludeByName"].keys() == left_out
    assert names.keys() == organize["options"]["indexByName"].keys()
    assert names.keys() == values - left_out | {"pytorchjob", "gptddp_state"}
    for override in panel["fieldConfig"]["overrides"]:
        assert override["matcher"]["options"] in names.values()
        for it in override["properties"]:
            if it["id"] == "thresholds":
                check_thresholds(it["value"])


def test_the_component_makes_a_config_map_for_grafana():
    """The ConfigMap has the label for Grafana's sidecar, a fixed name, and all files."""
    made = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (config_map,) = made["configMapGenerator"]
    assert config_map["options"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["options"]["disableNameSuffixHash"] is True
    files = [it.rpartition("=")[2] for it in config_map["files"]]
    there = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert {*made["resources"], *files} == there


@pytest.mark.parametrize("args", [[], ["--metrics-port", "9100"]])
def test_the_pod_monitor_finds_the_pods_of_a_job(args):
    """Its labels and port are those of the rendered pods and of the operator; the annotations name
    the same port, for a Prometheus that uses them."""
    job = render_job(args=args)
    spec = yaml.safe_load((FOLDER / "podmonitor.yaml").read_text())["spec"]
    about = worker(job)["template"]["metadata"]
    assert spec["selector"]["matchLabels"].items() <= about["labels"].items()
    endpoint = spec["podMetricsEndpoints"][0]
    ports = {port["name"]: str(port["containerPort"]) for port in container(job)["ports"]}
    port = ports[endpoint["port"]]
    assert about["annotations"] == {"prometheus.io/scrape": "true", "prometheus.io/port": port}
    assert f"--metrics-port {port}" in " ".join(container(job)["args"])
    assert endpoint["filterRunning"] is True
    of_job, instance = endpoint["relabelings"]
    assert of_job["sourceLabels"] == [
        f"__meta_kubernetes_pod_label_{re.sub('[./-]', '_', JOB_NAME)}"
    ]
    assert (of_job["targetLabel"], instance["targetLabel"]) == ("pytorchjob", "instance")
