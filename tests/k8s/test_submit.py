"""`submit` against a small API server on a real socket."""

import json
import os
import shlex

import pytest
from support.api_server import PLURALS as KINDS
from support.manifests import worker
from support.queue_cases import QUEUE
from support.writable_api_server import end, job, submit

from gptddp.k8s.act import submit as act
from gptddp.k8s.objects import SUBMIT_LINE
from gptddp.k8s.render import manifest, spec

RENDERED = ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"]
COMPANIONS = [*RENDERED, "Secret"]


def owners(api):
    """The uids of all owners of a job's companions."""
    found = [api.objects[KINDS[kind], "demo"]["metadata"]["ownerReferences"] for kind in COMPANIONS]
    return {owner["uid"] for of_one in found for owner in of_one}


# -- submit ------------------------------------------------------------------------------------


def test_submit_creates_companions_first_and_makes_the_job_their_owner(api, k8s, tmp_path):
    """Rendered objects, own code and a Secret are created in the order of render, the job last;
    then the job becomes the owner of each."""
    (tmp_path / "large.py").write_text("#" + os.urandom(1_000_000).hex())
    result = submit(k8s, "--code", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.stdout == "pytorchjob.kubeflow.org/demo created\n"
    assert "gptddp-k8s status demo" in result.stderr and "gptddp-k8s prepare" in result.stderr
    beside = ["ConfigMap", "ConfigMap", *COMPANIONS]
    created = [f"create {kind}" for kind in [*beside, "PyTorchJob"]]
    assert api.writes == created + [f"patch {kind}" for kind in beside]
    assert owners(api) == {job(api)["metadata"]["uid"]}
    for kind in COMPANIONS:
        (owner,) = api.objects[KINDS[kind], "demo"]["metadata"]["ownerReferences"]
        assert owner["controller"] is owner["blockOwnerDeletion"] is False


def test_the_job_has_the_command_that_created_it(api, k8s):
    """The command is quoted for a shell; the rest of the job is the output of render."""
    submit(k8s, "--env", "A=b c", "--", "--steps", "9")
    given = {"name": "demo", "replicas": 4, "env": [("A", "b c")]}
    rendered = manifest.objects(spec.load(None, given, ["--steps", "9"]))[-1]
    notes = job(api)["metadata"]["annotations"]
    words = shlex.split(notes.pop(SUBMIT_LINE))
    assert words[:2] == ["gptddp-k8s", "submit"] and words[-5:] == [
        *("--env", "A=b c", "--", "--steps", "9")
    ]
    assert notes == rendered["metadata"]["annotations"] and job(api)["spec"] == rendered["spec"]


@pytest.mark.parametrize("kind", [*COMPANIONS, "PyTorchJob"])
def test_two_submits_at_the_same_time_end_with_one_job(api, k8s, kind):
    """Both succeed, whatever the first has created when the second begins."""
    other = []

    def second(body):
        api.created.clear()
        other.append(submit(k8s))

    api.created[kind] = second
    first = submit(k8s)
    assert (first.exit_code, other[0].exit_code) == (0, 0), (first.stderr, other[0].stderr)
    assert sorted(api.all()) == sorted((kind, "demo") for kind in [*COMPANIONS, "PyTorchJob"])
    assert owners(api) == {job(api)["metadata"]["uid"]}


def test_submitting_a_job_again_changes_nothing(api, k8s):
    """The exit code is 0 and nothing is written; changes by others are reported, and stay."""
    submit(k8s)
    end(api, "Running")
    del api.writes[:]
    result = submit(k8s)
    assert (result.exit_code, result.stdout) == (0, "pytorchjob.kubeflow.org/demo unchanged\n")
    assert "was submitted with these options and is Running" in result.stderr
    worker(job(api))["replicas"] = 2
    worker(job(api))["template"]["spec"]["nodeSelector"] = {"of": "Kueue"}
    result = submit(k8s)
    assert "was changed later" in result.stderr and "Worker.replicas: 2 -> 4" in result.stderr
    assert "Kueue" not in result.stderr and api.writes == []


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        ("Succeeded", 0, "--replace and more --steps"),
        ("Failed", 100, "--replace continues its run from the newest checkpoint"),
        ("Suspended", 0, "`gptddp-k8s resume demo"),
    ],
)
def test_a_job_that_does_not_run_is_not_changed(api, k8s, state, code, words):
    """A note has the next command. The exit code says how the job ended, with --wait too."""
    submit(k8s)
    end(api, state)
    job(api)["spec"]["runPolicy"]["suspend"] = state == "Suspended"
    api.remove("NetworkPolicy", "demo")
    del api.writes[:]
    result = submit(k8s, *["--wait"] * (state != "Suspended"))
    assert result.exit_code == code
    assert api.writes == ["create NetworkPolicy"] * (state == "Suspended")
    assert f"is {state}" in result.stderr and words in result.stderr


