"""Golden manifests, and the parts of a manifest."""

import copy
import os
import subprocess
import time
from pathlib import Path

import pytest
from support.manifests import SPECS, built, container, render, render_job, worker

from gptddp import config
from gptddp.errors import ConfigError
from gptddp.flags import from_args
from gptddp.k8s.objects import argument, claim_at, volume_claims
from gptddp.k8s.render import manifest, spec

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_renders_its_golden_manifest(name):
    """The manifest of a spec is the file that a user may copy, byte for byte. After an intended
    change: `PYTHONPATH=tests python tests/k8s/test_manifest.py`."""
    assert manifest.to_yaml(render(*SPECS[name])) == (GOLDEN / f"{name}.yaml").read_text()


def test_a_changed_spec_has_another_hash_and_rendezvous():
    """The annotation and rdzvId depend on the manifest alone. A patch without a change, or a
    namespace, leaves the same job."""
    one, two, three = render_job(), render_job(args=["--steps", "7"]), patched("All")
    hashes = [job["metadata"]["annotations"][manifest.SPEC_HASH] for job in (one, two, three)]
    assert len(set(hashes)) == 3 and patched("Running") == one
    there = render_job({"namespace": "team-a"})
    assert there["metadata"].pop("namespace") == "team-a" and there == one
    for job, digest in zip((one, two, three), hashes, strict=True):
        assert job["spec"]["elasticPolicy"]["rdzvId"] == f"gptddp-{digest[:8]}"
        bare = copy.deepcopy(job)
        del bare["metadata"]["annotations"], bare["spec"]["elasticPolicy"]["rdzvId"]
        assert manifest.spec_hash(bare) == digest


def patched(clean):
    """A job with a patch of cleanPodPolicy, Running by default."""
    return manifest.pytorchjob(built(patch={"spec": {"runPolicy": {"cleanPodPolicy": clean}}}))


@pytest.mark.parametrize(
    ("age_s", "alive"),
    [(None, True), (-3600, True), (0, True), (350, True), (500, False), (86400, False)],
)
def test_the_liveness_probe_kills_a_pod_only_for_a_hanging_launcher(tmp_path, age_s, alive):
    """It passes before the first touch, and for a grace period and five minutes after the last."""
    file = tmp_path / "alive"
    if age_s is not None:
        file.touch()
        os.utime(file, times=(time.time() - age_s,) * 2)
    own = container(render_job({"grace_s": 60}))
    probe, env = own["livenessProbe"], {e["name"]: e.get("value") for e in own["env"]}
    assert Path(env["GPTDDP_ALIVE"]).parent == Path("/tmp")
    env = os.environ | {"GPTDDP_ALIVE": str(file)}
    done = subprocess.run(probe["exec"]["command"], env=env, stderr=subprocess.DEVNULL)
    assert (done.returncode == 0) == alive
    done = subprocess.run(
        ["/bin/sh", *probe["exec"]["command"][1:]],
        env=env | {"PATH": "/nowhere"},
        stderr=subprocess.DEVNULL,
    )
    assert done.returncode == 0  # an image without `find`
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 180


def test_trainer_settings_reach_the_container_unchanged():
    """The container's arguments give every trainer option its given value."""
    args = ["--steps=9", "--betas", "0.8,0.99", "--lr", "1e-4", "--max-time", "90", "--seed", "0"]
    args += ["--weight-decay", "0.1"]  # the default value, given explicitly
    args += ["--device", "cpu"]  # also with GPUs
    given = from_args(args)
    parsed = from_args(container(render_job({"gpus": 1}, args))["args"])
    places = {"data", "run_dir", "preset", "metrics_port"}
    for name in set(config.FIELDS) - places:
        assert getattr(parsed, name) == getattr(given, name), name


# -- job.toml ----------------------------------------------------------------------------------


def toml(tmp_path, text):
    path = tmp_path / "job.toml"
    path.write_text(text, newline="")
    return path


