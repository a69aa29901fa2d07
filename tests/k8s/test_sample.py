"""`sample` on a cluster: its short Job, and its way through a small API server."""

import pytest
from support.manifests import pod_spec, render_job
from support.short_jobs import pod_of, run_pods, server_with_texts

from gptddp.inference.commands import sample


@pytest.fixture
def server_in():
    return server_with_texts


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
    assert "quota: small, requested: pods=1; see `kubectl describe resourcequota" in result.stderr
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
