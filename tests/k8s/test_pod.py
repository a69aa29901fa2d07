"""Options for a cluster's requirements of pods, in the manifest and in job.toml."""

import pytest
import yaml
from support.manifests import container, pod_spec, render, render_job

from gptddp.k8s.render import manifest, pod, rules, spec

EVERY = {  # every option of pods
    "service_account": "trainer",
    "image_pull_secret": ("one", "two"),
    "node_selector": (("pool", "gpu"), ("arch", "amd64")),
    "toleration": ("dedicated=training:NoSchedule", "spot"),
    "resource": (("vpc.amazonaws.com/efa", "4"), ("hugepages-2Mi", "1Gi")),
    "priority_class": "high",
    "env_from_secret": ("HF_TOKEN=hf/token", "proxy"),
    "without": ("poddisruptionbudget",),
    "patch": {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 60}}},
}


@pytest.fixture
def flags(tmp_path):
    """Every option as a flag, with a file for the patch."""
    file = tmp_path / "patch.yaml"
    file.write_text(yaml.safe_dump(EVERY["patch"]))
    return {**EVERY, "patch": file, "gpus": 1}


def test_all_pod_options_together_break_no_rule(flags):
    """EVERY has a value for each pod option, and all of them together break no rule."""
    assert set(EVERY) == set(pod.FIELDS)
    built = spec.load(None, flags, [])
    assert rules.check(built, manifest.pytorchjob(built)) == []
    assert pod.without_meaning_locally(built.pod) == [
        name for name in pod.FIELDS if name not in ("env_from_secret", "patch")
    ]


def test_every_pod_option_sets_its_field(flags):
    """The options set account, pull secrets, nodes, tolerations, class, devices and variables; a
    companion of --without, and a ServiceAccount that exists, are left out."""
    every = render(flags)
    built, asked = pod_spec(every[-1]), container(every[-1])["resources"]
    assert built["serviceAccountName"] == "trainer" and built["priorityClassName"] == "high"
    assert built["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert built["nodeSelector"] == {"arch": "amd64", "pool": "gpu"}
    assert built["tolerations"][2:] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "vpc.amazonaws.com/efa", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert asked["requests"] == asked["limits"]
    wanted = {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "1Gi"}
    assert wanted.items() <= asked["limits"].items()
    env = {item["name"]: item.get("valueFrom") for item in container(every[-1])["env"]}
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert container(every[-1])["envFrom"] == [{"secretRef": {"name": "proxy"}}]
    assert every[-1]["spec"]["runPolicy"]["ttlSecondsAfterFinished"] == 60
    assert [it["kind"] for it in every] == ["NetworkPolicy", "PyTorchJob"]


def test_the_taint_of_every_device_is_tolerated():
    """A pod tolerates its GPUs' taint, with a MIG slice also that of whole GPUs; else none."""

    def keys(**flags):
        return [it["key"] for it in pod_spec(render_job(flags))["tolerations"][2:]]

    assert keys() == [] and keys(resource=(("hugepages-2Mi", "2Mi"),)) == []
    assert keys(gpus=1, gpu_resource="amd.com/gpu") == ["amd.com/gpu"]
    assert keys(gpus=1, toleration=("nvidia.com/gpu:NoSchedule",)) == ["nvidia.com/gpu"]
    mig = "nvidia.com/mig-1g.5gb"
    assert keys(gpus=1, gpu_resource=mig) == [mig, "nvidia.com/gpu"]


JOB_TOML = """
[job]
image_pull_secret = "one"
toleration = ["spot", "dedicated=training"]
patch = "near.yaml"
[job.node_selector]
pool = "gpu"
[job.resource]
"vpc.amazonaws.com/efa" = 4
"""


def test_job_toml_sets_the_same_options_as_flags(tmp_path, monkeypatch):
    """Strings, lists, tables and numbers of job.toml; a flag extends a table, and replaces other
    values. File names in it are relative to it."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/job.toml").write_text(JOB_TOML)
    (tmp_path / "job/near.yaml").write_text("\ufeffspec: {runPolicy: {backoffLimit: 3}}\n")
    monkeypatch.chdir(tmp_path)
    flags = {"toleration": ("batch",), "node_selector": (("zone", "a"),)}
    built = spec.load(tmp_path / "job/job.toml", flags, []).pod
    assert built.image_pull_secret == ("one",) and built.toleration == ("batch",)
    assert built.node_selector == (("pool", "gpu"), ("zone", "a"))
    assert built.resource == (("vpc.amazonaws.com/efa", "4"),)
    assert built.patch == {"spec": {"runPolicy": {"backoffLimit": 3}}}
    (tmp_path / "job/job.toml").write_text("[job.patch.spec.runPolicy]\nbackoffLimit = 3\n")
    assert spec.load(tmp_path / "job/job.toml", {}, []).pod.patch == built.patch
