"""What clusters ask of pods: each option, in the manifest and in job.toml."""

import re

import pytest
import yaml
from support.manifests import container, pod_spec, render, render_job, worker

from gptddp.errors import ConfigError
from gptddp.k8s.render import admission, manifest, pod, rules, spec

EVERY = {  # every option of pods, with what it becomes in the pod or its container
    "service_account": "trainer",
    "image_pull_secret": ("one", "two"),
    "node_selector": (("pool", "gpu"), ("arch", "amd64")),
    "toleration": ("dedicated=training:NoSchedule", "spot"),
    "affinity": {"nodeAffinity": {}},
    "spread": ("topology.kubernetes.io/zone", "kubernetes.io/hostname:DoNotSchedule"),
    "label": (("team", "nlp"), ("cost", "42")),
    "annotation": (("example.com/cost", "42"),),
    "resource": (("vpc.amazonaws.com/efa", "4"), ("hugepages-2Mi", "1Gi")),
    "ephemeral_storage": "20Gi",
    "scratch": "10Gi",
    "runtime_class": "nvidia",
    "priority_class": "high",
    "env_from_secret": ("HF_TOKEN=hf/token", "proxy"),
    "env_from_configmap": ("NCCL_DEBUG=nccl/debug", "site"),
    "mount_secret": (("certs", "/etc/certs"),),
    "mount_configmap": (("topology", "/etc/topology"),),
    "fs_group": "none",
    "read_only_data": True,
    "no_istio": True,
    "egress": ("10.0.0.0/8:443", "[2001:db8::/32]:80", "2001:db8::/32", "192.0.2.7"),
    "without": ("poddisruptionbudget",),
    "patch": {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 60}}},
}


@pytest.fixture
def flags(tmp_path):
    """Every option as a flag, with files for those that are objects."""
    trees = {name: tmp_path / f"{name}.yaml" for name in ("affinity", "patch")}
    for name, file in trees.items():
        file.write_text(yaml.safe_dump(EVERY[name]))
    return {**EVERY, **trees, "gpus": 1}


@pytest.fixture
def every(flags):
    """The objects of a job with every option."""
    return render(flags)


def test_every_option_is_allowed_and_tried_here(flags):
    """No option of pods without a value in these tests; together they break no rule."""
    assert set(EVERY) == set(pod.FIELDS)
    built = spec.load(None, flags, [])
    assert rules.check_spec(built) == []
    assert admission.check_job(manifest.objects(built)[-1]) == []
    assert pod.given(built.pod) == list(pod.FIELDS)


def test_the_yaml_of_every_option_is_plain(flags, every):
    """No anchors, which some tools do not read; the same objects again, and the same bytes."""
    text = manifest.to_yaml(every)
    assert not re.search(r"[&*]id\d|!!|null", text)
    assert list(yaml.safe_load_all(text)) == every
    turned = dict(reversed(flags.items())) | {"label": flags["label"][::-1]}
    assert manifest.to_yaml(render(turned)) == text


def test_where_pods_run(every):
    """Account, pull secrets, nodes, tolerations, spread and classes are the pod's fields."""
    built = pod_spec(every[-1])
    assert built["serviceAccountName"] == "trainer"
    assert built["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert built["nodeSelector"] == {"arch": "amd64", "pool": "gpu"}
    assert built["affinity"] == {"nodeAffinity": {}}
    assert (built["runtimeClassName"], built["priorityClassName"]) == ("nvidia", "high")
    assert built["tolerations"][2:] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "vpc.amazonaws.com/efa", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    zone, host = built["topologySpreadConstraints"]
    assert (zone["whenUnsatisfiable"], host["whenUnsatisfiable"]) == (
        "ScheduleAnyway",
        "DoNotSchedule",
    )
    assert host["topologyKey"] == "kubernetes.io/hostname" and host["maxSkew"] == 1
    selected = {"training.kubeflow.org/job-name": "gptddp"}
    assert zone["labelSelector"] == {"matchLabels": selected}


def test_what_pods_ask_for(every):
    """Devices, huge pages and disk are requests and limits alike; /tmp is as large as it says."""
    asked = container(every[-1])["resources"]
    assert asked["requests"] == asked["limits"]
    wanted = {"nvidia.com/gpu": "1", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "1Gi"}
    assert {**wanted, "ephemeral-storage": "20Gi"}.items() <= asked["limits"].items()
    volumes = {volume["name"]: volume for volume in pod_spec(every[-1])["volumes"]}
    assert volumes["scratch"]["emptyDir"] == {"sizeLimit": "10Gi"}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "data", "readOnly": True}
    assert "readOnly" not in volumes["runs"]["persistentVolumeClaim"]


