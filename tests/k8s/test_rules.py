"""Rules and forms of options: inputs that break each of them."""

import pytest
from support.manifests import SPECS, built
from support.paths import ROOT

from gptddp.errors import ConfigError
from gptddp.k8s.render import manifest, quantity, rules, spec

MIG, QUEUE = "nvidia.com/mig-1g.5gb", "kueue.x-k8s.io/queue-name"


def in_worker(**fields):
    return {"spec": {"pytorchReplicaSpecs": {"Worker": fields}}}


def in_pod(**fields):
    return in_worker(template={"spec": fields})


def in_container(**fields):
    return in_pod(containers=[{"name": "pytorch", **fields}])


def problems(*given):
    made = built(*given)
    return rules.check(made, manifest.pytorchjob(made))


# (rule, flags, trainer's arguments, words of the message)
BROKEN = [
    ("name", {"name": "n" * 70}, [], "--name: the last pod's name nnn"),
    ("name", {"name": "n" * 55}, [], "has 64 characters, and may have at most 63; use at most 54"),
    ("pods", {"replicas": 0}, [], "--replicas: 0 is less than 1; use --replicas 1 or more"),
    ("pods", {"min": 0}, [], "--min: 0 is less than 1; use --min 1 ["),
    ("pods", {"replicas": 4, "min": 5}, [], "--min: 5 is above --replicas 4; use --min 1 to 4"),
    ("pods", {"replicas": 4, "max": 3}, [], "--max: 3 is less than --replicas 4; use --max 4"),
    ("pods", {"max": -1}, [], "--max: -1"),
    ("pods", {"nproc_per_node": -2}, [], "--nproc-per-node: -2 is less than 1"),
    ("world-size", {"replicas": 13}, [], "--replicas: 13 workers but only 12 lanes"),
    ("world-size", {"max": 25, "nproc_per_node": 2}, [], "--max: 50 workers (25 pods of 2)"),
    ("world-size", {"nproc_per_node": 13}, [], "use --nproc-per-node 12 or less"),
    ("world-size", {"gpus": 64}, [], "use --gpus 48 or less"),
    ("gpus", {"gpus": -1}, [], "--gpus: -1 is negative"),
    ("gpus", {"gpus": 1, "nproc_per_node": 2}, [], "use --nproc-per-node 1 or less"),
    ("gpus", {"gpus": 3, "gpu_resource": MIG}, [], "--gpus 1 --replicas 3"),
    ("gpus", {}, ["--device", "cuda"], "--device cuda: the pods have no GPU; add --gpus 1"),
    ("gpus", {"resource": (("amd.com/gpu", "1"),)}, [], "--gpus N --gpu-resource amd.com/gpu"),
    ("gpus", {"gpus": 2, "resource": (("nvidia.com/gpu", "1"),)}, [], "the job would use 2"),
    ("memory", {"memory": "1Gi", "shm": "1Gi"}, [], "--memory: 1Gi is not more than --shm 1Gi"),
    ("grace", {"grace_s": 5}, [], "5 s is not enough to commit a checkpoint; use --grace-s 10"),
    ("places", {}, ["--data", "/x"], "--data CLAIM/PATH"),
    ("places", {}, ["--run-dir", "/x"], "use --name to name the job and its run"),
    ("places", {}, ["--init-from", "models/gpt2"], "as in /data/models/gpt2"),
    ("places", {}, ["--init-from", "/data/../etc"], "the claim of --data at /data"),
    ("environment", {"env": (("PET_NNODES", "1"),)}, [], "variable PET_NNODES: the operator or"),
    ("environment", {"env": (("MASTER_ADDR", "1"),)}, [], "leave it out"),
    ("environment", {"env": (("WORLD_SIZE", "1"),)}, [], "leave it out"),
    ("environment", {"env": (("HOME", "/root"),)}, [], "leave it out"),
    ("environment", {"env_from_secret": ("RANK=hf/a",)}, [], "variable RANK"),
    ("environment", {"env": (("HF_TOKEN", "x"),)}, [], "--env-from-secret HF_TOKEN=SECRET/KEY"),
    ("environment", {"env": (("aws_secret_access_key", "x"),)}, [], "looks like a secret"),
    ("environment", {"env": (("PGPASSWORD", ""),)}, [], "PGPASSWORD=SECRET/KEY"),
    ("environment", {"env": (("GITHUB_PAT", "x"),)}, [], "GITHUB_PAT"),
    ("environment", {"env": (("MYSQL_PWD", "x"),)}, [], "MYSQL_PWD"),
    ("environment", {"env": (("WANDB_APIKEY", "x"),)}, [], "WANDB_APIKEY"),
    ("environment", {"env": (("CI", "ghp_" + "a" * 36),)}, [], "variable CI: looks like a sec"),
    ("environment", {"env": (("DB", "postgres://me:pw@db/x"),)}, [], "variable DB"),
    ("containers", {}, ["--metrics-port", "23456"], "two ports share a containerPort"),
    (
        "containers",
        {"nproc_per_node": 2},
        ["--metrics-port", "23457"],
        "two ports share a containerPort",
    ),
    ("queue", {"priority": "high"}, [], "--priority: it is for Kueue"),
    ("queue", {"topology": "unconstrained"}, [], "add --queue NAME"),
]
# (rule, patch, words)
PATCHES = [
    ("roles", {"spec": {"pytorchReplicaSpecs": {"Workers": {}}}}, "did you mean Worker?"),
    ("roles", {"spec": {"pytorchReplicaSpecs": {"Master": {}}}}, "'Master' is no entry of this"),
    ("gpus", in_container(resources={"limits": {"nvidia.com/gpu": 1}}), "the job would use 0"),
    ("memory", in_container(resources={"limits": {"memory": "256Mi"}}), "--memory: 256Mi"),
    ("grace", in_pod(terminationGracePeriodSeconds=30), "30 s is not enough to commit"),
    ("environment", in_container(env=[{"name": "HF_TOKEN", "value": "x"}]), "HF_TOKEN=SECRET/KEY"),
    ("environment", in_container(env=[{"name": "GPTDDP_GRACE_S", "value": "1"}]), "GPTDDP_GRACE_S"),
    ("environment", in_container(env=[]), "variable POD_NAME: the launcher needs it; keep it"),
    (
        "environment",
        in_pod(initContainers=[{"name": "i", "env": [{"name": "U", "value": "a://b:c@d"}]}]),
        "variable U: looks like a secret",
    ),
    ("containers", in_pod(containers=[{"name": "pytroch"}]), "it has no image: did you mean 'py"),
    (
        "containers",
        in_pod(containers=[{"name": "side", "image": "x", "ports": [{"containerPort": 80}]}]),
        "or one has none",
    ),
    ("containers", in_container(ports=[{"name": "a", "containerPort": 9464}]), "containerPort"),
    (
        "claims",
        in_pod(volumes=[{"name": "more", "persistentVolumeClaim": {"claimName": "data"}}]),
        "the claim data is in the volume data already, and the pod would hang",
    ),
    (
        "claims",
        in_pod(volumes=[{"name": "runs", "persistentVolumeClaim": {"readOnly": True}}]),
        "it is read-only, and the pods write the run to it",
    ),
    ("claims", in_container(volumeMounts=[{"mountPath": "/runs", "readOnly": True}]), "read-only"),
    (
        "claims",
        in_pod(volumes=[{"name": "runs", "persistentVolumeClaim": None, "emptyDir": {}}]),
        "volumeMounts[/runs]: the run is lost with its pod; mount a volume that all pods share",
    ),
    ("claims", in_container(volumeMounts=None), "the run is lost with its pod"),
    ("dns", in_pod(hostNetwork=True), "dnsPolicy: the pods would use the node's DNS"),
    ("dns", in_pod(dnsPolicy="Default"), "which does not know their names; leave it out"),
    ("words", in_worker(restartPolicy="Sometimes"), "use ExitCode or OnFailure"),
    ("words", {"spec": {"runPolicy": {"cleanPodPolicy": "running"}}}, "use Running or None"),
    ("words", {"spec": {"elasticPolicy": {"rdzvBackend": "zk"}}}, "use c10d or etcd"),
    ("words", {"spec": {"elasticPolicy": {"rdzvConf": []}}}, "makes the operator panic"),
    ("words", {"spec": {"elasticPolicy": {"standalone": True}}}, "standalone: torchrun fails"),
    ("queue", in_worker(template={"metadata": {"labels": {QUEUE: "a"}}}), "each pod separately"),
    ("queue", {"metadata": {"annotations": {"kueue.x-k8s.io/elastic-job": "1"}}}, "not PyTorchJob"),
    (
        "queue",
        {"metadata": {"labels": {QUEUE: "a"}}, "spec": {"elasticPolicy": {"metrics": [1]}}},
        "Kueue stops the job each time",
    ),
]
BROKEN_BY_PATCH = [(id, {}, [], words, patch) for id, patch, words in PATCHES]


