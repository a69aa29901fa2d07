"""Every rule, with an input that breaks it."""

import re

import pytest
from support.manifests import SPECS, container, render_job

from gptddp.errors import ConfigError
from gptddp.k8s.render import admission, manifest, quantity, rules, spec

BROKEN_SPECS = [
    ("pods", {"replicas": 0}, [], "--replicas: 0 is less than 1; use --replicas 1 or more"),
    ("pods", {"min": 0}, [], "--min: 0 is less than 1; use --min 1 ["),
    ("pods", {"replicas": 4, "min": 5}, [], "--min: 5 is above --replicas 4; use --min 1 to 4"),
    ("pods", {"replicas": 4, "max": 3}, [], "--max: 3 is less than --replicas 4; use --max 4"),
    ("pods", {"max": -1}, [], "--max: -1"),
    ("processes-per-pod", {"nproc_per_node": -2}, [], "--nproc-per-node: -2 is less than 1"),
    ("processes-per-pod", {"nproc_per_node": 0, "gpus": 2}, [], "--nproc-per-node: 0"),
    ("world-size", {"replicas": 13}, [], "--replicas: 13 workers but only 12 lanes"),
    ("world-size", {"max": 25, "nproc_per_node": 2}, [], "--max: 50 workers (25 pods of 2)"),
    ("world-size", {"nproc_per_node": 13}, [], "use --nproc-per-node 12 or less"),
    ("world-size", {"gpus": 64}, [], "use --gpus 48 or less"),
    ("metrics-port", {}, ["--metrics-port", "23456"], "the port of the rendezvous; use another"),
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
    ("quantity", {"cpu": "2Gi"}, [], "--cpu: 2Gi is 2147483648 CPUs; use a number of cores"),
    ("quantity", {"cpu": "1e30"}, [], "--cpu: 1e30 is 1e+30 CPUs"),
    ("quantity", {"cpu": "1u"}, [], "500m"),
    ("quantity", {"memory": "", "cpu": "1"}, [], "--memory: ''"),
    ("quantity", {"memory": "8"}, [], "8 is 8 bytes, too few for any process; use one such as 4Gi"),
    ("quantity", {"memory": "512m", "shm": "256Mi"}, [], "0.512 bytes"),
    ("quantity", {"shm": "64"}, [], "--shm: 64 is 64 bytes"),
    ("quantity", {"memory": "1e400"}, [], "more than any machine has"),
    ("grace", {"grace_s": 5}, [], "at least 10"),
    ("grace", {"grace_s": 10**20}, [], "use at most 86400, a day"),
    ("volumes", {"data": "/mnt/data"}, [], "PersistentVolumeClaim"),
    ("volumes", {"runs": "/a/b"}, [], "--runs: ''"),
    ("volumes", {"runs": "a/../b"}, [], "--runs: the path leaves the claim"),
    ("volumes", {"data": "d/../../x"}, [], "without '..'"),
    ("namespace", {"namespace": "a.b"}, [], "DNS label"),
    ("image", {"image": "a b"}, [], "image reference"),
    ("image", {"image": ""}, [], "use one such as registry.example/gptddp:0.1.0"),
    ("image", {"image": "FOO/BAR:V1"}, [], "use one such as foo/bar:V1"),
    ("image", {"image": "http://x/y:1"}, [], "use one such as x/y:1"),
    ("image", {"image": "x:y:z"}, [], "image reference"),
    ("image", {"image": "x:" + "t" * 129}, [], "image reference"),
    ("image", {"image": "a@sha256:12"}, [], "image reference"),
    ("env-name", {"env": (("A-B", "1"),)}, [], "letters"),
    ("env-reserved", {"env": (("PET_NNODES", "1"),)}, [], "PET_NNODES"),
    ("env-reserved", {"env": (("MASTER_ADDR", "1"),)}, [], "leave it out"),
    ("env-reserved", {"env": (("WORLD_SIZE", "1"),)}, [], "leave it out"),
    ("env-reserved", {"env": (("GPTDDP_GRACE_S", "1"),)}, [], "leave it out"),
    ("env-secret", {"env": (("HF_TOKEN", "x"),)}, [], "--env-from-secret HF_TOKEN=SECRET/KEY"),
    ("env-secret", {"env": (("aws_secret_access_key", "x"),)}, [], "Secret"),
    ("env-secret", {"env": (("PGPASSWORD", ""),)}, [], "PGPASSWORD=SECRET/KEY"),
    ("env-secret", {"env": (("GITHUB_PAT", "x"),)}, [], "GITHUB_PAT"),
    ("env-secret", {"env": (("MYSQL_PWD", "x"),)}, [], "MYSQL_PWD"),
    ("env-secret", {"env": (("WANDB_APIKEY", "x"),)}, [], "WANDB_APIKEY"),
    ("env-secret", {"env": (("CI", "ghp_" + "a" * 36),)}, [], "--env CI: looks like a secret"),
    ("env-secret", {"env": (("DB", "postgres://me:pw@db/x"),)}, [], "--env DB"),
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
    ("disk", {"scratch": "1e99"}, "more than any node has"),
    ("disk", {"ephemeral_storage": "1Gi", "scratch": "2Gi"}, "counts against"),
    ("env-from", {"env_from_secret": ("A=hf",)}, "NAME=SECRET/KEY"),
    ("env-from", {"env_from_configmap": ("A=hf/b c",)}, "NAME=CONFIGMAP/KEY"),
    ("env-from", {"env_from_secret": ("A=hf/b%c",)}, "'b%c' is not a key"),
    ("env-from", {"env": (("A", "1"),), "env_from_secret": ("A=hf/a",)}, "set twice"),
    ("env-from", {"env_from_configmap": ("A=m/a", "A=m/b")}, "leave one out"),
    ("env-name", {"env_from_secret": ("A-B=hf/a",)}, "--env-from-secret A-B"),
    ("env-reserved", {"env_from_configmap": ("RANK=hf/a",)}, "--env-from-configmap RANK"),
    ("mount", {"mount_secret": (("a", "etc"),)}, "not a folder of the pod"),
    ("mount", {"mount_secret": (("a", "/b:c"),)}, "not a folder of the pod"),
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
    with pytest.raises(ConfigError, match=re.escape(f"[{id}]")):
        rules.refuse(problems)


def change(job, path, value):
    """Set a field named by dots; None removes it."""
    *parents, last = path.split(".")
    for key in parents:
        job = job[int(key) if key.isdigit() else key]
    if value is None:
        del job[last]
    else:
        job[last] = value


WORKER, MASTER = (f"spec.pytorchReplicaSpecs.{role}" for role in ("Worker", "Master"))
TEMPLATE = {"spec": {"containers": [{"name": "pytorch", "image": "x"}]}}
BROKEN_JOBS = [
    ("name", "metadata.name", "3x"),
    ("name", "metadata.name", "Upper"),
    ("name", "metadata.name", "a.b"),
    ("name", "metadata.name", "x" * 55),
    ("replica-types", "spec.pytorchReplicaSpecs.Launcher", {"template": TEMPLATE}),
    ("replica-types", "spec.elasticPolicy", None),
    ("replica-types", MASTER, {"replicas": 2, "template": TEMPLATE}),
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
    ("containers", f"{WORKER}.template.spec.containers.0.ports.1.containerPort", 23456),
    ("containers", f"{WORKER}.template.spec.containers.0.ports.1.name", "pytorchjob-port"),
    ("claims", f"{WORKER}.template.spec.volumes.1.persistentVolumeClaim.claimName", "data"),
    ("shape", f"{WORKER}.replicas", "many"),
    ("shape", WORKER, {}),
]


@pytest.mark.parametrize(("id", "path", "value"), BROKEN_JOBS)
def test_what_the_operator_refuses_or_should_is_caught(id, path, value):
    """Every admission rule, and those that admission lacks, on a manifest from any hand."""
    job = render_job({"replicas": 4})
    if path.endswith("ports.0"):
        container(job)["ports"][0] = value
    else:
        change(job, path, value)
    problems = admission.check_job(job)
    assert {p.id for p in problems} == {id}
    assert all(p.field and p.rule and p.fix for p in problems)


@pytest.mark.parametrize(
    ("roles", "fields"),
    [
        ({}, ["spec.elasticPolicy", "spec.pytorchReplicaSpecs"]),
        (("Master",), ["spec.elasticPolicy"]),
    ],
)
def test_pods_are_of_some_role_and_elastic_ones_are_workers(roles, fields):
    """A job of no pods would count as one that has succeeded."""
    job = render_job({"replicas": 4})
    specs = job["spec"]["pytorchReplicaSpecs"]
    job["spec"]["pytorchReplicaSpecs"] = {
        role: {**specs["Worker"], "replicas": 1} for role in roles
    }
    found = [it for it in admission.check_job(job) if it.id == "replica-types"]
    assert [it.field for it in found] == fields and all(it.fix.endswith("Worker") for it in found)


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


@pytest.mark.parametrize(
    ("args", "lanes"),
    [(["--replicas", "8", "--gpus", "8"], []), (["--max", "30"], []),
     (["--replicas", "13"], ["--batch", "24"])],
)  # fmt: skip
def test_the_fix_for_too_few_lanes_is_one(args, lanes):
    """What the message says after `--` is taken, with the batch where one was given."""
    flags = {args[i][2:]: int(args[i + 1]) for i in range(0, len(args), 2)}
    (problem,) = rules.check_spec(spec.load(None, flags, lanes))
    more = problem.fix.partition(": -- ")[2].split()
    assert rules.check_spec(spec.load(None, flags, [*lanes, *more])) == []


@pytest.mark.parametrize(
    "image",
    ["a", "gptddp:0.1.0", "Host:5000/a/b:T-1", "localhost/a", "[::1]:5000/a", "a.b/c",
     "h.example/a__b/c-d@sha256:" + "0" * 64],
)  # fmt: skip
def test_images_of_every_form_are_taken(image):
    """Hosts in any case and with ports, tags, digests."""
    assert rules.check_spec(spec.load(None, {"image": image}, [])) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOKENIZERS_PARALLELISM", "false"), ("MAX_TOKENS", "9"), ("MONKEY", "1"), ("AUTHOR", "me"),
     ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/gcp/key.json"), ("SECRET_FILE", "/etc/s"),
     ("PYTHONPATH", "/x"), ("URL", "http://host:80/a@b"), ("KEYBOARD", "us"), ("PATTERN", "x")],
)  # fmt: skip
def test_what_only_resembles_a_secret_is_taken(name, value):
    """Words that begin as its names do, and paths to files of secrets."""
    assert rules.check_spec(spec.load(None, {"env": ((name, value),)}, [])) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"gpus": 8, "memory": "8Gi"}, "--memory 8Gi is less than the 63Gi that 8 processes"),
        ({"memory": "0.5Gi"}, "use --memory 3Gi, or leave it out"),
        ({"gpus": 1, "shm": "64Mi"}, "use --shm 3Gi, or leave it out"),
    ],
)
def test_less_memory_than_the_model_needs_is_a_warning(flags, words):
    """With the size that is computed, which has no warning."""
    (warning,) = rules.warnings(spec.load(None, flags, []))
    assert words in warning
    own = {key: value for key, value in flags.items() if key == "gpus"}
    assert rules.warnings(spec.load(None, {**own, "memory": "1Ei"}, [])) == []


def test_unpinned_images_are_a_warning():
    """No tag or `latest` is allowed and noted; a tag, a digest and a registry's port are fine."""
    for image, notes in (("a", 1), ("a:latest", 1), ("h:5000/a", 1), ("a:1", 0), ("h:5/a@s:0", 0)):
        assert len(rules.warnings(spec.load(None, {"image": image}, []))) == notes, image


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), ("1.5Gi", 1.5 * 2**30), ("1e3", 1000), ("2G", 2e9), ("4GB", None),
     ("-1", None), ("", None), ("1 Gi", None), (".5", 0.5), ("1Ei", 2.0**60), ("2E", 2e18),
     ("+1Gi", 2.0**30), ("1e", None), ("1E3", 1000), ("\u0661", None)],
)  # fmt: skip
def test_quantities(text, value):
    """Numbers as Kubernetes writes them, and None for anything else."""
    assert quantity.parse(text) == value