def test_what_pods_get_from_secrets_and_configmaps(every):
    """One key as a variable, all keys as variables, and all keys as files."""
    built, volumes = container(every[-1]), pod_spec(every[-1])["volumes"]
    env = {item["name"]: item.get("valueFrom") for item in built["env"]}
    assert env["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert env["NCCL_DEBUG"] == {"configMapKeyRef": {"name": "nccl", "key": "debug"}}
    assert built["envFrom"] == [
        {"secretRef": {"name": "proxy"}},
        {"configMapRef": {"name": "site"}},
    ]
    mounts = {mount["mountPath"]: mount for mount in built["volumeMounts"]}
    sources = {volume["name"]: volume for volume in volumes}
    assert mounts["/etc/certs"]["readOnly"] and mounts["/etc/topology"]["readOnly"]
    assert sources[mounts["/etc/certs"]["name"]]["secret"] == {"secretName": "certs"}
    assert sources[mounts["/etc/topology"]["name"]]["configMap"] == {"name": "topology"}


def test_labels_annotations_and_the_mesh(every):
    """They are on job and pods beside ours; what keeps Istio out is on the pods alone."""
    job = every[-1]
    template = worker(job)["template"]["metadata"]
    for meta in (job["metadata"], template):
        assert meta["labels"]["team"] == "nlp"
        assert meta["labels"]["app.kubernetes.io/managed-by"] == "gptddp-k8s"
        assert meta["annotations"]["example.com/cost"] == "42"
    assert manifest.SPEC_HASH in job["metadata"]["annotations"]
    assert template["annotations"]["prometheus.io/port"] == "9464"
    out = {"sidecar.istio.io/inject": "false", "istio.io/dataplane-mode": "none"}
    assert out.items() <= template["labels"].items()
    assert not out.keys() & job["metadata"]["labels"].keys()


def test_without_a_group_the_cluster_chooses_it(every):
    """As OpenShift's restricted-v2 wants it; every other field of the standard stays."""
    context = pod_spec(every[-1])["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert pod_spec(render_job({"fs_group": "2000"}))["securityContext"]["fsGroup"] == 2000


def test_companions_that_are_left_out(every):
    """No account beside one that is there, none that --without names, and the rest as ever."""
    assert [it["kind"] for it in every] == ["NetworkPolicy", "PyTorchJob"]
    everything = render({"without": tuple(pod.COMPANIONS)})
    assert [it["kind"] for it in everything] == ["PyTorchJob"]
    assert "serviceAccountName" not in pod_spec(everything[-1])
    assert pod_spec(everything[-1])["automountServiceAccountToken"] is False


def test_egress_is_names_peers_and_the_given_networks(every):
    """A NetworkPolicy that lets pods out to DNS, each other, and what --egress names."""
    policy = every[0]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    peers, dns, *networks = policy["egress"]
    assert peers == {"to": [{"podSelector": policy["podSelector"]}]}
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} >= {("UDP", 53), ("TCP", 53)}
    assert [(it["to"][0]["ipBlock"]["cidr"], it.get("ports")) for it in networks] == [
        ("10.0.0.0/8", [{"protocol": "TCP", "port": 443}]),
        ("2001:db8::/32", [{"protocol": "TCP", "port": 80}]),
        ("2001:db8::/32", None),
        ("192.0.2.7/32", None),
    ]
    (own,) = (it for it in render({"egress": ("own",)}) if it["kind"] == "NetworkPolicy")
    assert len(own["spec"]["egress"]) == 2


def test_the_taint_of_every_device_is_tolerated():
    """A GPU's by its resource, a slice's by that of the whole GPU too, none without devices."""

    def keys(**flags):
        return [it["key"] for it in pod_spec(render_job(flags))["tolerations"][2:]]

    assert keys() == [] and keys(resource=(("hugepages-2Mi", "2Mi"),)) == []
    assert keys(gpus=1, gpu_resource="amd.com/gpu") == ["amd.com/gpu"]
    mig = "nvidia.com/mig-1g.5gb"
    assert keys(gpus=1, gpu_resource=mig) == [mig, "nvidia.com/gpu"]


def test_a_slice_is_a_process():
    """A pod with one MIG slice has one worker process."""
    job = render_job({"gpus": 1, "replicas": 4, "gpu_resource": "nvidia.com/mig-1g.5gb"})
    assert job["spec"]["nprocPerNode"] == "1"
    assert container(job)["resources"]["limits"]["nvidia.com/mig-1g.5gb"] == "1"


JOB_TOML = """
[job]
image_pull_secret = "one"
toleration = ["spot", "dedicated=training"]
fs_group = 2000
read_only_data = true
[job.node_selector]
pool = "gpu"
[job.resource]
"vpc.amazonaws.com/efa" = 4
[job.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution]
nodeSelectorTerms = [{matchExpressions = [{key = "gpu", operator = "Exists"}]}]
"""


def test_a_file_says_the_same_as_flags(tmp_path):
    """Strings, lists, tables and numbers of job.toml; a flag adds to a table, and wins else."""
    (tmp_path / "job.toml").write_text(JOB_TOML)
    flags = {"toleration": ("batch",), "node_selector": (("zone", "a"),)}
    built = spec.load(tmp_path / "job.toml", flags, []).pod
    assert built.image_pull_secret == ("one",) and built.toleration == ("batch",)
    assert (built.fs_group, built.read_only_data) == ("2000", True)
    assert built.node_selector == (("pool", "gpu"), ("zone", "a"))
    assert built.resource == (("vpc.amazonaws.com/efa", "4"),)
    required = built.affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"][0]["matchExpressions"][0]["key"] == "gpu"


def test_a_file_in_a_file_lies_beside_it(tmp_path, monkeypatch):
    """`affinity = "near.yaml"` is found beside job.toml, wherever the command runs."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job/near.yaml").write_text('podAffinity: {"a": &x [1], "b": *x}\n')
    (tmp_path / "job/job.toml").write_text('[job]\naffinity = "near.yaml"\n')
    monkeypatch.chdir(tmp_path)
    job = render_job() | {"affinity": spec.load(tmp_path / "job/job.toml", {}, []).pod.affinity}
    assert job["affinity"] == {"podAffinity": {"a": [1], "b": [1]}}
    assert "&" not in yaml.safe_dump(job["affinity"])  # no part is in two places


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("toleration = 1", r"job\.toleration is 1: it must be a list of strings"),
        ("toleration = [1]", "a list of strings"),
        ("read_only_data = 1", "true or false"),
        ('node_selector = ["a=b"]', "a table of strings"),
        ("label = {a = true}", r"job\.label\.a is true: it must be a string"),
        ('resource = {"a/b" = true}', "a quantity"),
        ("affinity = 3", "a table, or the name of a YAML file"),
        ("affinity = {a = 2026-01-01}", "JSON does not know .*put dates"),
        ('affinity = "none.yaml"', r"cannot read the file .*none\.yaml: No such file"),
        ('affinity = "bad.yaml"', r"bad\.yaml is not YAML: line \d"),
        ('affinity = "list.yaml"', "has no table"),
        ('affinity = "twice.yaml"', "line 2: a stands in line 1 and again"),
        ('affinity = "two.yaml"', "has 2 objects"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_by_key(tmp_path, key, message):
    """The message has the file, the key, what it must be, and for a YAML file what is wrong."""
    (tmp_path / "job.toml").write_text(f"[job]\n{key}\n")
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "twice.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "two.yaml").write_text("a: 1\n---\nb: 2\n")
    with pytest.raises(ConfigError, match=message):
        spec.load(tmp_path / "job.toml", {}, [])


def test_a_job_without_these_options_has_none_of_their_fields():
    """Nothing empty is written: a manifest stays as short as its job."""
    job = render_job()
    for field in ("imagePullSecrets", "nodeSelector", "affinity", "priorityClassName"):
        assert field not in pod_spec(job)
    assert "envFrom" not in container(job) and len(pod_spec(job)["volumes"]) == 4
    assert list(job["metadata"]["annotations"]) == [manifest.SPEC_HASH]
