"""Every rule, with an input that breaks it."""

import re

import pytest
from support.manifests import SPECS, container, render_job

from gptddp.errors import ConfigError
from gptddp.k8s.render import admission, catalogue, manifest, quantity, rules, spec

BROKEN_SPECS = [
    ("world-size", {"replicas": 13}, [], "use at most 12 workers"),
    ("world-size", {"max": 25, "nproc_per_node": 2}, [], "50 workers but only 12 lanes"),
    ("places", {}, ["--data", "/x"], "--data CLAIM/PATH"),
    ("places", {}, ["--run-dir", "/x"], "--name"),
    ("init-from", {}, ["--init-from", "models/gpt2"], "as in /data/models/gpt2"),
    ("init-from", {}, ["--init-from", "/data/../etc"], "the claim of --data at /data"),
    ("device", {}, ["--device", "cuda"], "--gpus 1"),
    ("gpus", {"gpus": -1}, [], "negative"),
    ("gpus", {"gpus": 1, "nproc_per_node": 2}, [], "--nproc-per-node 1"),
    ("gpus", {"gpu_resource": "gpu"}, [], "nvidia.com/gpu"),
    ("quantity", {"cpu": "two"}, [], "--cpu: 'two'"),
    ("quantity", {"memory": "0"}, [], "--memory: '0'"),
    ("quantity", {"memory": "4GB"}, [], "4Gi"),
    ("quantity", {"memory": "1Gi", "shm": "1Gi"}, [], "counts against"),
    ("grace", {"grace_s": 5}, [], "at least 10"),
    ("volumes", {"data": "/mnt/data"}, [], "PersistentVolumeClaim"),
    ("volumes", {"runs": "a/b"}, [], "--runs: 'a/b'"),
    ("volumes", {"data": "d/../../x"}, [], "without '..'"),
    ("namespace", {"namespace": "a.b"}, [], "DNS label"),
    ("image", {"image": "a b"}, [], "image reference"),
    ("image", {"image": ""}, [], "image reference"),
    ("env-name", {"env": (("A-B", "1"),)}, [], "letters"),
    ("env-reserved", {"env": (("PET_NNODES", "1"),)}, [], "PET_NNODES"),
    ("env-reserved", {"env": (("MASTER_ADDR", "1"),)}, [], "leave it out"),
    ("env-reserved", {"env": (("WORLD_SIZE", "1"),)}, [], "leave it out"),
    ("env-reserved", {"env": (("GPTDDP_GRACE_S", "1"),)}, [], "leave it out"),
    ("env-secret", {"env": (("HF_TOKEN", "x"),)}, [], "--env-from-secret HF_TOKEN=SECRET/KEY"),
    ("env-secret", {"env": (("aws_secret_access_key", "x"),)}, [], "Secret"),
]
BROKEN_PODS = [
    ("object-name", {"service_account": "A_b"}, "--service-account: 'A_b'"),
    ("object-name", {"image_pull_secret": ("",)}, "--image-pull-secret: ''"),
    ("object-name", {"runtime_class": "no/go"}, "--runtime-class"),
    ("object-name", {"env_from_secret": ("A=B_c/key",)}, "--env-from-secret: 'B_c'"),
    ("object-name", {"mount_configmap": (("B_c", "/etc/app"),)}, "--mount-configmap: 'B_c'"),
    ("key-value", {"label": (("a b", "1"),)}, "--label a b"),
    ("key-value", {"label": (("team", "a b"),)}, "'a b' is not a value"),
    ("key-value", {"label": (("app.kubernetes.io/name", "x"),)}, "a key of your own"),
    ("key-value", {"annotation": (("gptddp/spec-hash", "x"),)}, "--annotation gptddp/spec-hash"),
    ("key-value", {"node_selector": (("-x", "1"),)}, "--node-selector -x"),
    ("placement", {"toleration": ("a:Never",)}, "'a:Never' cannot be read"),
    ("placement", {"toleration": ("a=b=c",)}, "dedicated=training"),
    ("placement", {"toleration": ("a=b/c:NoSchedule",)}, "'b/c' is not a value"),
    ("placement", {"spread": ("zone:Maybe",)}, "topology.kubernetes.io/zone"),
    ("placement", {"spread": ("-zone",)}, "'-zone' is not a key"),
    ("resource", {"resource": (("efa", "1"),)}, "vpc.amazonaws.com/efa"),
    ("resource", {"resource": (("a/b", "0"),)}, "a whole number"),
    ("resource", {"resource": (("a/b", "1.5"),)}, "1.5 is not a whole number"),
    ("resource", {"resource": (("a/b", "many"),)}, "'many' is not an amount"),
    ("resource", {"resource": (("hugepages-2Mi", "3Mi"),)}, "a multiple of 2Mi"),
    ("resource", {"resource": (("hugepages-big", "1Gi"),)}, "hugepages-2Mi"),
    ("resource", {"resource": (("memory", "1Gi"),)}, "use --memory"),
    ("resource", {"resource": (("amd.com/gpu", "1"),)}, "--gpus N --gpu-resource amd.com/gpu"),
    ("slices", {"gpus": 3, "gpu_resource": "nvidia.com/mig-1g.5gb"}, "--gpus 1 --replicas 3"),
    ("disk", {"scratch": "much"}, "--scratch: 'much'"),
    ("disk", {"ephemeral_storage": "0"}, "--ephemeral-storage: '0'"),
    ("disk", {"scratch": "20"}, "as in 20Gi"),
    ("disk", {"ephemeral_storage": "1Gi", "scratch": "2Gi"}, "counts against"),
    ("env-from", {"env_from_secret": ("A=hf",)}, "NAME=SECRET/KEY"),
    ("env-from", {"env_from_configmap": ("A=hf/b c",)}, "NAME=CONFIGMAP/KEY"),
    ("env-from", {"env_from_secret": ("A=hf/b%c",)}, "'b%c' is not a key"),
    ("env-from", {"env": (("A", "1"),), "env_from_secret": ("A=hf/a",)}, "set twice"),
    ("env-from", {"env_from_configmap": ("A=m/a", "A=m/b")}, "leave one out"),
    ("env-name", {"env_from_secret": ("A-B=hf/a",)}, "--env-from-secret A-B"),
    ("env-reserved", {"env_from_configmap": ("RANK=hf/a",)}, "--env-from-configmap RANK"),
    ("mount", {"mount_secret": (("a", "etc"),)}, "not a folder of the pod"),
    ("mount", {"mount_secret": (("a", "/"),)}, "not a folder of the pod"),
    ("mount", {"mount_secret": (("a", "/data/keys/"),)}, "overlaps with /data"),
    ("mount", {"mount_configmap": (("a", "/dev"),)}, "overlaps with /dev"),
    ("mount", {"mount_secret": (("a", "/x"), ("b", "/x/y"))}, "overlaps with /x"),
    ("fs-group", {"fs_group": "staff"}, "'staff' is not the id"),
    ("fs-group", {"fs_group": "-1"}, "or none"),
    ("read-only-data", {"read_only_data": True, "data": "v/books", "runs": "v"}, "two claims"),
    ("egress", {"egress": ("10.0.0.0/40",)}, "10.0.0.0/8:443"),
    ("egress", {"egress": ("10.0.0.1/8",)}, "has host bits set"),
    ("egress", {"egress": ("example.com",)}, "CIDR or CIDR:PORT"),
    ("egress", {"egress": ("10.0.0.0/8:70000",)}, "not within 1 and 65535"),
    ("egress", {"egress": ("own",), "without": ("networkpolicy",)}, "one of them"),
    ("without", {"without": ("networkpolice",)}, "use serviceaccount, networkpolicy, pod"),
    ("queue-options", {"priority": "high"}, "add --queue NAME"),
    ("queue-options", {"topology": "unconstrained"}, "add --queue NAME"),
    ("queue-options", {"queue": "a", "topology": "rack"}, "required=LABEL or preferred=LABEL"),
    ("queue-options", {"queue": "a", "topology": "required="}, "'required=' cannot be read"),
    ("queue-options", {"queue": "a", "topology": "unconstrained=x"}, "cannot be read"),
    ("queue-options", {"label": (("kueue.x-k8s.io/queue-name", "a"),)}, "use --queue"),
    ("queue-options", {"label": (("kueue.x-k8s.io/priority-class", "a"),)}, "use --priority"),
]
BROKEN_SPECS += [(id, flags, [], words) for id, flags, words in BROKEN_PODS]


