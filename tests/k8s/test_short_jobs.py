"""The short Jobs of prepare and sample: their objects, and their way through a small API server."""

import pytest
from click.testing import CliRunner
from support.api_server import Log
from support.manifests import pod_spec, render_job
from support.short_jobs import dry_run, pod_of
from support.writable_api_server import WriteAPI

from gptddp.inference.commands import sample
from gptddp.k8s.cli.main import cli

PREPARE = ("prepare", "--source", "texts/books")


@pytest.fixture
def api(tmp_path):
    server = WriteAPI(tmp_path)
    for claim in ("data", "runs", "texts"):
        server.put({"kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": {}})
    yield server
    server.close()


def run_pods(api, message="", log=(), **state):
    """Every Job that is created gets a pod that has ended with this state, and ends with it."""

    def ended(body):
        name = body["metadata"]["name"]
        code = state.get("exitCode", 0)
        terminated = {"terminated": {"exitCode": code, "message": message, **state}}
        container = {"name": "c", "image": "i", "state": state.get("state", terminated)}
        api.put(
            {
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-pod",
                    "creationTimestamp": "2026-11-21T09:00:00Z",
                    "labels": {"batch.kubernetes.io/job-name": name},
                },
                "status": {
                    "phase": "Failed" if code else "Succeeded",
                    "containerStatuses": [container],
                    **state.get("status", {}),
                },
            }
        )
        api.logs[f"{name}-pod"] = Log([("2026-11-21T09:00:00.000000001Z", line) for line in log])
        if not state.get("state") and not state.get("status"):
            kind = "Failed" if code else "Complete"
            body["status"] = {"conditions": [{"type": kind, "status": "True"}]}

    api.created["Job"] = ended


# -- the objects -------------------------------------------------------------------------------


def test_prepare_runs_the_images_own_command():
    """Source read-only, data writable, options as given; the same bytes for the same options."""
    job = dry_run("--source", "texts/a/b", "--data", "sets/new", "--", "--vocab-size", "4096")
    (container,) = pod_of(job)["containers"]
    assert container["command"] == [
        *("gptddp", "prepare", "/source/a/b", "--out", "/data/new", "--vocab-size", "4096")
    ]
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    assert mounts == {"/data": False, "/source": True, "/tmp": False}
    claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod_of(job)["volumes"]}
    assert claims["data"] == {"claimName": "sets"} and claims["source"] == {"claimName": "texts"}
    assert job == dry_run(
        "--source", "texts/a/b", "--data", "sets/new", "--", "--vocab-size", "4096"
    )


def test_source_and_data_in_one_claim_are_mounted_once():
    """So that prepare can see whether one folder lies in the other."""
    job = dry_run("--source", "v/raw", "--data", "v/set")
    (container,) = pod_of(job)["containers"]
    assert container["command"] == ["gptddp", "prepare", "/data/raw", "--out", "/data/set"]
    assert len(pod_of(job)["volumes"]) == 2  # and the scratch folder


def test_a_validation_source_is_in_the_volume_of_the_texts():
    """All options of `gptddp prepare` go through; --val has to be a path that the pod has."""
    options = ["--on-bad", "skip", "--max-bad", "5", "--keep-copies", "--val"]
    for args, val in (
        (["--source", "texts/a"], "/source/val.jsonl"),
        (["--source", "v/raw", "--data", "v/set"], "/data/raw/val"),
    ):
        (container,) = pod_of(dry_run(*args, "--", *options, val))["containers"]
        assert container["command"][-len(options) - 1 :] == [*options, val]