def test_flags_win_over_the_file(tmp_path):
    """Defaults < file < flags, for the job and for the trainer; env is merged by name. A file from
    Windows may have a byte order mark and CRLF."""
    file = toml(
        tmp_path,
        '\ufeff[job]\r\nname = "a"\nreplicas = 8\ncpu = 2\nenv = {A = "1", B = "1"}\r\n'
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
        ("[job]\nreplicas = true", "is true: it must be a whole number"),
        ("[job.env]\nsince = 2026-11-23", r"env\.since is 2026-11-23: it must be a string"),
        ("job = 5", r"job must be one table: write \[job\] above its keys"),
        ("[[train]]\nsteps = 5", r"train must be one table"),
        ("[job]\nname = 3", "must be a string"),
        ("[job]\nenv = {A = 1}", r"job\.env\.A is 1: it must be a string"),
        ("[job]\nenv = 'A=1'", "must be a table of strings"),
        ('[job]\nenv = {A = "\\u0000"}', r"job\.env\.A is .*: NUL characters are not allowed"),
        ('[job]\ncode = "\\u0000"', "NUL characters are not allowed"),
        ("[job]\ncode = 3", r"job\.code is 3: it must be the name of a folder"),
        ("[job", "is not valid TOML"),
        ("[job]\ntoleration = 1", r"job\.toleration is 1: it must be a list of strings"),
        ("[job]\ntoleration = [1]", "a list of strings"),
        ('[job]\nnode_selector = ["a=b"]', "a table of strings"),
        ("[job]\nnode_selector = {a = true}", r"node_selector\.a is true: it must be a string"),
        ('[job]\nresource = {"a/b" = true}', "a quantity"),
        ("[job]\npatch = 3", "a table, or the name of a YAML file"),
        ("[job]\npatch = {a = 2026-01-01}", "JSON does not have .*put dates"),
        ('[job]\npatch = "none.yaml"', r"cannot read the file .*none\.yaml: No such file"),
        ('[job]\npatch = "bad.yaml"', r"bad\.yaml is not YAML: line \d"),
    ],
)
def test_a_wrong_job_toml_is_refused_with_its_key(tmp_path, text, message):
    """The message has the key, the required type, and the nearest existing name; for a YAML file,
    its error."""
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=message):
        spec.load(toml(tmp_path, text), {}, [])


def test_a_missing_file_and_two_sources_are_refused(tmp_path):
    """-f may not name a missing file or a manifest; trainer settings come from one file."""
    with pytest.raises(ConfigError, match="`kubectl create -f` submits a"):
        spec.load(tmp_path / "job.yaml", {}, [])
    with pytest.raises(ConfigError, match=r"cannot read the job file .*none\.toml"):
        spec.load(tmp_path / "none.toml", {}, [])
    with pytest.raises(ConfigError, match="--config and -f"):
        spec.load(toml(tmp_path, ""), {}, ["--config=x.toml"])


def test_metrics_have_the_given_port_or_none():
    """--metrics-port 0 removes the port everywhere; by default there is one."""
    job = render_job({"replicas": 2}, ["--metrics-port", "0"])
    objects = render({}, ["--metrics-port", "0"])
    text = manifest.to_yaml(objects)
    assert len(objects[1]["spec"]["ingress"]) == 1
    assert "9464" not in text and "metrics" not in text.replace("--metrics-port", "")
    assert [port["name"] for port in container(job)["ports"]] == ["pytorchjob-port"]
    assert str(manifest.METRICS_PORT) in str(render_job({"replicas": 2}))
    assert "9999" in str(render_job({}, ["--metrics-port", "9999"]))


def test_one_claim_for_data_and_runs_is_one_volume():
    """The volume is mounted twice, the dataset read-only; a path in it holds the runs."""
    job = render_job({"data": "all/books", "runs": "all/my/runs", "name": "demo"})
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert [name for name, _ in volume_claims(template)] == ["data"]
    assert claim_at(template, "/data") == claim_at(template, "/runs") == "all"
    assert argument(template, "--run-dir") == "/runs/my/runs/demo"
    assert argument(template, "--data") == "/data/books"
    mounts = {it["mountPath"]: it.get("readOnly") for it in container(job)["volumeMounts"]}
    assert mounts["/data"] is True and mounts["/runs"] is None


QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"


def test_the_queue_is_a_label_of_the_job_alone():
    """On the pods Kueue would queue each separately. The manifest does not suspend the job: Kueue
    does, and applying the manifest again must not undo an admission."""
    *companions, job = render({"queue": "team", "priority": "high"})
    assert job["metadata"]["labels"].items() >= {QUEUE: "team", PRIORITY: "high"}.items()
    assert "suspend" not in job["spec"]["runPolicy"]
    for other in (worker(job)["template"], *companions):
        assert not {QUEUE, PRIORITY} & set(other["metadata"]["labels"])


@pytest.mark.parametrize(
    ("wish", "kind", "value"),
    [
        ("required=example.com/rack", "required", "example.com/rack"),
        ("preferred=kubernetes.io/hostname", "preferred", "kubernetes.io/hostname"),
        ("unconstrained", "unconstrained", "true"),
    ],
)
def test_the_topology_is_an_annotation_of_the_pods(wish, kind, value):
    """It is added to the pods' other annotations."""
    job = render_job({"queue": "team", "topology": wish})
    found = worker(job)["template"]["metadata"]["annotations"]
    assert found[f"kueue.x-k8s.io/podset-{kind}-topology"] == value
    assert "prometheus.io/port" in found


if __name__ == "__main__":
    for name, arguments in SPECS.items():
        (GOLDEN / f"{name}.yaml").write_text(manifest.to_yaml(render(*arguments)))