@pytest.mark.parametrize(
    ("id", "flags", "args", "words", "patch"),
    [*((*row, None) for row in BROKEN), *BROKEN_BY_PATCH],
)
def test_a_broken_rule_names_field_rule_and_fix(id, flags, args, words, patch):
    """Each broken rule is found under its id, and its message has the field, the rule and a fix."""
    found = problems(flags, args, patch)
    assert {it.id for it in found} == {id}
    assert words in str(found[0]) and found[0].fix


def test_the_golden_manifests_break_no_rule():
    """Every golden manifest passes; each rule is broken by an input above."""
    for flags, args in SPECS.values():
        assert problems(flags, args) == []
    assert {id for id, *_ in (*BROKEN, *PATCHES)} == set(rules.RULES)


def test_every_rule_has_its_row_in_the_page():
    """The table of docs/clusters.md is made of the rules: their ids and docstrings."""
    page = (ROOT / "docs/clusters.md").read_text()
    rows = [f"| `{id}` | {rule.__doc__} |\n" for id, rule in rules.RULES.items()]
    assert "|---|---|\n" + "".join(rows) in page, "".join(rows)


def test_a_model_may_be_on_a_volume_of_the_patch():
    """--init-from may be any path in a patched pod; without a patch there are two volumes."""
    args = ["--init-from", "/models/gpt2"]
    assert problems({}, args, in_pod(hostname="x")) == [] != problems({}, args)


