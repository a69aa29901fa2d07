"""The Jobs of `prepare` and `sample`: their pods, and refusals."""

import pytest
from click.testing import CliRunner
from support.manifests import pod_spec, render_job
from support.short_jobs import dry_run, pod_of, server_with_texts

from gptddp.inference.model_commands import sample
from gptddp.k8s.cli.main import cli


@pytest.fixture
def server_in():
    return server_with_texts


@pytest.fixture
def sampled(api, k8s):
    """sampled(job, *options): the Job of `sample` for a job; None: the job is deleted."""

    def run(job, *args):
        if job:
            api.put(job)
        made = []
        api.created["Job"] = made.append
        result = k8s("sample", "demo", "--timeout", "0", *args)
        assert made, result.stderr
        return made[-1]

    return run


def test_prepare_runs_the_command_of_the_image():
    """It has the options, a read-only source and writable data; equal options give equal Jobs. A
    claim for both is mounted once, so that prepare sees whether one folder is inside the other."""
    options = ["--val", "/source/val.jsonl", "--max-bad", "5"]
    args = ("--source", "texts/a/b", "--data", "sets/new", "--", *options)
    job = dry_run(*args)
    (container,) = pod_of(job)["containers"]
    command = ["gptddp", "prepare", "/source/a/b", "--out", "/data/new", *options]
    assert container["command"] == command and "args" not in container
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    assert mounts == {"/data": False, "/source": True, "/tmp": False}
    claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod_of(job)["volumes"]}
    source = {"claimName": "texts", "readOnly": True}
    assert claims == {"data": {"claimName": "sets"}, "source": source, "scratch": None}
    assert job == dry_run(*args)
    one = pod_of(dry_run("--source", "v/raw", "--data", "v/set"))
    command = ["gptddp", "prepare", "/data/raw", "--out", "/data/set"]
    assert one["containers"][0]["command"] == command
    assert [v["name"] for v in one["volumes"]] == ["data", "scratch"]


def test_short_jobs_have_the_pod_of_a_trainer():
    """They meet the restricted standard and cluster requirements, without the launcher's fields."""
    asked = {"node_selector": (("pool", "cpu"),), "image_pull_secret": ("registry",)}
    flags = ("--node-selector", "pool=cpu", "--image-pull-secret", "registry")
    trainer = pod_spec(render_job({"name": "prepare", **asked}))
    pod = pod_of(dry_run("--source", "texts", *flags))
    same = ("securityContext", "automountServiceAccountToken", "enableServiceLinks", "nodeSelector")
    for key in (*same, "imagePullSecrets", "tolerations"):
        assert pod[key] == trainer[key]
    (container,) = pod["containers"]
    assert container["securityContext"] == trainer["containers"][0]["securityContext"]
    assert {e["name"]: e["value"] for e in container["env"]} == {"HOME": "/tmp", "TMPDIR": "/tmp"}
    assert pod["restartPolicy"] == "Never" and "serviceAccountName" not in pod
    assert not {"ports", "livenessProbe"} & container.keys()


def test_one_job_toml_serves_all_commands(tmp_path):
    """Image, namespace, dataset and pod options come from the file; others are ignored."""
    file = tmp_path / "job.toml"
    file.write_text(
        '[job]\nimage = "r.io/g:1"\nnamespace = "team"\ndata = "sets/books"\nreplicas = 4\n'
        'gpus = 8\ncpu = 64\nimage_pull_secret = "registry"\nwithout = "networkpolicy"\n'
        '[train]\nsteps = 5\ndevice = "cuda"\n'
    )
    job = dry_run("--source", "texts", "-f", str(file))
    (container,) = pod_of(job)["containers"]
    assert container["image"] == "r.io/g:1" and job["metadata"]["namespace"] == "team"
    assert "/data/books" in container["command"]
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "4Gi"}
    assert pod_of(job)["imagePullSecrets"] == [{"name": "registry"}]
    assert "nvidia.com/gpu" not in [it["key"] for it in pod_of(job)["tolerations"]]
    job = dry_run("--source", "texts", "-f", str(file), "-n", "mine", "--image", "r.io/g:2")
    assert job["metadata"]["namespace"] == "mine"
    assert pod_of(job)["containers"][0]["image"] == "r.io/g:2"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--source", "v/set/raw", "--data", "v/set"], "is inside --data v/set"),
        (["--source", "v", "--data", "v"], "a separate folder"),
        (["--source", "v/../x"], "--source: 'v/../x' is not the name of a Persist"),
        (["--source", "v", "--wait"], "--dry-run uses no cluster: leave out --wait"),
        (["--source", "v", "--name", "A"], "--name"),
        (["--source", "v", "--", "--vocab", "3"], "after --: No such option '--vocab'"),
        (["--source", "v", "--", "--out", "x"], "with --data"),
        (["--source", "v", "more"], "unexpected argument 'more': name texts with --source"),
        (["--source", "v", "--", "--max-bad", "some"], "after --: Invalid value"),
    ],
)
def test_options_that_cannot_work_are_refused_without_a_cluster(args, words):
    """The exit code is 2, and the error has the option and the fix."""
    result = CliRunner().invoke(cli, ["prepare", "--dry-run", *args])
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