def test_short_jobs_meet_the_restricted_standard():
    """As the trainer's pods: the very same parts."""
    trainer, pod = pod_spec(render_job()), pod_of(dry_run("--source", "texts"))
    for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert pod[key] == trainer[key]
    assert pod["containers"][0]["securityContext"] == trainer["containers"][0]["securityContext"]
    env = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
    assert env == {"HOME": "/tmp", "TMPDIR": "/tmp"} and pod["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--source", "v/set/raw", "--data", "v/set"], "lies in --data v/set"),
        (["--source", "v", "--data", "v"], "a folder of its own"),
        (["--source", "/mnt/x"], "PersistentVolumeClaim"),
        (["--source", "v/../x"], "without '..'"),
        (["--source", "v", "--cpu", "many"], "--cpu: 'many'"),
        (["--source", "v", "--wait"], "--dry-run asks no cluster: leave out --wait"),
        (["--source", "v", "--image", ""], "--image"),
        (["--source", "v", "--name", "A"], "--name: 'A'"),
        (["--source", "v", "--", "--vocab", "3"], "after --: No such option '--vocab'"),
        (["--source", "v", "--", "--out", "x"], "with --data"),
        (["--source", "v", "--", "more"], "with --source"),
        (["--source", "v/a", "--", "--val", "b"], "such as /source/a/val.jsonl"),
        (["--source", "v/a", "--data", "v/b", "--", "--val", "/source/b"], "at /data: give a path"),
        (["--source", "v", "--", "--on-bad", "quarantine"], "after --: Invalid value"),
    ],
)
def test_what_cannot_work_is_refused_before_a_cluster_is_asked(args, words):
    """Exit code 2, the option and the fix."""
    result = CliRunner().invoke(cli, ["prepare", "--dry-run", *args])
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


# -- prepare -----------------------------------------------------------------------------------


def test_prepare_returns_at_once_and_does_nothing_twice(api, k8s):
    """Created, then unchanged; its running Job refuses other options with the difference."""
    first = k8s(*PREPARE)
    assert (first.exit_code, first.stdout) == (0, "job.batch/prepare created\n")
    again = k8s(*PREPARE)
    assert again.stdout == "job.batch/prepare unchanged\n" and "is running" in again.stderr
    other = k8s(*PREPARE, "--cpu", "2")
    assert other.exit_code == 2 and "resources.limits.cpu: 1 -> 2" in other.stderr
    assert api.writes == ["create Job"]


def test_prepare_waits_and_follows(api, k8s):
    """The log on stdout, what to type next on stderr."""
    run_pods(api, log=["reading", "writing"])
    result = k8s(*PREPARE, "--follow")
    assert result.exit_code == 0, result.output
    assert result.stdout == "job.batch/prepare created\nreading\nwriting\n"
    assert "gptddp-k8s submit --data data" in result.stderr


def test_a_failed_prepare_tells_why_and_is_run_again(api, k8s):
    """Exit code 100 with the program's last words; the same command replaces it."""
    run_pods(api, message="Error: cannot read /source/books: check the path", exitCode=2)
    result = k8s(*PREPARE, "--wait")
    assert result.exit_code == 100
    assert "prepare failed: cannot read /source/books: check the path" in result.stderr
    again = k8s(*PREPARE, "--wait")
    assert "the last Job prepare failed: cannot read" in again.stderr
    assert api.writes == ["create Job", "delete Job", "create Job"]


def test_a_done_prepare_makes_room_for_another(api, k8s):
    """Other options after the end: replaced without a word of refusal."""
    run_pods(api)
    k8s(*PREPARE, "--wait")
    assert k8s(*PREPARE, "--wait", "--", "--seed", "3").exit_code == 0
    assert api.writes == ["create Job", "delete Job", "create Job"]


def test_a_job_of_somebody_else_is_left_alone(api, k8s):
    """A batch Job of that name which is not of gptddp-k8s: refused, with --name."""
    api.put({"kind": "Job", "metadata": {"name": "prepare"}, "spec": {}})
    result = k8s(*PREPARE)
    assert result.exit_code == 2 and "not from gptddp-k8s: use another --name" in result.stderr
    assert api.writes == []


def test_a_prepare_that_is_deleted_meanwhile_has_failed(api, k8s):
    """By whoever: exit code 100."""
    api.created["Job"] = lambda body: api.remove("Job", "prepare")
    result = k8s(*PREPARE, "--wait")
    assert result.exit_code == 100 and "prepare was deleted before it ended" in result.stderr


def test_a_missing_source_claim_is_named(api, k8s):
    """Nothing is created."""
    result = k8s("prepare", "--source", "nope/x")
    assert result.exit_code == 2 and "no claim nope (--source)" in result.stderr
    assert api.writes == []


# -- sample ------------------------------------------------------------------------------------


def test_sample_prints_the_text_alone_and_deletes_its_job(api, k8s):
    """stdout is the sample; step and seed are on stderr; no Job is left."""
    run_pods(api, message="step 40, seed 0", log=["def f():", "    pass"])
    result = k8s("sample", "demo", "--prompt", "def")
    assert result.exit_code == 0, result.output
    assert result.stdout == "def f():\n    pass\n" and result.stderr == "step 40, seed 0\n"
    assert api.all() == []


