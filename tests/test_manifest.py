"""Rendering: golden manifests, what each of them has, every rule with an input that breaks it."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from gptddp import config
from gptddp.errors import ConfigError
from gptddp.k8s import admission, manifest, quantity, rules, spec

GOLDEN = Path(__file__).parent / "golden"
SPECS = {
    "cpu": ({"replicas": 4}, ["--steps", "400"]),
    "gpu": ({"name": "big", "replicas": 4, "min": 4, "gpus": 8, "image": "r.io/g@sha256:0"}, []),
    "full": (
        {
            "name": "full", "namespace": "team-a", "replicas": 3, "min": 1, "max": 6, "cpu": "500m",
            "nproc_per_node": 2, "memory": "8Gi", "shm": "1Gi", "data": "corpus/books/v2",
            "runs": "shared", "grace_s": 120, "image": "gptddp:dev",
            "env": (("NCCL_DEBUG", "INFO"), ("LANG", "C.UTF-8")),
        },
        ["--preset=gpt2", "--batch", "96", "--lanes", "96", "--metrics-port", "9100"],
    ),
}  # fmt: skip


def render(flags=None, args=()):
    return manifest.objects(spec.load(None, flags or {}, args))


def render_job(flags=None, args=()):
    return render(flags, args)[-1]


def container(job):
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("name", SPECS)
def test_golden(name):
    """The manifest of a spec is the file that a user may copy, byte for byte.

    After a change that is meant, write them anew: `python tests/test_manifest.py`.
    """
    assert manifest.to_yaml(render(*SPECS[name])) == (GOLDEN / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", SPECS)
def test_both_yaml_dumpers_write_the_same(name, monkeypatch):
    """A PyYAML without its C library renders the same bytes."""
    fast = manifest.to_yaml(render(*SPECS[name]))
    monkeypatch.delattr(yaml, "CSafeDumper", raising=False)
    assert manifest.to_yaml(render(*SPECS[name])) == fast


def test_the_yaml_is_plain():
    """`---` first, LF ends, no nulls, no anchors, and the same objects when read again."""
    objects = render(*SPECS["full"])
    text = manifest.to_yaml(objects)
    assert text.startswith("---\n") and text.endswith("\n") and "\r" not in text
    assert not re.search(r"null|~$|[&*]id\d|!!", text, re.M)
    assert list(yaml.safe_load_all(text)) == objects


def test_the_order_of_options_does_not_matter():
    """Flags, their spelling and the order of variables leave no trace in the bytes."""
    one = render({"env": (("A", "1"), ("B", "2"))}, ["--steps", "5", "--seed=3"])
    two = render({"env": (("B", "2"), ("A", "1"))}, ["--seed", "3", "--steps=5"])
    assert manifest.to_yaml(one) == manifest.to_yaml(two)


def test_a_changed_spec_has_another_hash_and_rendezvous():
    """The annotation and rdzvId follow the manifest, and nothing else does."""
    one, two = render_job(), render_job(args=["--steps", "7"])
    hashes = [job["metadata"]["annotations"][manifest.SPEC_HASH] for job in (one, two)]
    assert hashes[0] != hashes[1]
    for job, digest in zip((one, two), hashes, strict=True):
        assert job["spec"]["elasticPolicy"]["rdzvId"] == f"gptddp-{digest[:8]}"
        bare = copy.deepcopy(job)
        del bare["metadata"]["annotations"], bare["spec"]["elasticPolicy"]["rdzvId"]
        assert manifest.spec_hash(bare) == digest


def test_every_job_is_elastic_worker_only_and_explicit():
    """The fields whose defaults would hang, leak or crash-loop are all written down."""
    job = render_job({"replicas": 5})
    body = job["spec"]
    assert list(body["pytorchReplicaSpecs"]) == ["Worker"]
    elastic = body["elasticPolicy"]
    assert (elastic["minReplicas"], elastic["maxReplicas"], elastic["maxRestarts"]) == (3, 5, 1000)
    conf = {item["key"]: item["value"] for item in elastic["rdzvConf"]}
    assert conf["read_timeout"] == "60" and conf["join_timeout"] == "900"
    assert body["nprocPerNode"] == "1" and body["runPolicy"]["cleanPodPolicy"] == "Running"
    assert body["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert {p["name"]: p["containerPort"] for p in container(job)["ports"]} == {
        "pytorchjob-port": 23456, "metrics": 9464,
    }  # fmt: skip
    env = {e["name"]: e.get("value") for e in container(job)["env"]}
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1" and env["GPTDDP_GRACE_S"] == "60"
    assert "command" not in container(job) and container(job)["name"] == "pytorch"


@pytest.mark.parametrize("name", SPECS)
def test_pods_meet_the_restricted_standard(name):
    """Nothing that Pod Security `restricted` refuses, no token, and somewhere to write."""
    job = render_job(*SPECS[name])
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert "initContainers" not in pod and "hostNetwork" not in pod
    context = container(job)["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    kinds = {key for volume in pod["volumes"] for key in volume if key != "name"}
    assert kinds == {"persistentVolumeClaim", "emptyDir"}
    mounts = {m["mountPath"]: m for m in container(job)["volumeMounts"]}
    assert mounts["/data"]["readOnly"] is True
    env = {e["name"]: e.get("value") for e in container(job)["env"]}
    assert env["HOME"] in mounts and env["TMPDIR"] in mounts


@pytest.mark.parametrize("name", SPECS)
def test_companions_select_the_pods_of_the_job(name):
    """Token-less account, pods of the job among themselves and the metrics port, one at a time."""
    account, policy, budget, job = render(*SPECS[name])
    for companion in (account, policy, budget):
        for key in ("name", "namespace", "labels"):
            assert companion["metadata"].get(key) == job["metadata"].get(key)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert worker["serviceAccountName"] == account["metadata"]["name"]
    assert account["automountServiceAccountToken"] is False
    pods = {"matchLabels": {"training.kubeflow.org/job-name": job["metadata"]["name"]}}
    assert policy["spec"]["podSelector"] == budget["spec"]["selector"] == pods
    peers, metrics = policy["spec"]["ingress"]
    assert policy["spec"]["policyTypes"] == ["Ingress"] and peers == {
        "from": [{"podSelector": pods}]
    }
    ports = {port["name"]: port["containerPort"] for port in container(job)["ports"]}
    assert metrics == {"ports": [{"protocol": "TCP", "port": ports["metrics"]}]}
    assert budget["spec"]["maxUnavailable"] == 1


def test_the_hash_is_that_of_the_job_in_any_namespace():
    """Named by a flag or by the context, it is the same job: the same hash and rendezvous."""
    here, there = render_job(), render_job({"namespace": "team-a"})
    assert there["metadata"].pop("namespace") == "team-a"
    assert here == there


def test_requests_are_limits_and_gpus_are_counted():
    """Guaranteed pods; a GPU resource of any name; one process a GPU."""
    job = render_job({"gpus": 2, "gpu_resource": "amd.com/gpu"})
    resources = container(job)["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["amd.com/gpu"] == "2" and job["spec"]["nprocPerNode"] == "2"


@pytest.mark.parametrize(
    ("flags", "args", "preset"),
    [({}, [], "tiny"), ({"gpus": 1}, [], "gpt2"), ({}, ["--preset", "gpt2-xl"], "gpt2-xl")],
)
def test_the_arguments_name_places_and_preset(flags, args, preset):
    """The image decides nothing: where data and run are, and which model, stand in the manifest."""
    job = render_job({**flags, "name": "demo", "data": "d/set"}, args)
    parsed = config.from_args(container(job)["args"])
    assert (parsed.data, parsed.run_dir, parsed.preset) == ("/data/set", "/runs/demo", preset)
    assert parsed.metrics_port == 9464


def test_trainer_settings_survive_the_way_through_the_manifest():
    """Every trainer option that was given reaches the container as the same value."""
    args = ["--steps=9", "--betas", "0.8,0.99", "--lr", "1e-4", "--max-time", "90", "--seed", "0"]
    given = config.from_args(args)
    parsed = config.from_args(container(render_job(args=args))["args"])
    places = {"data", "run_dir", "preset", "metrics_port"}
    for name in set(config.FIELDS) - places:
        assert getattr(parsed, name) == getattr(given, name), name


# -- job.toml ----------------------------------------------------------------------------------


def toml(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file(tmp_path):
    """Defaults < file < flags, for the job and for the trainer; env is merged by name."""
    file = toml(
        tmp_path,
        '[job]\nname = "a"\nreplicas = 8\ncpu = 2\nenv = {A = "1", B = "1"}\n'
        "[train]\nsteps = 10\nlr = 1\n",
    )
    got = spec.load(file, {"replicas": 2, "env": (("B", "2"),), "name": None}, ["--steps", "20"])
    assert (got.name, got.replicas, got.cpu, got.min) == ("a", 2, "2", 1)
    assert got.env == (("A", "1"), ("B", "2"))
    assert (got.train.steps, got.train.lr) == (20, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[job]\nreplica = 3", r"unknown key job\.replica: did you mean 'replicas'\?"),
        ("[train]\nstepz = 3", r"unknown key 'stepz': did you mean 'steps'\?"),
        ("[jobs]\nreplicas = 3", r"'jobs' is not one of the tables \[job\] and \[train\]"),
        ("replicas = 3", "'replicas' is not one of the tables"),
        ('[job]\nreplicas = "3"', r"job\.replicas is '3': it must be a whole number"),
        ("[job]\nreplicas = true", "must be a whole number"),
        ("[job]\nname = 3", "must be a string"),
        ("[job]\nenv = {A = 1}", r"job\.env\.A is 1: it must be a string"),
        ("[job]\nenv = 'A=1'", "must be a table of strings"),
        ("[job", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path, text, message):
    """The message has the key, what it must be, and the nearest name that exists."""
    with pytest.raises(ConfigError, match=message):
        spec.load(toml(tmp_path, text), {}, [])


def test_a_missing_file_and_two_sources_are_refused(tmp_path):
    """-f of nothing, and trainer settings from two files at once."""
    with pytest.raises(ConfigError, match=r"cannot read the job file .*none\.toml"):
        spec.load(tmp_path / "none.toml", {}, [])
    with pytest.raises(ConfigError, match="--config and -f"):
        spec.load(toml(tmp_path, ""), {}, ["--config=x.toml"])


# -- rules -------------------------------------------------------------------------------------

BROKEN_SPECS = [
    ("world-size", {"replicas": 49}, [], "use at most 48 workers"),
    ("world-size", {"max": 25, "nproc_per_node": 2}, [], "50 workers but only 48 lanes"),
    ("places", {}, ["--data", "/x"], "--data CLAIM/PATH"),
    ("places", {}, ["--run-dir", "/x"], "--name"),
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
    ("env-secret", {"env": (("HF_TOKEN", "x"),)}, [], "Secret"),
    ("env-secret", {"env": (("aws_secret_access_key", "x"),)}, [], "secretKeyRef"),
]


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
    assert {p.id for p in problems} == {id}
    assert all(p.field and p.rule and p.fix for p in problems)


def test_the_rules_have_no_complaint_about_what_we_render():
    """Every golden manifest passes; each rule is exercised by a broken input above."""
    for flags, args in SPECS.values():
        built = spec.load(None, flags, args)
        assert rules.check_spec(built) == []
        assert admission.check_job(manifest.objects(built)[-1]) == []
    assert {id for id, *_ in BROKEN_SPECS} == set(rules.SPEC_RULES)
    assert {id for id, *_ in BROKEN_JOBS} == {*admission.JOB_RULES, "shape"}


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


if __name__ == "__main__":
    for name, arguments in SPECS.items():
        (GOLDEN / f"{name}.yaml").write_text(manifest.to_yaml(render(*arguments)))
