"""`doctor --probe`: two pods on two nodes try whether they share the volume of the runs."""

import json

import pytest
from support import api_objects as objects
from support.doctored import healthy

from gptddp.k8s.act import share_probe


@pytest.fixture
def server_in():
    """A cluster that lacks nothing."""
    return healthy


def ends(api, nodes, codes):
    """The Job of the probe has two pods on these nodes that end with these codes."""

    def run(job):
        name, good = job["metadata"]["name"], codes == (0, 0)
        job["status"] = {
            "conditions": [{"type": "Complete" if good else "Failed", "status": "True"}]
        }
        for index, (node, code) in enumerate(zip(nodes, codes, strict=True)):
            pod = objects.pod(index, objects.terminated(code), phase="Succeeded", node=node)
            pod["metadata"] |= {"name": f"{name}-{index}"}
            pod["metadata"]["labels"] = {"batch.kubernetes.io/job-name": name}
            api.put(pod)

    api.created["Job"] = run


@pytest.mark.parametrize(
    ("nodes", "codes", "status", "words"),
    [
        (("a", "b"), (0, 0), "ok", "pods on a and b share the claim runs"),
        (("a", "a"), (0, 0), "warn", "but both were on a"),
        (("a", "b"), (3, 3), "fail", "do not see each other's files"),
        (("a", "b"), (1, 1), "fail", "cannot write to the claim runs"),
    ],
)
def test_the_probe_says_whether_two_nodes_share_the_volume(api, nodes, codes, status, words):
    """As its two pods have ended; the Job is deleted."""
    ends(api, nodes, codes)
    done = api.command_line("doctor", "--probe", "-o", "json")
    (found,) = [it for it in json.loads(done.stdout) if it["id"] == "probe"]
    assert found["status"] == status and words in found["text"]
    assert api.writes == ["create Job", "delete Job"]
    assert not [kind for kind, _ in api.objects if kind == "jobs"]


def test_a_probe_that_does_not_start_says_why(api, monkeypatch):
    """The cause is in its line, and the Job goes."""
    monkeypatch.setattr(share_probe, "_LIMIT_S", 0.1)
    done = api.command_line("doctor", "--probe", "-o", "json")
    (found,) = [it for it in json.loads(done.stdout) if it["id"] == "probe"]
    assert found["status"] == "fail" and "is not done after" in found["text"] and found["fix"]
    assert api.writes[-1] == "delete Job" and done.exit_code == 1


def test_the_pods_of_the_probe_are_like_those_of_the_job(api):
    """Its image, its volume with its path, its placement; apart from each other if possible."""
    made: list = []
    flags = ["--image", "mine:1", "--toleration", "team:NoSchedule", "--node-selector", "zone=a"]
    ends(api, ("a", "b"), (0, 0))
    run = api.created["Job"]
    api.created["Job"] = lambda job: (made.append(json.loads(json.dumps(job))), run(job))
    api.command_line("doctor", "--probe", "--data", "runs/books", *flags)
    spec = made[0]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert container["image"] == "mine:1" and spec["nodeSelector"] == {"zone": "a"}
    assert "team" in [it.get("key") for it in spec["tolerations"]]
    claims = [it.get("persistentVolumeClaim", {}).get("claimName") for it in spec["volumes"]]
    assert claims == ["runs", None]
    assert {it["name"] for it in container["volumeMounts"]} == {
        it["name"] for it in spec["volumes"]
    }
    assert "podAntiAffinity" in spec["affinity"]
    counts = [made[0]["spec"][key] for key in ("completions", "parallelism", "backoffLimit")]
    assert counts == [2, 2, 0] and spec["restartPolicy"] == "Never"