def test_a_sample_whose_job_cannot_be_deleted_is_not_lost(api, k8s):
    """The text on stdout and exit code 0 all the same; the Job that is left is named."""
    run_pods(api, message="step 40, seed 0", log=["def f():"])
    api.forbidden = {"DELETE jobs"}
    result = k8s("sample", "demo")
    assert (result.exit_code, result.stdout) == (0, "def f():\n")
    ((_, left),) = [it for it in api.all() if it[0] == "Job"]
    assert f"`kubectl delete job {left} -n default`" in result.stderr


def test_a_sample_of_a_name_that_no_job_has_names_those_that_there_are(api, k8s):
    """A run may outlive its job; where there is none either, `status` has nothing to say."""
    api.put(render_job({"name": "demo2"}))
    run_pods(api, message="/runs/demo is not a run directory", exitCode=4)
    result = k8s("sample", "demo")
    assert result.exit_code == 100 and "is not a run directory; and no PyTorchJob" in result.stderr
    assert "there are demo2" in result.stderr and "status demo" not in result.stderr


def test_sample_hands_every_option_of_gptddp_sample_to_the_pod(api, k8s):
    """But --data, which is a claim here: what is given, and else the same default as there."""
    made = []
    api.created["Job"] = made.append
    k8s("sample", "demo", "--timeout", "0", "--top-p", "0.9", "--top-k", "7", "--prompt", "a b")
    k8s("sample", "demo", "--timeout", "0")
    names = {it.name for it in sample.params} - {"run", "data"}
    for job, given in zip(made, ({"top_p": 0.9, "top_k": 7, "prompt": "a b"}, {}), strict=True):
        command = pod_of(job)["containers"][0]["command"]
        options = command[command.index("/runs/demo") :]
        context = sample.make_context("sample", list(options))
        assert {it.partition("=")[0] for it in options[1:]} == {
            "--" + name.replace("_", "-") for name in names
        }
        wanted = sample.make_context("sample", ["/runs/demo"]).params | given
        assert context.params == wanted


def test_sample_takes_image_and_claims_from_the_job(api, k8s):
    """What is given wins over the job's; the run is the job's."""
    flags = {"name": "demo", "image": "mine:1", "data": "texts/set", "runs": "runs"}
    api.put(render_job(flags))
    made = []
    api.created["Job"] = made.append
    k8s("sample", "demo", "--timeout", "0", "--memory", "9Gi")
    (container,) = pod_of(made[0])["containers"]
    assert container["image"] == "mine:1" and "/runs/demo" in container["command"]
    assert container["resources"]["limits"]["memory"] == "9Gi"
    assert all(m.get("readOnly") for m in container["volumeMounts"] if m["name"] != "scratch")
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod_of(made[0])["volumes"][:2]]
    assert claims == ["texts", "runs"]
    assert api.writes == ["create Job", "delete Job"]


def test_sample_of_another_kind_of_job_is_refused(api, k8s):
    """One without the volumes of data and runs has no checkpoint that is known here."""
    job = render_job({"name": "demo"})
    pod_spec(job)["volumes"] = []
    api.put(job)
    result = k8s("sample", "demo")
    assert result.exit_code == 2 and "has no volumes data and runs: is it of" in result.stderr