@pytest.mark.parametrize(("id", "flags", "args", "words"), BROKEN_SPECS)
def test_a_broken_rule_names_field_rule_and_fix(id, flags, args, words):
    """Each rule catches what it is for, under its id, and says what to do."""
    problems = rules.check_spec(spec.load(None, flags, args))
    assert [p.id for p in problems] == [id]
    assert words in str(problems[0]) and all((problems[0].rule, problems[0].fix))
    assert catalogued(problems[0])
    with pytest.raises(ConfigError, match=re.escape(f"[{id}]")):
        rules.refuse(problems)


def catalogued(problem):
    """Is the field of a message one of those that `gptddp-k8s rules` names?"""
    fields = next(rule.field for rule in catalogue.rules() if rule.id == problem.id).split(", ")
    return any(problem.field.startswith(field) for field in fields)


def change(job, path, value):
    """Set a field named by dots; None removes it."""
    *parents, last = path.split(".")
    for key in parents:
        job = job[int(key) if key.isdigit() else key]
    if value is None:
        del job[last]
    else:
        job[last] = value


WORKER = "spec.pytorchReplicaSpecs.Worker"
BROKEN_JOBS = [
    ("name", "metadata.name", "3x"),
    ("name", "metadata.name", "Upper"),
    ("name", "metadata.name", "a.b"),
    ("name", "metadata.name", "x" * 55),
    ("replica-types", "spec.pytorchReplicaSpecs.Launcher", {"template": {"spec": {}}}),
    ("replica-types", "spec.elasticPolicy", None),
    ("replica-count", f"{WORKER}.replicas", 0),
    ("replica-count", f"{WORKER}.replicas", 9),
    ("replica-count", "spec.elasticPolicy.minReplicas", 5),
    ("replica-count", "spec.elasticPolicy.minReplicas", 0),
    ("processes", "spec.nprocPerNode", 1),
    ("processes", "spec.nprocPerNode", "many"),
    ("processes", "spec.elasticPolicy.nProcPerNode", 1),
    ("choices", f"{WORKER}.restartPolicy", "Sometimes"),
    ("choices", "spec.runPolicy.cleanPodPolicy", "running"),
    ("choices", "spec.runPolicy.managedBy", "me"),
    ("choices", "spec.elasticPolicy.rdzvBackend", "static"),
    ("rendezvous", "spec.elasticPolicy.rdzvConf", []),
    ("rendezvous", "spec.elasticPolicy.standalone", True),
    ("numbers", "spec.runPolicy.backoffLimit", -1),
    ("numbers", "spec.elasticPolicy.maxRestarts", -1),
    ("containers", f"{WORKER}.template.spec.containers.0.name", "main"),
    ("containers", f"{WORKER}.template.spec.containers.0.image", ""),
    ("containers", f"{WORKER}.template.spec.containers.0.ports.0", {"containerPort": 1}),
    ("containers", f"{WORKER}.template.spec.containers", []),
    ("shape", f"{WORKER}.replicas", "many"),
    ("shape", WORKER, {}),
]


