"""Our rules against the operator's webhook and the API server: who refuses what."""

import copy
from functools import reduce
from typing import Any

import pytest

from gptddp.k8s.render import admission, manifest, spec

WORKER = ("spec", "pytorchReplicaSpecs", "Worker")
CONTAINER = (*WORKER, "template", "spec", "containers", 0)
REMOVED = object()
DRY_RUN = ["create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-"]
# Where, the value, who refuses it, and why the server does not where it lets it pass.
BOTH, OURS = "both", "ours"
TABLE = [
    (("metadata", "name"), "1-digit-first", BOTH, ""),
    (("metadata", "name"), "Upper", BOTH, ""),
    (("metadata", "name"), "n" * 55, OURS, "it creates pods, then fails on their services"),
    ((*WORKER, "replicas"), 0, BOTH, ""),
    ((*WORKER, "replicas"), "four", BOTH, ""),
    ((*WORKER, "replicas"), 9, OURS, "it does not compare replicas with maxReplicas"),
    (("spec", "elasticPolicy", "minReplicas"), 5, OURS, "torchrun alone would notice min > max"),
    (("spec", "elasticPolicy", "minReplicas"), 0, OURS, "torchrun alone would notice"),
    (("spec", "elasticPolicy", "nProcPerNode"), 1, BOTH, ""),
    (("spec", "elasticPolicy", "rdzvConf"), [], OURS, "the controller panics instead"),
    (("spec", "elasticPolicy", "standalone"), True, OURS, "torchrun cannot read what it sets"),
    (("spec", "elasticPolicy", "rdzvBackend"), "zk", OURS, "free text in the API"),
    (("spec", "elasticPolicy", "maxRestarts"), -1, OURS, "it checks no sign"),
    (("spec", "elasticPolicy"), REMOVED, OURS, "the pods of such a job get no rendezvous"),
    (("spec", "nprocPerNode"), 1, BOTH, ""),
    (("spec", "nprocPerNode"), "0", OURS, "free text in the API"),
    (("spec", "runPolicy", "cleanPodPolicy"), "Some", OURS, "any word acts like All"),
    (("spec", "runPolicy", "managedBy"), "nobody", BOTH, ""),
    ((*WORKER, "restartPolicy"), "Sometimes", OURS, "free text in the API"),
    (("spec", "pytorchReplicaSpecs", "Chief"), {"replicas": 1}, BOTH, ""),
    ((*CONTAINER, "name"), "trainer", BOTH, ""),
    ((*CONTAINER, "image"), "", BOTH, ""),
    ((*CONTAINER, "ports", 0, "name"), REMOVED, OURS, "the Service is refused, and retried"),
    ((*WORKER, "template", "spec", "containers"), [], BOTH, ""),
]


@pytest.fixture(scope="module")
def namespace(new_namespace):
    """One for all, as nothing is created in it."""
    made = new_namespace()
    yield made
    made.remove()


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A rendered job of four pods with one field changed or removed."""
    objects = manifest.objects(spec.load(None, {"replicas": 4, "name": "rule"}, []))
    job = copy.deepcopy(next(o for o in objects if o["kind"] == "PyTorchJob"))
    parent = reduce(lambda node, key: node[key], path[:-1], job)
    if value is REMOVED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = copy.deepcopy(value)
    return job


def server_refuses(namespace: Any, job: dict[str, Any]) -> str:
    """The server's words on a dry run, webhook included; empty where it accepts."""
    done = namespace.kubectl(*DRY_RUN, stdin=job, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize(("path", "value", "who", "why"), TABLE)
def test_what_the_server_refuses_we_refuse_first(namespace, path, value, who, why):
    """Both refuse, or we alone for the reason in the table: never the server alone."""
    job = changed(path, value)
    assert admission.check_job(job), "we let it pass"
    words = server_refuses(namespace, job)
    assert bool(words) == (who == BOTH), words or "the server accepts it"
    assert (why == "") == (who == BOTH)


def test_what_we_render_the_server_accepts(namespace):
    """Every object of a rendered job, companions included, on a dry run."""
    for flags in ({"replicas": 4}, {"replicas": 2, "gpus": 8, "name": "gpu"}):
        for body in manifest.objects(spec.load(None, flags, [])):
            assert body["metadata"]["name"] in namespace.kubectl(*DRY_RUN, stdin=body).stdout