def test_another_job_of_the_name_is_refused_with_the_difference(api, k8s):
    """The error has a line `path: old -> new` for each difference, and the ways out."""
    submit(k8s, "--", "--steps", "400")
    del api.writes[:]
    result = submit(k8s, "--cpu", "2", "--", "--steps", "900", "--seed", "3")
    assert result.exit_code == 2 and api.writes == []
    lines = [line.split("containers[pytorch].")[-1] for line in result.stderr.splitlines()]
    assert "args[--steps]: 400 -> 900" in lines and "args[--seed]: (none) -> 3" in lines
    assert "resources.limits.cpu: 1 -> 2" in lines
    assert "gptddp-k8s delete demo --kubeconfig" in result.stderr and "--name" in result.stderr
    assert "rdzvId" not in result.stderr and "gptddp-k8s scale" not in result.stderr
    end(api, "Failed")
    result = submit(k8s, "--cpu", "2")
    assert "--replace deletes it" in result.stderr and "gptddp-k8s delete" not in result.stderr


def test_another_size_suggests_scale_if_it_works(api, k8s):
    """`scale` is suggested within the job's bounds, and not for a job that Kueue would stop."""
    submit(k8s)
    for count, named in (("1", False), ("2", True), ("5", False)):
        result = k8s("submit", "--name", "demo", "--replicas", count)
        assert result.exit_code == 2, count
        assert (f"`gptddp-k8s scale demo{flags(api)} --replicas {count}`" in result.stderr) is named
        command = k8s("scale", "demo", "--replicas", count)
        assert (command.exit_code == 0) is named, count
    worker(job(api))["replicas"] = 4
    job(api)["metadata"]["labels"][QUEUE] = "team"
    for suspended in (True, False):
        job(api)["spec"]["runPolicy"]["suspend"] = suspended
        result = k8s("submit", "--name", "demo", "--replicas", "2", "--queue", "team")
        assert ("gptddp-k8s scale" in result.stderr) is suspended


def flags(api):
    return f" --kubeconfig {api.kubeconfig}"


@pytest.mark.parametrize("state", ["Running", "Succeeded"])
def test_fixed_options_of_a_run_are_named_before_its_job_is_deleted(api, k8s, state):
    """Else the old job and its logs would be lost, and the trainer would refuse the new job."""
    submit(k8s, "--", "--steps", "5", "--lanes", "8")
    end(api, state)
    result = submit(k8s, "--", "--steps", "6", "--batch", "8")
    told = "its run, which refuses another --batch than it was started with; another --name"
    assert result.exit_code == 2 and told in result.stderr
    assert "refuses" not in submit(k8s, "--", "--steps", "6", "--lanes", "8").stderr


# -- submit --replace ----------------------------------------------------------------------------


@pytest.mark.parametrize("args", [[], ["--cpu", "2"], ["--", "--steps", "90"]])
@pytest.mark.parametrize("kind", ["Failed", "Succeeded"])
def test_an_ended_job_is_replaced_on_request(api, k8s, kind, args):
    """`--replace` replaces it by the same or another job, with its own key and companions."""
    submit(k8s)
    end(api, kind)
    api.put({"kind": "Pod", "metadata": {"name": "demo-worker-0"}})  # the old pod still exists
    before = job(api)["metadata"]["uid"]
    result = submit(k8s, "--replace", *args)
    assert result.exit_code == 0 and result.stdout == "pytorchjob.kubeflow.org/demo created\n"
    assert f"is {kind}: it is replaced" in result.stderr
    assert owners(api) == {job(api)["metadata"]["uid"]} != {before}
    assert submit(k8s, *args).stdout == "pytorchjob.kubeflow.org/demo unchanged\n"