@pytest.mark.parametrize(("id", "path", "value"), BROKEN_JOBS)
def test_what_the_operator_refuses_or_should_is_caught(id, path, value):
    """Every admission rule, and those that admission lacks, on a manifest from any hand."""
    job = render_job({"replicas": 4})
    if path.endswith("Launcher"):
        job["spec"]["pytorchReplicaSpecs"]["Launcher"] = {
            "template": {"spec": {"containers": [{"name": "pytorch", "image": "x"}]}}
        }
    elif path.endswith("ports.0"):
        container(job)["ports"][0] = value
    else:
        change(job, path, value)
    problems = admission.check_job(job)
    assert all(map(catalogued, problems))
    assert {p.id for p in problems} == {id}
    assert all(p.field and p.rule and p.fix for p in problems)


def test_the_rules_have_no_complaint_about_what_we_render():
    """Every golden manifest passes; each rule is exercised by a broken input above."""
    for flags, args in SPECS.values():
        built = spec.load(None, flags, args)
        assert rules.check_spec(built) == []
        assert admission.check_job(manifest.objects(built)[-1]) == []
    assert {id for id, *_ in BROKEN_SPECS} == set(rules.SPEC_RULES)
    here = {id for id in admission.JOB_RULES if not id.startswith("queue")}  # test_queue_rules.py
    assert {id for id, *_ in BROKEN_JOBS} == {*here, "shape"}


@pytest.mark.parametrize(("replicas", "longest"), [(10, 54), (11, 53), (101, 52)])
def test_the_name_leaves_room_for_the_last_pod(replicas, longest):
    """`<name>-worker-<max-1>` has at most 63 characters: 54 for up to 10 pods, then less."""
    flags = {"replicas": replicas, "name": "n" * longest}
    assert admission.check_job(render_job(flags)) == []
    (problem,) = admission.check_job(render_job({**flags, "name": "n" * (longest + 1)}))
    assert f"at most {longest} characters" in problem.fix


def test_unpinned_images_are_a_warning():
    """No tag or `latest` is allowed and noted; a tag, a digest and a registry's port are fine."""
    for image, notes in (("a", 1), ("a:latest", 1), ("h:5000/a", 1), ("a:1", 0), ("h:5/a@s:0", 0)):
        assert len(rules.warnings(spec.load(None, {"image": image}, []))) == notes, image


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), ("1.5Gi", 1.5 * 2**30), ("1e3", 1000), ("2G", 2e9), ("4GB", None),
     ("-1", None), ("", None), ("1 Gi", None), (".5", 0.5)],
)  # fmt: skip
def test_quantities(text, value):
    """Numbers as Kubernetes writes them, and None for anything else."""
    assert quantity.parse(text) == value
