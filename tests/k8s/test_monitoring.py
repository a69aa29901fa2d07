"""The component k8s/components/monitoring: rules, the PodMonitor, and the page about them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.manifests import container, render_job, worker
from support.paths import ROOT
from support.prometheus import FOLDER, alerts, exported, names, program, queries, rules, write_rules

from gptddp.k8s.render.companions import JOB_NAME

HERE = Path(__file__).parent
CASES = sorted((HERE / "alerts").glob("*.yaml"))
PAGE = (ROOT / "docs/alerts.md").read_text()
ROLE = "training.kubeflow.org/job-role"  # label that the operator gives worker 0, as `master`


def run(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid(tmp_path):
    """By promtool's own check."""
    run(program("promtool"), "check", "rules", write_rules(tmp_path / "rules.yaml"), cwd=tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_rules_say_what_is_so(tmp_path, case):
    """Each alert fires where it has to, and not for what the project is for: promtool runs them."""
    promtool = program("promtool")
    write_rules(tmp_path / "rules.yaml")
    shutil.copy(case, tmp_path)
    run(promtool, "test", "rules", case.name, cwd=tmp_path)


def test_every_alert_is_seen_to_fire_and_not_to_fire():
    """In the files of those tests."""
    found = [
        (it["alertname"], bool(it.get("exp_alerts")))
        for path in CASES
        for test in yaml.safe_load(path.read_text())["tests"]
        for it in test.get("alert_rule_test", [])
    ]
    assert {name for name, fires in found if fires} == set(alerts())
    assert {name for name, fires in found if not fires} == set(alerts())


def test_every_alert_has_its_heading_and_every_heading_its_alert():
    """The annotation `runbook` leads there, and the severity stands first."""
    text = PAGE.split("\n## Alerts\n")[1]
    found = dict(re.findall(r"^### (\w+)\n\n(\w+)\. ", text, re.M))
    assert found == {name: it["labels"]["severity"].title() for name, it in alerts().items()}
    assert re.findall(r"^### (.*)$", text, re.M) == list(alerts())  # in the order of the rules
    for name, alert in alerts().items():
        assert set(alert["annotations"]) == {"summary", "description", "runbook"}
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"


def test_every_recording_rule_is_on_the_page_and_asked_for():
    """A rule that nobody reads costs every Prometheus."""
    recorded = [rule["record"] for rule in rules() if "record" in rule]
    asked = "".join([*queries("n", "j").values(), *(it["expr"] for it in alerts().values())])
    for name in recorded:
        assert name in PAGE and name in asked, name


def test_rules_ask_for_metrics_that_there_are():
    """A name that nobody exports would never fire."""
    assert {name for rule in rules() for name in names(rule["expr"])} <= exported()


def test_every_series_of_a_rule_has_its_job():
    """Each aggregation is by namespace and job, and takes no series without one."""
    for rule in rules():
        of_rank_0 = re.sub(r"pytorchjob:\S+", "", rule["expr"])
        for name, selector in re.findall(r"\b(gptddp_\w+)(\{[^}]*\})?", of_rank_0):
            right_side = f"unless on (namespace, pytorchjob) {name}" in rule["expr"]
            assert 'pytorchjob!=""' in selector or right_side, (rule, name)


def test_the_pod_monitor_finds_worker_0_of_a_job():
    """Its labels and the port are those of the rendered pods and of the operator."""
    spec = yaml.safe_load((FOLDER / "podmonitor.yaml").read_text())["spec"]
    labels = worker(render_job())["template"]["metadata"]["labels"] | {ROLE: "master"}
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    endpoint = spec["podMetricsEndpoints"][0]
    assert endpoint["port"] in {port["name"] for port in container(render_job())["ports"]}
    assert endpoint["filterRunning"] is True
    job, instance = endpoint["relabelings"]
    assert job["sourceLabels"] == [f"__meta_kubernetes_pod_label_{re.sub('[./-]', '_', JOB_NAME)}"]
    assert (job["targetLabel"], instance["targetLabel"]) == ("pytorchjob", "instance")


@pytest.mark.parametrize("args", [[], ["--metrics-port", "9100"]])
def test_annotations_name_the_port_that_is_served(args):
    """For a Prometheus that goes by them; the same as the port of the PodMonitor."""
    job = render_job(args=args)
    found = worker(job)["template"]["metadata"]["annotations"]
    ports = {port["name"]: str(port["containerPort"]) for port in container(job)["ports"]}
    assert found == {"prometheus.io/scrape": "true", "prometheus.io/port": ports["metrics"]}
    assert f"--metrics-port {ports['metrics']}" in " ".join(container(job)["args"])
