"""What clusters ask of pods, on a real one: the server takes every option, and pods have it."""

import json
import secrets

import pytest
import yaml
from support.cluster_jobs import PODS, cli

from gptddp.k8s.render import pod

JOB = ("--name=demo", "--replicas=2", *PODS)
GPU = ("--gpus=1", "--memory=64Gi")

PATCH = """
spec:
  runPolicy: {ttlSecondsAfterFinished: 3600}
  pytorchReplicaSpecs:
    Worker:
      template:
        spec:
          dnsConfig: {options: [{name: ndots, value: "1"}]}
          containers:
          - name: pytorch
            env: [{name: PATCHED, value: "yes"}]
"""
AFFINITY = """
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
    - matchExpressions: [{key: kubernetes.io/os, operator: In, values: [linux]}]
"""
# What every node of any cluster can give.
COMMON = {
    "service_account": ["trainer"],
    "image_pull_secret": ["registry"],
    "node_selector": ["kubernetes.io/os=linux"],
    "toleration": ["dedicated=training:NoSchedule", "spot"],
    "spread": ["kubernetes.io/hostname"],
    "label": ["team=nlp"],
    "annotation": ["example.com/cost=42"],
    "ephemeral_storage": ["1Gi"],
    "scratch": ["512Mi"],
    "env_from_secret": ["API_TOKEN=api/token", "proxy"],
    "env_from_configmap": ["SITE=site/name"],
    "mount_secret": ["api=/etc/api"],
    "mount_configmap": ["site=/etc/site"],
    "fs_group": ["1000"],
    "egress": ["10.0.0.0/8:443", "[2001:db8::/32]:80"],
    "without": ["poddisruptionbudget"],
}
SCARCE = {"resource": ["hugepages-2Mi=4Mi", "example.com/nic=2"]}
CHECK = """
test "$API_TOKEN" = s3cret && test "$HTTP_PROXY" = http://p && test "$SITE" = north &&
test "$(cat /etc/api/token)" = s3cret && test "$(cat /etc/site/name)" = north &&
test "$PATCHED" = yes && ! touch /etc/api/x 2>/dev/null && ! touch /data/x 2>/dev/null &&
touch /runs/x /tmp/x
"""


@pytest.fixture
def classes(cluster):
    """A PriorityClass and a RuntimeClass of containerd's own runtime, which go with the test."""
    name = f"gptddp-test-{secrets.token_hex(3)}"
    made = {
        "PriorityClass": {"apiVersion": "scheduling.k8s.io/v1", "value": 10},
        "RuntimeClass": {"apiVersion": "node.k8s.io/v1", "handler": "runc"},
    }
    objects = [{"kind": k, "metadata": {"name": name}, **rest} for k, rest in made.items()]
    cluster.kubectl("apply", "-f", "-", stdin=objects)
    yield {"priority_class": [name], "runtime_class": [name]}
    cluster.kubectl("delete", "-f", "-", "--wait=false", stdin=objects)


@pytest.fixture
def files(tmp_path):
    for name, text in (("patch", PATCH), ("affinity", AFFINITY)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return {name: [str(tmp_path / f"{name}.yaml")] for name in ("patch", "affinity")}


def flags(*options):
    """Options and their values as flags; a switch has no value."""
    for table in options:
        for name, values in table.items():
            flag = "--" + name.replace("_", "-")
            yield from [word for value in values for word in (flag, value)] or [flag]


def put_named(namespace):
    """What `COMMON` names, and a Secret with a variable for each key."""
    objects = [
        {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **rest}
        for kind, name, rest in (
            ("ServiceAccount", "trainer", {}),
            ("Secret", "api", {"stringData": {"token": "s3cret"}}),
            ("Secret", "proxy", {"stringData": {"HTTP_PROXY": "http://p"}}),
            ("ConfigMap", "site", {"data": {"name": "north"}}),
        )
    ]
    namespace.kubectl("apply", "-f", "-", stdin=objects)


def test_the_server_takes_every_option(namespace, classes, files):
    """Strict dry runs of all objects and of a pod, in a restricted namespace, with every option."""
    put_named(namespace)
    every = [COMMON, SCARCE, classes, files, {"read_only_data": [], "no_istio": []}]
    assert {name for table in every for name in table} == pod.FIELDS.keys()
    open_egress = {**COMMON, "egress": ["own"], "fs_group": ["none"]}
    for table in (COMMON, open_egress):
        text = cli(namespace, "render", *JOB, *GPU, *flags(table, *every[1:])).stdout
        create = ("create", "--dry-run=server", "--validate=strict", "-o=json", "-f=-")
        namespace.kubectl(*create, stdin=text)
        worker = list(yaml.safe_load_all(text))[-1]["spec"]["pytorchReplicaSpecs"]["Worker"]
        metadata = {**worker["template"]["metadata"], "name": "trial"}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        made = namespace.kubectl(*create, stdin={**body, "spec": worker["template"]["spec"]})
        assert json.loads(made.stdout)["spec"]["priority"] == 10
    assert not namespace.get("pytorchjobs")


def test_pods_have_what_their_cluster_asks_for(namespace, classes, files):
    """With all that any node can give, pods are scheduled, and see what they were given."""
    put_named(namespace)
    patch = yaml.safe_load(PATCH)
    (container,) = patch["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["command"] = ["sh", "-c", CHECK]
    with open(*files["patch"], "w") as file:
        yaml.safe_dump(patch, file)
    asked = flags(COMMON, classes, files, {"no_istio": []})
    done = cli(namespace, "submit", *JOB, *asked, "--wait", "--timeout=120")
    assert "Secret registry" in done.stderr  # which is not there: the nodes have the image
    assert "would be refused" not in done.stderr
    (policy,) = namespace.get("networkpolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    cli(namespace, "delete", "demo")
    assert not namespace.get("networkpolicy") and namespace.get("serviceaccount", "trainer")


def test_short_jobs_have_what_their_cluster_asks_for(namespace, classes, files):
    """The pod of `prepare` starts with every option of a pod."""
    put_named(namespace)
    asked = {name: COMMON[name] for name in COMMON.keys() & pod.OF_ANY_POD.keys()}
    asked |= {**classes, "affinity": files["affinity"], "no_istio": []}
    done = cli(namespace, "prepare", "--source=runs/none", "--wait", *flags(asked), code=100)
    assert "cannot read /source/none" in done.stderr
