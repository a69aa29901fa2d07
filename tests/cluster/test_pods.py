"""Options of pods on a real cluster: the server accepts every option, and pods get it."""

import json
import secrets
from pathlib import Path

import pytest
import yaml
from support.cluster_jobs import PODS, cli
from support.paths import ROOT

from gptddp.k8s.render import pod

JOB = ("--name=demo", "--replicas=2", *PODS)
GPU = ("--gpus=1", "--memory=64Gi")
OVERLAYS = ROOT / "k8s/overlays"
CLOUDS = sorted(path.parent.name for path in OVERLAYS.glob("*/job.toml"))

# Settings without an option: variables and files from Secrets and ConfigMaps, sizes, labels.
PATCH = """
spec:
  runPolicy: {ttlSecondsAfterFinished: 3600}
  pytorchReplicaSpecs:
    Worker:
      template:
        metadata: {labels: {team: nlp}, annotations: {example.com/cost: "42"}}
        spec:
          dnsConfig: {options: [{name: ndots, value: "1"}]}
          affinity:
            nodeAffinity:
              requiredDuringSchedulingIgnoredDuringExecution:
                nodeSelectorTerms:
                - matchExpressions: [{key: kubernetes.io/os, operator: In, values: [linux]}]
          topologySpreadConstraints:
          - {maxSkew: 1, topologyKey: kubernetes.io/hostname, whenUnsatisfiable: ScheduleAnyway}
          containers:
          - name: pytorch
            env:
            - {name: PATCHED, value: "yes"}
            - {name: SITE, valueFrom: {configMapKeyRef: {name: site, key: name}}}
            resources: {requests: {ephemeral-storage: 1Gi}, limits: {ephemeral-storage: 1Gi}}
            volumeMounts:
            - {name: api, mountPath: /etc/api, readOnly: true}
            - {name: site, mountPath: /etc/site, readOnly: true}
          volumes:
          - {name: api, secret: {secretName: api}}
          - {name: site, configMap: {name: site}}
          - {name: scratch, emptyDir: {sizeLimit: 512Mi}}
"""
# Options that the nodes of any cluster can satisfy.
COMMON = {
    "service_account": ["trainer"],
    "image_pull_secret": ["registry"],
    "node_selector": ["kubernetes.io/os=linux"],
    "toleration": ["dedicated=training:NoSchedule", "spot"],
    "env_from_secret": ["API_TOKEN=api/token", "proxy"],
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
def asked(cluster, tmp_path):
    """Every option by name, with a PriorityClass and a RuntimeClass for this test alone."""
    name = f"gptddp-test-{secrets.token_hex(3)}"
    made = {
        "PriorityClass": {"apiVersion": "scheduling.k8s.io/v1", "value": 10},
        "RuntimeClass": {"apiVersion": "node.k8s.io/v1", "handler": "runc"},
    }
    objects = [{"kind": k, "metadata": {"name": name}, **rest} for k, rest in made.items()]
    cluster.kubectl("apply", "-f", "-", stdin=objects)
    patch = yaml.safe_load(PATCH)
    pod_of(patch)["runtimeClassName"] = name
    (tmp_path / "patch.yaml").write_text(yaml.safe_dump(patch))
    yield {**COMMON, "priority_class": [name], "patch": [str(tmp_path / "patch.yaml")]}
    cluster.kubectl("delete", "-f", "-", "--wait=false", stdin=objects)


def pod_of(job):
    """The spec of the pods of a job, or of a patch of one."""
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]


def flags(options):
    """Options and their values as flags."""
    for name, values in options.items():
        for value in values:
            yield from ("--" + name.replace("_", "-"), value)


def put_named(namespace):
    """Create what `COMMON` and `PATCH` name, and a Secret with a variable for each key."""
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


def dry_run(namespace, text, account):
    """Do a strict dry run of all objects, and of a pod of the job with this account; the pod."""
    create = ("create", "--dry-run=server", "--validate=strict", "-o=json", "-f=-")
    namespace.kubectl(*create, stdin=text)
    job = list(yaml.safe_load_all(text))[-1]
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {**pod_of(job), "serviceAccountName": account},
    }
    body["metadata"] = {**template["metadata"], "name": "trial"}
    return json.loads(namespace.kubectl(*create, stdin=body).stdout)


def test_the_server_takes_every_option(namespace, asked):
    """It takes all of them at once in a restricted namespace; the dry run creates nothing."""
    put_named(namespace)
    every = {**asked, **SCARCE}
    assert every.keys() == pod.FIELDS.keys()
    text = cli(namespace, "render", *JOB, *GPU, *flags(every)).stdout
    assert dry_run(namespace, text, "trainer")["spec"]["priority"] == 10
    assert not namespace.get("pytorchjobs")


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_server_takes_the_job_of_every_cloud(namespace, cloud):
    """A kind cluster takes each job of k8s/overlays with its patch; no job was run in its cloud."""
    text = cli(namespace, "render", "-f", str(OVERLAYS / cloud / "job.toml")).stdout
    made = dry_run(namespace, text, "default")
    assert made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_pods_get_all_their_options(namespace, asked):
    """With all options that any node can satisfy, pods are scheduled, and see their settings."""
    put_named(namespace)
    (path,) = asked["patch"]
    patch = yaml.safe_load(Path(path).read_text())
    pod_of(patch)["containers"][0]["command"] = ["sh", "-c", CHECK]
    Path(path).write_text(yaml.safe_dump(patch))
    done = cli(namespace, "submit", *JOB, *flags(asked), "--wait", "--timeout=120")
    assert "Secret registry" in done.stderr  # it does not exist, but the nodes have the image
    assert "would be refused" not in done.stderr
    cli(namespace, "delete", "demo")
    assert not namespace.get("networkpolicy") and namespace.get("serviceaccount", "trainer")


def test_short_jobs_get_all_their_options(namespace, asked):
    """The pod of `prepare` starts with every option of a pod."""
    put_named(namespace)
    of_any = {name: values for name, values in asked.items() if name in pod.OF_ANY_POD}
    done = cli(namespace, "prepare", "--source=runs/none", "--wait", *flags(of_any), code=100)
    assert "cannot read /source/none" in done.stderr