def test_a_patch_that_breaks_the_job_gives_no_traceback():
    """A job that the rules cannot read is reported as a mistake in the patch."""
    (problem,) = problems({}, [], in_pod(terminationGracePeriodSeconds="soon"))
    assert problem.id == "shape" and problem.field == "--patch"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"name": "Upper"}, "--name: 'Upper' is not the name of a job; use lower case letters"),
        ({"name": "3x"}, "with a letter first"),
        ({"namespace": "a.b"}, "--namespace: 'a.b' is not a DNS label"),
        ({"image": "a b"}, "--image: 'a b' is not an image that a node can pull"),
        ({"image": ""}, "registry.example/gptddp:0.2.0"),
        ({"image": "FOO/BAR:V1"}, "its name in lower case"),
        ({"image": "http://x/y:1"}, "not an image"),
        ({"image": "x:" + "t" * 129}, "not an image"),
        ({"image": "a@sha256:12"}, "not an image"),
        ({"cpu": "two"}, "--cpu: 'two' is not a number of CPUs"),
        ({"cpu": "2Gi"}, "up to 1024; use one such as 500m or 2"),
        ({"memory": "0"}, "--memory: '0'"),
        ({"memory": "4GB"}, "use one such as 512Mi or 4Gi"),
        ({"memory": "8"}, "of at least 64Mi"),
        ({"memory": "1e400"}, "not an amount of memory"),
        ({"shm": "64"}, "--shm: '64'"),
        ({"gpu_resource": "gpu"}, "use DOMAIN/NAME, such as nvidia.com/gpu"),
        ({"data": "/data"}, "--data: '/data' is not the name of a PersistentVolumeClaim, or CLAIM"),
        ({"data": "d/../../x"}, "with --local, --volume CLAIM=FOLDER sets its folder"),
        ({"runs": "a/../b"}, "--runs: 'a/../b'"),
        ({"service_account": "A_b"}, "--service-account: 'A_b' is not the name of an object"),
        ({"image_pull_secret": ("",)}, "--image-pull-secret: ''"),
        ({"queue": "Team_A"}, "--queue: 'Team_A'"),
        ({"toleration": ("a:Never",)}, "--toleration: 'a:Never' is not a taint"),
        ({"toleration": ("a=b=c",)}, "dedicated=training"),
        ({"resource": (("efa", "1"),)}, "--resource: 'efa=1' is not an amount of a resource"),
        ({"resource": (("a/b", "0"),)}, "vpc.amazonaws.com/efa=4"),
        ({"resource": (("memory", "1Gi"),)}, "'memory=1Gi'"),
        ({"env_from_secret": ("A=hf",)}, "use NAME=SECRET/KEY"),
        ({"without": ("networkpolice",)}, "use serviceaccount, networkpolicy, pod"),
        ({"topology": "rack"}, "required=LABEL or preferred=LABEL"),
        ({"topology": "required="}, "'required=' is not"),
        ({"topology": "unconstrained=x"}, "'unconstrained=x' is not"),
    ],
)
def test_a_malformed_option_is_refused(flags, words):
    """The message has the option, the required form, and an example."""
    with pytest.raises(ConfigError) as error:
        spec.load(None, flags, [])
    assert words in str(error.value) and str(error.value).endswith("[format]")


