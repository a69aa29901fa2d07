"""`submit --dry-run` prints the effect of a submit, and changes nothing."""

import re

from support.manifests import container, worker
from support.writable_api_server import job, submit

RENDERED = ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"]


def dry(k8s, *args):
    """Run it; returns the exit code, and the printed effect and differing fields of each kind."""
    result, found = submit(k8s, "--dry-run", *args), {}
    for block in re.split(r"\n(?! )", result.stdout.strip()):
        head, *fields = block.splitlines() or [" "]
        found[re.split("[./]", head)[0]] = head.partition(" ")[2], [it.strip() for it in fields]
    return result.exit_code, found, result.stderr


def test_a_dry_run_lists_the_objects_that_would_be_created(api, k8s):
    """It lists all objects that a submit creates, and tries a pod; the server stores none."""
    code, found, _ = dry(k8s)
    assert code == 0 and api.writes == [] and api.all() == []
    assert found == {
        kind.lower(): ("would be created", []) for kind in [*RENDERED, "Secret", "PyTorchJob"]
    }
    assert {it["kind"] for it in api.dry_runs} == {*RENDERED, "Pod", "PyTorchJob"}


def test_a_dry_run_lists_differing_fields(api, k8s):
    """Fields that the server or others have added do not count."""
    submit(k8s)
    made = worker(job(api))
    made["template"]["metadata"]["creationTimestamp"] = None
    made["template"]["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"
    job(api)["spec"]["runPolicy"]["suspend"] = True
    job(api)["metadata"]["labels"]["audited"] = "yes"
    api.objects["serviceaccounts", "demo"]["secrets"] = [{"name": "token"}]
    code, found, _ = dry(k8s)
    assert code == 0 and {what for what, _ in found.values()} == {"is the same"}
    api.objects["poddisruptionbudgets", "demo"]["spec"]["maxUnavailable"] = 3
    api.objects["networkpolicies", "demo"]["spec"]["ingress"].append({})
    api.remove("ServiceAccount", "demo")
    made["replicas"] = 2
    before = list(api.writes)
    code, found, _ = dry(k8s)
    assert code == 0 and api.writes == before
    assert found == {
        "serviceaccount": ("would be created", []),
        "networkpolicy": ("differs", ["spec.ingress[2]: {} -> (none)"]),
        "poddisruptionbudget": ("differs", ["spec.maxUnavailable: 3 -> 1"]),
        "pytorchjob": ("differs", ["spec.pytorchReplicaSpecs.Worker.replicas: 2 -> 4"]),
    }


def test_a_dry_run_reports_a_refusal_or_a_replacement(api, k8s):
    """A refusal has exit code 2, the fields and the way out; with --replace, the job is
    replaced."""
    submit(k8s)
    ports = container(job(api))["ports"]
    ports[0]["protocol"], ports[1]["protocol"] = "TCP", "UDP"  # by the server; by somebody
    code, found, told = dry(k8s, "--cpu", "2")
    what, fields = found["pytorchjob"]
    assert code == 2 and what == "differs"
    assert [it.rpartition(".")[2] for it in fields] == [
        *("cpu: 1 -> 2", "cpu: 1 -> 2", "protocol: UDP -> (none)")
    ]
    assert "gptddp-k8s delete demo" in told and "this was a dry run" in told
    job(api)["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    code, found, _ = dry(k8s, "--cpu", "2", "--replace")
    assert code == 0 and found["pytorchjob"] == ("would be replaced", fields)
    api.remove("PersistentVolumeClaim", "runs")
    code, _, told = dry(k8s, "--cpu", "2", "--replace")
    assert code == 2 and "no claim runs (--runs)" in told