def test_a_sample_runs_where_the_jobs_pods_can(api, sampled):
    """Nodes, account and labels are the job's, options override them; its requests are small."""
    asked = {"service_account": "trainer", "node_selector": (("pool", "gpu"),), "gpus": 2}
    asked |= {"image_pull_secret": ("registry",), "topology": "required=rack", "queue": "team"}
    for name in ("trainer", "mine"):
        api.put({"kind": "ServiceAccount", "metadata": {"name": name}})
    job = render_job({"name": "demo", **asked})
    pod_spec(job)["schedulingGates"] = [{"name": "kueue.x-k8s.io/topology"}]  # Kueue removes it
    made = sampled(job, "--service-account", "mine")
    spec, meta = pod_of(made), made["spec"]["template"]["metadata"]
    assert spec["serviceAccountName"] == "mine" and spec["nodeSelector"] == {"pool": "gpu"}
    assert "schedulingGates" not in spec
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert "nvidia.com/gpu" in [it["key"] for it in spec["tolerations"]]
    assert spec["containers"][0]["resources"]["requests"] == {"cpu": "100m", "memory": "256Mi"}
    assert meta["labels"]["app.kubernetes.io/component"] == "sample"
    assert meta["annotations"] == {}  # nothing for Kueue or Prometheus
    assert pod_of(sampled(None, "--node-selector", "pool=cpu"))["nodeSelector"] == {"pool": "cpu"}


def test_a_patch_applies_to_the_short_jobs_pods_too(sampled, tmp_path):
    """It sets cluster requirements that have no flag."""
    file = tmp_path / "patch.yaml"
    file.write_text(
        "spec: {pytorchReplicaSpecs: {Worker: {template: {metadata: {labels: {team: nlp}}, "
        "spec: {runtimeClassName: nvidia}}}}}"
    )
    jobs = [dry_run("--source", "texts", "--patch", str(file))]
    jobs += [sampled(job, "--patch", str(file)) for job in (None, render_job({"name": "demo"}))]
    for job in jobs:
        assert pod_of(job)["runtimeClassName"] == "nvidia"
        assert job["spec"]["template"]["metadata"]["labels"]["team"] == "nlp"


def test_sample_passes_every_option_of_gptddp_sample_to_the_pod(sampled):
    """The pod gets given values and else the defaults; --data is missing, as it is a claim here."""
    names = {it.name for it in sample.params} - {"run", "data"}
    for args, given in (
        (
            ("--top-p", "0.9", "--top-k", "7", "--prompt", "a b", "--step", "9"),
            {"top_p": 0.9, "top_k": 7, "step": 9},
        ),
        ((), {}),
    ):
        command = pod_of(sampled(None, *args))["containers"][0]["command"]
        options = command[command.index("/runs/demo") :]
        context = sample.make_context("sample", list(options))
        told = {it.partition("=")[0] for it in options[1:]}
        left_out = set() if given else {"step"}  # by default the newest valid checkpoint
        assert told == {"--" + name.replace("_", "-") for name in names - left_out}
        prompt = {"prompt": "a b"} if given else {}
        wanted = sample.make_context("sample", ["/runs/demo"]).params | given | prompt
        assert context.params == wanted


def test_sample_takes_image_and_claims_from_the_job(sampled):
    """Options override the job's; the run is mounted read-only."""
    job = render_job({"name": "demo", "image": "mine:1", "data": "texts/set", "runs": "runs"})
    spec = pod_of(sampled(job, "--memory", "9Gi"))
    (container,) = spec["containers"]
    assert container["image"] == "mine:1" and "/runs/demo" in container["command"]
    assert container["resources"]["limits"]["memory"] == "9Gi"
    mounts = {it["mountPath"]: (it["name"], it.get("readOnly")) for it in container["volumeMounts"]}
    assert mounts == {"/data": ("data", True), "/runs": ("runs", True), "/tmp": ("scratch", None)}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"][:2]]
    assert claims == ["texts", "runs"]
    given = pod_of(sampled(job, "--runs", "texts/old", "--data", "texts", "--image", "i:2"))
    (container,) = given["containers"]
    assert container["image"] == "i:2" and "/runs/old/demo" in container["command"]
    names = {it["name"] for it in container["volumeMounts"] if it["mountPath"] != "/tmp"}
    assert names == {"data"} and len(given["volumes"]) == 2  # one claim, mounted once


def test_sample_uses_the_jobs_own_code(api, sampled, tmp_path):
    """The job's archive is laid over the image's code: its own model makes the text."""
    (tmp_path / "mine.py").write_text("x = 1\n")
    job = render_job({"name": "demo", "code": str(tmp_path)})
    (volume,) = [it for it in pod_spec(job)["volumes"] if it["name"] == "code"]
    api.put({"kind": "ConfigMap", "metadata": {"name": volume["configMap"]["name"]}})
    spec = pod_of(sampled(job))
    (container,) = spec["containers"]
    at, archive = container["command"].index("--code"), pod_spec(job)["containers"][0]["args"][1]
    assert container["command"][at - 3 : at] == ["python", "-m", "gptddp.launch.overlay"]
    assert container["command"][at + 1 : at + 4] == [archive, "gptddp", "sample"]
    mount = {"name": "code", "mountPath": "/code", "readOnly": True}
    assert mount in container["volumeMounts"] and volume in spec["volumes"]
