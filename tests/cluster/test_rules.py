"""Our rules, and what they leave to the server: who refuses what."""

from typing import Any

import pytest
from support.manifests import built, render

from gptddp.k8s.render import manifest, rules

DRY_RUN = ["create", "--dry-run=server", "--validate=strict", "-o", "name", "-f", "-"]


def in_worker(**fields: Any) -> dict[str, Any]:
    return {"spec": {"pytorchReplicaSpecs": {"Worker": fields}}}


def in_pod(**fields: Any) -> dict[str, Any]:
    return in_worker(template={"spec": fields})


def in_container(**fields: Any) -> dict[str, Any]:
    return in_pod(containers=[{"name": "pytorch", **fields}])


def elastic(**fields: Any) -> dict[str, Any]:
    return {"spec": {"elasticPolicy": fields}}


READ_ONLY = {"name": "runs", "persistentVolumeClaim": {"readOnly": True}}
PORTS = {"name": "side", "image": "x:1", "ports": [{"containerPort": 80}]}  # one without a name
TWICE = {"name": "more", "persistentVolumeClaim": {"claimName": "data"}}
# Flags, a patch, and why the server lets pass what we refuse.
OURS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"name": "n" * 55}, {}, "it creates pods, then fails on their services"),
    ({"max": 3}, {}, "it does not compare replicas with maxReplicas"),
    ({"min": 5}, {}, "torchrun alone would notice min > max"),
    ({"min": 0}, {}, "torchrun alone would notice"),
    ({"nproc_per_node": 0}, {}, "free text in the API"),
    ({}, elastic(rdzvConf=[]), "the controller panics instead"),
    ({}, elastic(standalone=True), "torchrun cannot read what it sets"),
    ({}, elastic(rdzvBackend="zk"), "free text in the API"),
    ({}, {"spec": {"runPolicy": {"cleanPodPolicy": "Some"}}}, "any word acts like All"),
    ({}, in_worker(restartPolicy="Sometimes"), "free text in the API"),
    ({}, in_pod(containers=[PORTS]), "the Service is refused, and retried"),
    ({}, in_container(resources={"limits": {"memory": "256Mi"}}), "the kernel kills it"),
    ({}, in_container(env=[{"name": "RANK", "value": "1"}]), "the operator overrides it"),
    ({}, in_pod(volumes=[TWICE]), "the kubelet waits for ever"),
    ({}, in_pod(volumes=[READ_ONLY]), "the trainer cannot write its run"),
    ({}, in_pod(terminationGracePeriodSeconds=5), "a checkpoint takes longer"),
]
# A patch that no rule of ours speaks of, and words of the server about the job or its pod.
THEIRS: list[tuple[dict[str, Any], str]] = [
    (in_worker(replica=4), 'unknown field "spec.pytorchReplicaSpecs.Worker.replica"'),
    ({"spec": {"cleanPodPolicy": "All"}}, 'unknown field "spec.cleanPodPolicy"'),
    ({"spec": {"runPolicy": {"managedBy": "nobody"}}}, "managedBy"),
    (elastic(nProcPerNode=1), "nProcPerNode"),
    (in_pod(hostNetwork="true", dnsPolicy="ClusterFirstWithHostNet"), "hostNetwork"),
    (in_container(command="python train.py"), "command"),
    (in_container(env=[{"name": "A", "value": 1}]), "env"),
    (in_container(resources={"limits": {"memory": "4GB"}}), "memory"),
    (in_container(imagePullPolicy="always"), "imagePullPolicy"),
    (in_container(volumeMounts=[{"name": "date", "mountPath": "/x"}]), 'Not found: "date"'),
    (in_container(resources={"limits": {"example.com/nic": "0.5"}}), "must be an integer"),
    (in_container(env=[{"name": "A", "valueFrom": {}}]), "valueFrom"),
    (in_container(livenessProbe={"exec": None}), "handler"),
    (in_pod(volumes=[{"name": "data", "emptyDir": {}}]), "may not specify more than 1 volume"),
    (in_pod(tolerations=[{"key": "a", "effect": "Never"}]), "effect"),
    (in_pod(nodeSelector={"zone": "a/b"}), "a valid label"),
    (in_pod(dnsPolicy="default"), "dnsPolicy"),
    (in_pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), "violates PodSecurity"),
    (in_worker(template={"metadata": {"labels": {"team": "a b"}}}), "a valid label"),
]


@pytest.fixture(scope="module")
def namespace(new_namespace):
    """One for all, as nothing is created in it."""
    made = new_namespace()
    yield made
    made.remove()


def server_says(namespace: Any, body: dict[str, Any]) -> str:
    """The server's words on a dry run, webhook included; empty where it accepts."""
    done = namespace.kubectl(*DRY_RUN, stdin=body, check=False)
    return done.stderr if done.returncode else ""


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    """The pod of a job's template, with an account that every namespace has."""
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    spec = {**template["spec"], "serviceAccountName": "default"}
    meta = {**template["metadata"], "name": "trial"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


@pytest.mark.parametrize(("flags", "patch", "why"), OURS)
def test_what_we_refuse_the_server_lets_pass(namespace, flags, patch, why):
    """A rule that the server has too would be one too many."""
    made = built({"replicas": 4, "name": "rule", **flags}, [], patch)
    job = manifest.pytorchjob(made)
    assert rules.check(made, job), "we let it pass"
    assert server_says(namespace, job) == "", why


@pytest.mark.parametrize(("patch", "words"), THEIRS)
def test_what_we_leave_to_the_server_it_refuses(namespace, patch, words):
    """On a dry run of the job, or of the pod of its template, in words that name the field."""
    made = built({"replicas": 4, "name": "rule"}, [], patch)
    job = manifest.pytorchjob(made)
    assert rules.check(made, job) == []
    assert words in (server_says(namespace, job) or server_says(namespace, pod_of(job)))


def test_what_we_render_the_server_accepts(namespace):
    """Every object of a rendered job, companions included, on a dry run."""
    for flags in ({"replicas": 4}, {"replicas": 2, "gpus": 8, "name": "gpu"}):
        for body in render(flags):
            assert body["metadata"]["name"] in namespace.kubectl(*DRY_RUN, stdin=body).stdout
