"""`list`: its formats, and -w."""

import json
import threading
import time

import pytest
import yaml
from click.testing import CliRunner
from support import api_objects as objects
from support.api_server import FakeAPI

from gptddp.k8s.cli.main import cli
from gptddp.k8s.cluster import connect
from gptddp.k8s.observe import listing

AT = "2026-11-21T09:00:00Z"


@pytest.fixture
def api(tmp_path):
    server = FakeAPI(tmp_path)
    server.put(queued(objects.job("Created", "Running")), objects.pod(0), objects.pod(1))
    yield server
    server.close()


def queued(job):
    """With the image of its pods, and a queue."""
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["template"] = {"spec": {"containers": [{"name": "pytorch", "image": "gptddp:0.1.0"}]}}
    return job


def list_(api, *args):
    return CliRunner().invoke(cli, ["list", "--kubeconfig", str(api.kubeconfig), *args])


def test_wide_has_nodes_queue_and_image(api):
    """After the columns that are always there."""
    header, row = list_(api, "-o", "wide").stdout.splitlines()
    assert header.split() == ["NAME", "STATE", "PODS", "AGE", "NODES", "QUEUE", "IMAGE"]
    assert row.split()[:3] == ["demo", "Running", "2/4"]
    assert row.split()[4:] == ["gptddp-worker", "team", "gptddp:0.1.0"]


def test_json_and_yaml_have_the_same(api):
    """A list of jobs, also of none."""
    found = json.loads(list_(api, "-o", "json").stdout)
    assert found == yaml.safe_load(list_(api, "-o", "yaml").stdout)
    assert found[0]["nodes"] == ["gptddp-worker"] and found[0]["ready"] == 2
    api.objects.clear()
    assert json.loads(list_(api, "-o", "json").stdout) == []
    assert list_(api, "-o", "name").stdout == ""


def test_all_namespaces_have_a_column(api):
    """Which stands first."""
    lines = list_(api, "-A", "-o", "wide").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NAMESPACE", "default"]


def test_watching_gives_all_then_what_changes(api, monkeypatch):
    """A pod that becomes ready, a state, a job that goes; nothing for a job that only ages."""
    monkeypatch.setattr(listing, "_POLL_S", 0.01)
    said = []
    seen = listing.watch(connect(kubeconfig=api.kubeconfig), said.append)
    assert [row["state"] for row in next(seen)] == ["Running"]
    monkeypatch.setattr(time, "time", lambda real=time.time: real() + 60)
    threading.Timer(0.1, api.put, [objects.pod(2)]).start()
    assert [row["ready"] for row in next(seen)] == [3]
    api.down = True
    threading.Timer(0.1, setattr, [api, "down", False]).start()
    threading.Timer(0.2, api.put, [queued(objects.job("Created", "Succeeded"))]).start()
    assert [row["state"] for row in next(seen)] == ["Succeeded"]
    assert len(said) == 2 and "trying on" in said[0] and "answers again" in said[1]
    api.remove("PyTorchJob", "demo")
    assert [(row["name"], row["state"]) for row in next(seen)] == [("demo", "Gone")]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (None, ["NAME   STATE     PODS   AGE", "demo   Running   2/4", "demo   Gone      0/4"]),
        ("name", 2 * ["pytorchjob.kubeflow.org/demo"]),
        ("json", ['{"namespace": "default"', '{"namespace": "default"']),
        ("yaml", ["---", "namespace: default"]),
    ],
)
def test_a_watch_prints_line_by_line(api, monkeypatch, output, lines):
    """The header once, in columns that stay; for programs an object a line, or a document."""
    first, gone = listing.rows(connect(kubeconfig=api.kubeconfig))[0], {"state": "Gone", "ready": 0}
    monkeypatch.setattr(listing, "watch", lambda *_: iter([[first], [first | gone]]))
    shown = list_(api, "-w", *(["-o", output] if output else [])).stdout.splitlines()
    assert len(shown) >= len(lines)
    assert all(line.startswith(start) for line, start in zip(shown, lines, strict=False))


def test_a_watch_of_nothing_says_so(api, monkeypatch):
    """Somebody who waits for a first job is told that there is none yet."""
    monkeypatch.setattr(listing, "watch", lambda *_: iter([[]]))
    done = list_(api, "-w")
    assert "no jobs of gptddp in namespace default yet" in done.stderr and not done.stdout


def test_status_has_the_formats_too(api):
    """wide adds the pods' addresses, name is the job's, yaml and json say the same."""
    run = lambda output: CliRunner().invoke(  # noqa: E731
        cli, ["status", "--kubeconfig", str(api.kubeconfig), "demo", "-o", output]
    )
    api.objects["pods", "demo-worker-0"]["status"]["podIP"] = "10.2.3.4"
    assert run("name").stdout == "pytorchjob.kubeflow.org/demo\n"
    assert "10.2.3.4" in run("wide").stdout
    told, again = yaml.safe_load(run("yaml").stdout), json.loads(run("json").stdout)
    assert told | {"age_s": 0, "pods": 0} == again | {"age_s": 0, "pods": 0}