def test_a_job_of_another_submit_is_not_deleted(api, k8s, monkeypatch):
    """If two submits replace a job at the same time, the second adopts the job of the first."""
    submit(k8s)
    end(api, "Failed")
    real, other = act.review, []

    def review(*args):
        monkeypatch.setattr(act, "review", real)
        found = real(*args)
        assert submit(k8s, "--replace").exit_code == 0
        other.append(job(api)["metadata"]["uid"])
        return found

    monkeypatch.setattr(act, "review", review)
    result = submit(k8s, "--replace")
    assert (result.exit_code, [job(api)["metadata"]["uid"]]) == (0, other), result.output


def test_a_job_that_runs_or_has_a_refused_successor_is_not_replaced(api, k8s):
    """It continues, or stays with its logs, and so does a job that is not ours."""
    submit(k8s)
    end(api, "Running")
    before = list(api.writes)
    assert submit(k8s, "--replace").stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
    result = submit(k8s, "--replace", "--cpu", "2")
    assert result.exit_code == 2 and "gptddp-k8s delete demo" in result.stderr
    end(api, "Failed")
    api.refuse["PyTorchJob"] = (403, "a policy forbids it")
    result = submit(k8s, "--replace")
    assert result.exit_code == 1 and "nothing was created" in result.stderr
    api.refuse.clear()
    del job(api)["metadata"]["labels"]
    assert submit(k8s, "--replace").exit_code == 2 and api.writes == before


# -- refusals by the server ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [("exceeded quota: cpu", True), ('U cannot create resource "pods"', False)],
)
def test_pods_that_the_server_would_refuse_now_are_a_warning(api, k8s, words, told):
    """A quota may have room later: the job is created, with a warning. The user does not need the
    right to create pods, as the operator creates them."""
    api.refuse["Pod"] = (403, words)
    result = submit(k8s)
    assert result.exit_code == 0 and (f"be refused now: {words}" in result.stderr) is told


def test_the_dry_run_of_a_pod_has_the_whole_pod(api, k8s):
    """It has the labels and annotations that policies check, and the user's account."""
    api.put({"kind": "ServiceAccount", "metadata": {"name": "own"}})
    submit(k8s, "--service-account", "own")
    (pod,) = (it for it in api.dry_runs if it["kind"] == "Pod")
    template = worker(job(api))["template"]
    assert pod["metadata"] == {**template["metadata"], "name": "demo-worker-0"}
    assert pod["spec"] == {**template["spec"], "restartPolicy": "Never"}
    k8s("submit", "--name", "next")  # with the account that submit creates
    _, pod = (it for it in api.dry_runs if it["kind"] == "Pod")
    assert "serviceAccountName" not in pod["spec"]


def test_a_companion_of_an_earlier_submit_is_updated(api, k8s):
    """A companion with our labels and other settings becomes the job's, with the new settings."""
    for obj in manifest.objects(spec.load(None, {"name": "demo"}, ["--metrics-port", "9999"]))[:-1]:
        api.put(obj)
    assert submit(k8s).exit_code == 0
    policy = api.objects["networkpolicies", "demo"]
    assert policy["spec"]["ingress"][1]["ports"][0]["port"] == 9464
    assert owners(api) == {job(api)["metadata"]["uid"]}


def test_the_submitted_job_is_printed_on_request(api, k8s):
    """The job as the server returns it; notes are on stderr."""
    assert submit(k8s, "-o", "name").stdout == "pytorchjob.kubeflow.org/demo\n"
    assert json.loads(submit(k8s, "-o", "json").stdout)["metadata"] == job(api)["metadata"]


def test_a_job_file_may_come_from_stdin(k8s):
    """With `-f -` both tables of the file count, and an error names stdin."""
    text = "[job]\nname = 'demo'\nreplicas = 4\n[train]\nsteps = 70\n"
    assert k8s("submit", "-f", "-", stdin=text).exit_code == 0
    text = text.replace("70", "71")
    assert "args[--steps]: 70 -> 71" in k8s("submit", "-f", "-", stdin=text).stderr
    wrong = k8s("submit", "-f", "-", stdin="[job]\nreplica = 4\n")
    assert wrong.exit_code == 2 and "stdin: unknown key job.replica: did you mean" in wrong.stderr
    torn = k8s("submit", "-f", "-", stdin="[job\n")
    assert torn.exit_code == 2 and "stdin is not valid TOML" in torn.stderr
