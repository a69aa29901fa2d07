"""Every rule, with an input that breaks it."""

import re

import pytest
from support.manifests import SPECS, container, render_job

from gptddp.errors import ConfigError
from gptddp.k8s.render import admission, manifest, quantity, rules, spec

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
