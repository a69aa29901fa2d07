"""What `validate` says of a manifest, against the API server and kubectl themselves."""

import json

import pytest
from support import odd_jobs

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import connect
from gptddp.k8s.objects import worker_spec
from gptddp.k8s.render import documents

WORDS = """
{kind: PyTorchJob, apiVersion: kubeflow.org/v1, metadata: {name: words}, spec: {words: [
yes, no, on, off, y, n, True, FALSE, "yes", 0x10, 010, 0o17, 0b11, 1_000, 1e3, .5, 1., +5, -7, 08,
0X1F, 0O7, 1e1_0, 1_.5, -_6, 0x, 1.e538,
12:30, 2026-01-01, 2026-01-01T00:00:00Z, 1.2.3, ~, null, Null, -, 2x, 9007199254740993, 1.50
], on: 1, 2: 3, y: 4, t: &x {a: b}, u: {<<: *x, c: d}, quoted: '0x10'}}
"""


@pytest.fixture(scope="module")
def namespace(new_namespace):
    """One for all, as nothing is created in it."""
    made = new_namespace()
    yield made
    made.remove()


def test_the_server_refuses_and_takes_the_same_structure(namespace):
    """A strict dry run of every odd job ends as our walk through the CRD's types does."""
    server, wrong = connect(namespace.namespace, namespace.kubeconfig), []
    table = [(*row[:2], True) for row in odd_jobs.REFUSED]
    for path, value, refused in table + [(*row, False) for row in odd_jobs.ALLOWED]:
        try:
            server.create(odd_jobs.with_field(path, value), dry_run=True)
            said = ""
        except ClusterError as error:
            said = str(error)
        if bool(said) != refused:
            wrong.append((path, value, said or "taken"))
    assert wrong == []


def test_the_server_refuses_the_pods_of_jobs_that_we_refuse(namespace):
    """A dry run of the pod that a job's template makes, for every odd one, and takes the others."""
    restricted = "pod-security.kubernetes.io/enforce"  # which refuses every hostPath
    namespace.kubectl("label", "namespace", namespace.namespace, f"{restricted}-")
    server, wrong = connect(namespace.namespace, namespace.kubeconfig), []
    table = [(*row[:2], True) for row in odd_jobs.PODS_REFUSED]
    for path, value, refused in table + [(*row, False) for row in odd_jobs.PODS_ALLOWED]:
        template = worker_spec(odd_jobs.with_field(path, value))["template"]
        spec = {**template["spec"], "restartPolicy": "Never"}
        if not path.endswith("serviceAccountName"):
            spec["serviceAccountName"] = "default"
        for it in spec.get("initContainers") or []:
            it["securityContext"] = spec["containers"][0]["securityContext"]
        meta = {**template["metadata"], "name": "odd"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
        said = ""
        try:
            server.create(pod, dry_run=True)
        except ClusterError as error:
            said = str(error)
        if bool(said) != refused:
            wrong.append((path, value, said or "taken"))
    assert wrong == []


def test_plain_words_of_yaml_are_what_kubectl_makes_of_them(namespace):
    """Truth values, octal and dotted numbers, dates and merged keys are read alike."""
    dry = ["create", "--dry-run=client", "--validate=false", "-o", "json", "-f", "-"]
    theirs = json.loads(namespace.kubectl(*dry, stdin=WORDS).stdout)["spec"]
    (ours,) = documents.parse(WORDS, "words")
    assert json.loads(json.dumps(ours.value["spec"])) == theirs