def test_sample_runs_on_the_code_of_the_job(api, k8s, tmp_path):
    """The text of an own model is made by that model: the same archive, laid over the image's."""
    (tmp_path / "mine.py").write_text("x = 1\n")
    job = render_job({"name": "demo", "code": str(tmp_path)})
    volumes = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["volumes"]
    (name,) = (
        source["configMap"]["name"]
        for volume in volumes
        for source in volume.get("projected", {"sources": [volume]})["sources"]
        if "configMap" in source
    )
    api.put(job, {"kind": "ConfigMap", "metadata": {"name": name}})
    made = []
    api.created["Job"] = made.append
    k8s("sample", "demo", "--timeout", "0")
    (container,) = pod_of(made[0])["containers"]
    (own,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    at = container["command"].index("--code")
    assert container["command"][at - 3 : at] == ["python", "-m", "gptddp.launch.overlay"]
    assert container["command"][at + 1 : at + 4] == [own["args"][1], "gptddp", "sample"]
    mount = {"name": "code", "mountPath": "/code", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert "configMap" in {v["name"]: v for v in pod_of(made[0])["volumes"]}["code"]


def test_sample_of_a_claim_that_is_gone_is_refused(api, k8s):
    """Its pod would wait for it for ever."""
    api.put(render_job({"name": "demo"}))
    api.remove("PersistentVolumeClaim", "runs")
    result = k8s("sample", "demo")
    assert result.exit_code == 2 and "no claim runs" in result.stderr and api.writes == []


def test_sample_without_a_checkpoint_says_so(api, k8s):
    """Exit code 100 with gptddp's own words, and no Job left."""
    api.put(render_job({"name": "demo"}))
    run_pods(api, message="Error: /runs/demo has no checkpoint yet", exitCode=4)
    result = k8s("sample", "demo")
    assert result.exit_code == 100 and "has no checkpoint yet" in result.stderr
    assert "gptddp-k8s status demo" in result.stderr and api.writes[-1] == "delete Job"


def test_sample_with_a_missing_image_does_not_wait(api, k8s):
    """The kubelet's words, and the option."""
    run_pods(api, state={"waiting": {"reason": "ImagePullBackOff", "message": "no such host"}})
    result = k8s("sample", "demo")
    assert result.exit_code == 100 and "cannot get the image i" in result.stderr
    assert "no such host" in result.stderr and "--image" in result.stderr


def test_sample_that_no_node_takes_says_so_and_times_out(api, k8s):
    """The scheduler's words while waiting, exit code 124, and no Job left."""
    condition = {"type": "PodScheduled", "status": "False", "message": "2 Insufficient cpu. x"}
    run_pods(api, status={"phase": "Pending", "conditions": [condition], "containerStatuses": []})
    result = k8s("sample", "demo", "--timeout", "0.5")
    assert result.exit_code == 124 and "is not done after 0.5 s" in result.stderr
    assert result.stderr.count("no node takes it: 2 Insufficient cpu") == 2  # at once, at the end
    assert f"describe nodes --kubeconfig {api.kubeconfig}`" in result.stderr
    assert api.writes == ["create Job", "delete Job"]


def test_a_pod_that_is_refused_is_told_from_the_events(api, k8s):
    """Without a pod there is only the event of the Job's controller."""
    about = {"reason": "FailedCreate", "involvedObject": {"name": "demo-sample-x1y2z"}}
    api.put({"kind": "Event", "metadata": {"name": "e"}, "message": "exceeded quota", **about})
    other = {**about, "reason": "Suspended"}
    api.put({"kind": "Event", "metadata": {"name": "f"}, "message": "Job suspended", **other})
    result = k8s("sample", "demo", "--timeout", "0.5")
    assert result.exit_code == 124 and "exceeded quota" in result.stderr


def test_a_program_that_was_killed_for_its_memory_is_told(api, k8s):
    """It says nothing itself, and its Job's condition only that it was tried often enough."""
    run_pods(api, exitCode=137, reason="OOMKilled")
    result = k8s("sample", "demo", "--timeout", "5")
    assert result.exit_code == 100 and "killed for using more than its memory" in result.stderr


def test_a_refused_pod_is_told_once_with_the_object_and_a_command(api, k8s):
    """Each pod of a Job has another name, which is no news; the command names a Job."""
    about = {"reason": "FailedCreate", "involvedObject": {"name": "demo-sample-x1y2z"}}
    for n, said in enumerate(["exceeded quota: small, requested: pods=1"] * 3):
        message = f'Error creating: pods "demo-sample-x1y2z-{n}" is forbidden: {said}'
        at = f"2026-11-21T09:00:0{n}Z"
        event = {"kind": "Event", "metadata": {"name": f"e{n}"}, "lastTimestamp": at}
        api.put({**event, "message": message, **about})
    result = k8s("sample", "demo", "--timeout", "0.5")
    assert "see `kubectl describe resourcequota small" in result.stderr
    assert "demo-sample-x1y2z-" not in result.stderr
    api.put({**event, "message": 'Error creating: pods "x" is forbidden: a new reason', **about})
    assert "`kubectl describe job demo-sample-" in k8s("sample", "demo", "--timeout", "0.5").stderr


def test_delete_of_the_job_takes_its_short_jobs(api, k8s):
    """What a killed sample left goes with the job."""
    api.cut_at = 1  # its own delete does not come through
    k8s("sample", "demo", "--timeout", "0")
    api.cut_at = None
    assert [kind for kind, _ in api.all()] == ["Job"]
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and 'job.batch "demo-sample-x1y2z" deleted' in result.stdout
    assert api.all() == []