@pytest.mark.parametrize(("replicas", "longest"), [(10, 54), (11, 53), (101, 52)])
def test_the_name_leaves_room_for_the_last_pod(replicas, longest):
    """`<name>-worker-<max-1>` has at most 63 characters: 54 for up to 10 pods, then less."""
    flags = {"replicas": replicas, "name": "n" * longest}
    lanes = ["--lanes", "101", "--batch", "101"]
    assert problems(flags, lanes) == []
    (problem,) = problems({**flags, "name": "n" * (longest + 1)}, lanes)
    assert f"at most {longest} characters" in problem.fix


@pytest.mark.parametrize(
    ("args", "lanes"),
    [(["--replicas", "8", "--gpus", "8"], []), (["--max", "30"], []),
     (["--replicas", "13"], ["--batch", "24"])],
)  # fmt: skip
def test_the_fix_for_too_few_lanes_works(args, lanes):
    """The options after `--` in the message are accepted, with the batch if one was given."""
    flags = {args[i][2:]: int(args[i + 1]) for i in range(0, len(args), 2)}
    (problem,) = problems(flags, lanes)
    more = problem.fix.partition(": -- ")[2].split()
    assert problems(flags, [*lanes, *more]) == []


IMAGES = [
    *("a", "gptddp:0.2.0", "Host:5000/a/b:T-1", "localhost/a", "[::1]:5000/a", "a.b/c"),
    "h.example/a__b/c-d@sha256:" + "0" * 64,
]
NO_SECRETS = [
    ("TOKENIZERS_PARALLELISM", "false"), ("MAX_TOKENS", "9"), ("MONKEY", "1"), ("AUTHOR", "me"),
    ("GOOGLE_APPLICATION_CREDENTIALS", "/etc/gcp/key.json"), ("SECRET_FILE", "/etc/s"),
    ("PYTHONPATH", "/x"), ("URL", "http://host:80/a@b"), ("KEYBOARD", "us"), ("PATTERN", "x"),
]  # fmt: skip


@pytest.mark.parametrize(
    "flags", [*({"image": it} for it in IMAGES), *({"env": (it,)} for it in NO_SECRETS)]
)
def test_all_forms_of_images_and_lookalikes_of_secrets_are_accepted(flags):
    """An image may have a host with a port, a tag and a digest; a variable may resemble a secret's
    name, or name a file of secrets."""
    assert problems(flags) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"gpus": 8, "memory": "8Gi"}, "--memory 8Gi is less than the 63Gi that 8 processes"),
        ({"memory": "0.5Gi"}, "use --memory 3Gi, or leave it out"),
    ],
)
def test_less_memory_than_the_model_needs_is_a_warning(flags, words):
    """The warning has the computed size; with enough memory there is no warning."""
    (warning,) = rules.warnings(spec.load(None, flags, []))
    assert words in warning
    own = {key: value for key, value in flags.items() if key == "gpus"}
    assert rules.warnings(spec.load(None, {**own, "memory": "1Pi"}, [])) == []


def test_unpinned_images_are_a_warning():
    """No tag and `latest` give a warning; a tag, a digest and a registry's port do not."""
    digest = "h:5/a@sha256:" + "0" * 64
    for image, notes in (("a", 1), ("a:latest", 1), ("h:5000/a", 1), ("a:1", 0), (digest, 0)):
        assert len(rules.warnings(spec.load(None, {"image": image}, []))) == notes, image


def test_gpus_that_a_job_leaves_idle_are_a_warning():
    """The user's --device cpu overrides the device rendered for --gpus, and gives a warning."""
    assert rules.warnings(spec.load(None, {"gpus": 1}, ["--device", "cpu"])) == [
        "--device cpu leaves the pods' GPUs idle"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", 0.5), ("2", 2), ("1.5Gi", 1.5 * 2**30), ("1e3", 1000), ("2G", 2e9), ("4GB", 0),
     ("-1", 0), ("", 0), ("1 Gi", 0), (".5", 0.5), ("1Ei", 2.0**60), ("2E", 2e18),
     ("+1Gi", 2.0**30), ("1e", 0), ("1E3", 1000), ("\u0661", 0)],
)  # fmt: skip
def test_kubernetes_quantities_are_parsed(text, value):
    """Numbers in Kubernetes' notation have a value; other texts give 0."""
    assert quantity.number(text) == value
