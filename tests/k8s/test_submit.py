"""submit, delete, scale, suspend and resume against a small API server on a real socket."""

import copy
import json
import threading
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from support.api_server import PLURALS as KINDS
from support.manifests import pod_spec, worker
from support.writable_api_server import job, submit

from gptddp.k8s.act import lifecycle
from gptddp.k8s.cli.main import cli
from gptddp.k8s.render import difference, manifest, spec

RENDERED = ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget"]
COMPANIONS = [*RENDERED, "Secret"]


def end(api, kind):
    job(api)["status"] = {"conditions": [{"type": kind, "status": "True"}]}


# -- submit ------------------------------------------------------------------------------------


def test_submit_creates_companions_first_and_owns_them(api, k8s):
    """What render prints, in its order, and a Secret; then each has the job as its owner."""
    result = submit(k8s)
    assert result.exit_code == 0, result.output
    assert result.stdout == "pytorchjob.kubeflow.org/demo created\n"
    assert "gptddp-k8s status demo" in result.stderr and "gptddp-k8s prepare" in result.stderr
    created = [f"create {kind}" for kind in [*COMPANIONS, "PyTorchJob"]]
    assert api.writes == created + [f"patch {kind}" for kind in COMPANIONS]
    for kind in COMPANIONS:
        (owner,) = api.objects[KINDS[kind], "demo"]["metadata"]["ownerReferences"]
        assert owner["uid"] == job(api)["metadata"]["uid"]
        assert owner["controller"] is owner["blockOwnerDeletion"] is False
    rendered = manifest.objects(spec.load(None, {"name": "demo", "replicas": 4}, []))[-1]
    assert job(api)["spec"] == rendered["spec"]
    assert job(api)["metadata"]["annotations"] == rendered["metadata"]["annotations"]


@pytest.mark.parametrize("cut_at", range(9))
def test_a_submit_that_was_cut_off_is_completed_by_the_same_command(api, k8s, cut_at):
    """After any number of writes: the second call ends with the same objects and owners."""
    api.cut_at = cut_at
    assert submit(k8s).exit_code == 1
    assert len(api.writes) == cut_at
    api.cut_at = None
    assert submit(k8s).exit_code == 0
    assert len(api.writes) == 9
    assert sorted(api.all()) == sorted((kind, "demo") for kind in [*COMPANIONS, "PyTorchJob"])
    for kind in COMPANIONS:
        (owner,) = api.objects[KINDS[kind], "demo"]["metadata"]["ownerReferences"]
        assert owner["uid"] == job(api)["metadata"]["uid"]


def test_the_same_job_again_changes_nothing(api, k8s):
    """Exit code 0, the job's state, and not one write; scaled meanwhile, it stays scaled."""
    submit(k8s)
    worker(job(api))["replicas"] = 2
    end(api, "Running")
    del api.writes[:]
    result = submit(k8s)
    assert (result.exit_code, result.stdout) == (0, "pytorchjob.kubeflow.org/demo unchanged\n")
    assert "is Running" in result.stderr and api.writes == []


def test_another_job_of_the_name_is_refused_with_the_difference(api, k8s):
    """path: old -> new, and what to do."""
    submit(k8s, "--", "--steps", "400")
    del api.writes[:]
    result = submit(k8s, "--cpu", "2", "--", "--steps", "900", "--seed", "3")
    assert result.exit_code == 2 and api.writes == []
    lines = [line.split("containers[pytorch].")[-1] for line in result.stderr.splitlines()]
    assert "args[--steps]: 400 -> 900" in lines and "args[--seed]: (none) -> 3" in lines
    assert "resources.limits.cpu: 1 -> 2" in lines
    assert "gptddp-k8s delete demo --kubeconfig" in result.stderr and "--name" in result.stderr
    assert "rdzvId" not in result.stderr and "gptddp-k8s scale" not in result.stderr


def test_another_size_names_scale(api, k8s):
    """Who submits with another number of replicas wants to scale, where the job's bounds let him:
    the command that is named works."""
    submit(k8s)
    for count, named in (("1", False), ("2", True), ("5", False)):
        result = k8s("submit", "--name", "demo", "--replicas", count)
        assert result.exit_code == 2, count
        assert ("`gptddp-k8s scale demo " in result.stderr) is named, count
        assert (f" --replicas {count}` changes the number" in result.stderr) is named, count
        command = k8s("scale", "demo", "--replicas", count)
        assert (command.exit_code == 0) is named, count


@pytest.mark.parametrize(("kind", "code"), [("Succeeded", 0), ("Failed", 100)])
def test_a_job_that_has_ended_says_how_to_run_it_again(api, k8s, kind, code):
    """No write, with --wait neither; the exit code is how it ended."""
    submit(k8s)
    end(api, kind)
    del api.writes[:]
    result = submit(k8s, "--wait")
    assert result.exit_code == code and api.writes == []
    assert f"is {kind}" in result.stderr
    assert "gptddp-k8s delete demo" in result.stderr and "newest checkpoint" in result.stderr


def test_a_missing_claim_is_named_with_the_fix(api, k8s):
    """Nothing is created."""
    api.remove("PersistentVolumeClaim", "runs")
    result = submit(k8s)
    assert result.exit_code == 2 and api.writes == []
    assert "no claim runs (--runs) in the namespace default" in result.stderr
    assert "`kubectl get pvc -n default` lists" in result.stderr


def test_a_claim_for_one_node_is_a_warning(api, k8s):
    """ReadWriteOnce may do on one node, and the user is told."""
    api.objects["persistentvolumeclaims", "runs"]["spec"]["accessModes"] = ["ReadWriteOnce"]
    result = submit(k8s)
    assert result.exit_code == 0 and "warning: the claim runs is ReadWriteOnce" in result.stderr


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"status": {"phase": "Lost"}, "spec": {"volumeName": "pv-7"}}, "Lost: its volume pv-7"),
        ({"metadata": {"name": "runs", "deletionTimestamp": "now"}}, "is being deleted"),
    ],
)
def test_a_claim_that_no_pod_will_get_is_refused(api, k8s, state, words):
    """Its volume is gone, or it is about to be: nothing is created."""
    api.objects["persistentvolumeclaims", "runs"].update(state)
    result = submit(k8s)
    assert result.exit_code == 2 and api.writes == []
    assert f"the claim runs (--runs) {'is ' * words.startswith('Lost')}{words}" in result.stderr
    assert "`kubectl describe pvc runs --kubeconfig" in result.stderr
    assert "nothing was created" in result.stderr


@pytest.mark.parametrize(
    ("kind", "refusal", "code", "words"),
    [
        ("NetworkPolicy", (403, 'User "u" cannot create networkpolicies'), 1, "ask for the right"),
        ("PodDisruptionBudget", (403, "a policy forbids it"), 1, "a policy forbids it"),
        ("PyTorchJob", (403, 'admission webhook "v" denied the request: bad'), 1, "denied"),
        ("PyTorchJob", (404, 'namespaces "default" not found'), 1, "kubectl create namespace"),
        ("PyTorchJob", (500, "failed calling webhook: refused"), 1, "is it running?"),
    ],
)
def test_what_the_server_refuses_is_said_before_anything_is_created(
    api, k8s, kind, refusal, code, words
):
    """Of the job or of what is beside it: the server's words, and the fix where there is one."""
    api.refuse[kind] = refusal
    result = submit(k8s)
    assert result.exit_code == code and words in result.stderr and api.writes == []
    assert "nothing was created" in result.stderr


def test_pods_that_would_be_refused_are_a_warning(api, k8s):
    """A quota may have room later: the job is created, and the user knows."""
    api.refuse["Pod"] = (403, "exceeded quota: cpu")
    result = submit(k8s)
    assert result.exit_code == 0 and "would be refused now: exceeded quota" in result.stderr


@pytest.mark.parametrize("kind", [*COMPANIONS, "PyTorchJob"])
def test_what_is_somebody_elses_is_left_alone(api, k8s, kind):
    """An object of that name without our labels: refused, untouched, --name as the fix."""
    theirs = {"kind": kind, "metadata": {"name": "demo"}, "spec": {"a": 1}}
    api.put(copy.deepcopy(theirs))
    result = submit(k8s)
    assert result.exit_code == 2 and "use another --name" in result.stderr
    assert "exists, and not from gptddp-k8s" in result.stderr
    assert api.objects[KINDS[kind], "demo"]["spec"] == {"a": 1}
    assert f"create {kind}" not in api.writes and "create PyTorchJob" not in api.writes


def test_leftovers_of_an_earlier_job_are_adopted(api, k8s):
    """Companions with our labels, other settings and an owner that is gone become the job's."""
    for obj in manifest.objects(spec.load(None, {"name": "demo"}, ["--metrics-port", "9999"]))[:-1]:
        gone = {"kind": "PyTorchJob", "apiVersion": "kubeflow.org/v1", "name": "demo", "uid": "old"}
        obj["metadata"]["ownerReferences"] = [gone]
        api.put(obj)
    assert submit(k8s).exit_code == 0
    policy = api.objects["networkpolicies", "demo"]
    assert policy["spec"]["ingress"][1]["ports"][0]["port"] == 9464
    assert [o["uid"] for o in policy["metadata"]["ownerReferences"]] == [
        job(api)["metadata"]["uid"]
    ]


@pytest.mark.parametrize(
    "args", [["--local", "--wait"], ["--local", "--context", "x"], ["-v"], ["--volume", "data=/x"]]
)
def test_an_option_of_the_other_place_is_refused(args):
    """--local and the cluster have options of their own; none is ignored in silence."""
    result = CliRunner().invoke(cli, ["submit", *args])
    assert result.exit_code == 2 and "has no meaning here" in result.stderr


# -- lifecycle ---------------------------------------------------------------------------------


def test_delete_removes_all_that_is_ours_and_says_what_stays(api, k8s):
    """One line an object as kubectl does, the run's place, and nothing of others touched."""
    submit(k8s)
    api.put({"kind": "ServiceAccount", "metadata": {"name": "default"}})
    result = k8s("delete", "demo")
    assert result.exit_code == 0, result.output
    assert 'pytorchjob.kubeflow.org "demo" deleted\n' in result.stdout
    assert 'networkpolicy.networking.k8s.io "demo" deleted\n' in result.stdout
    assert "demo in the claim runs" in result.stderr
    assert api.all() == [("ServiceAccount", "default")]
    assert k8s("delete", "demo").exit_code == 102


def test_delete_completes_one_that_was_cut_off(api, k8s):
    """The job is gone, its companions are not: the same command removes them."""
    submit(k8s)
    api.remove("PyTorchJob", "demo")
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


def test_delete_waits_for_the_pods(api, k8s):
    """Told which; --no-wait does not."""
    submit(k8s)
    labels = {"training.kubeflow.org/job-name": "demo"}
    api.put({"kind": "Pod", "metadata": {"name": "demo-worker-0", "labels": labels}, "spec": {}})
    assert k8s("delete", "demo", "--no-wait").exit_code == 0
    threading.Timer(1.0, api.remove, ("Pod", "demo-worker-0")).start()
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and "waiting for demo-worker-0 to end" in result.stderr
    assert api.all() == []


def test_delete_names_a_pod_that_should_have_ended(api, k8s, monkeypatch):
    """Its node may be down: how to give it up is said once. Services are waited for too."""
    submit(k8s)
    labels = {"training.kubeflow.org/job-name": "demo"}
    meta = {"labels": labels, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    pod = {"kind": "Pod", "metadata": {"name": "demo-worker-0", **meta}}
    api.put({**pod, "spec": {"nodeName": "n"}})
    api.put(
        {"kind": "Service", "metadata": {"name": "demo-worker-1", "labels": labels}, "spec": {}}
    )
    ends = [("Service", "demo-worker-1"), ("Pod", "demo-worker-0")]
    its_time = SimpleNamespace(**{**vars(time), "sleep": lambda _: api.remove(*ends.pop(0))})
    monkeypatch.setattr(lifecycle, "time", its_time)  # threads of other tests may sleep as well
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and api.all() == []
    assert result.stderr.count("demo-worker-0 should have ended by now: the node may be down") == 1
    assert "waiting for demo-worker-0, demo-worker-1 to end" in result.stderr


def test_delete_leaves_a_job_of_others(api, k8s):
    """kubectl can do that."""
    api.put({"kind": "PyTorchJob", "metadata": {"name": "demo"}, "spec": {}})
    result = k8s("delete", "demo")
    assert result.exit_code == 2 and "kubectl delete pytorchjob demo" in result.stderr


def test_scale_prints_old_and_new(api, k8s):
    """Between min and max; the same number again is a note."""
    submit(k8s)
    result = k8s("scale", "demo", "--replicas", "2")
    assert result.stdout == "pytorchjob.kubeflow.org/demo scaled: 4 -> 2\n"
    assert worker(job(api))["replicas"] == 2
    again = k8s("scale", "demo", "--replicas", "2")
    assert again.stdout.endswith("unchanged\n") and "2 replicas already" in again.stderr


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        ("0", "gptddp-k8s suspend demo"),
        ("1", "below the job's minimum, 2"),
        ("5", "submit it with --max 5"),
    ],
)
def test_scale_refuses_what_would_hang_or_end_the_job(api, k8s, replicas, words):
    """Exit code 2 with the way that works."""
    submit(k8s)
    result = k8s("scale", "demo", "--replicas", replicas)
    assert result.exit_code == 2 and words in result.stderr
    assert worker(job(api))["replicas"] == 4


def test_suspend_and_resume(api, k8s):
    """Each is a field of the job, and the second time a note."""
    submit(k8s)
    result = k8s("suspend", "demo")
    assert result.stdout == "pytorchjob.kubeflow.org/demo suspended\n" and "60 s" in result.stderr
    assert job(api)["spec"]["runPolicy"]["suspend"] is True
    assert "suspended already" in k8s("suspend", "demo").stderr
    assert "`gptddp-k8s resume demo" in submit(k8s).stderr
    scaled = k8s("scale", "demo", "--replicas", "3")
    assert "it will have them after `gptddp-k8s resume demo" in scaled.stderr
    assert k8s("scale", "demo", "--replicas", "4").exit_code == 0
    assert k8s("resume", "demo").stdout == "pytorchjob.kubeflow.org/demo resumed\n"
    assert job(api)["spec"]["runPolicy"]["suspend"] is False
    assert "not suspended" in k8s("resume", "demo").stderr


@pytest.mark.parametrize("command", [["suspend"], ["resume"], ["scale", "--replicas", "2"]])
def test_a_job_that_has_ended_or_is_not_there_cannot_be_changed(api, k8s, command):
    """Exit code 102 without a job, 2 with one that has ended."""
    first, *rest = command
    assert k8s(first, "demo", *rest).exit_code == 102
    submit(k8s)
    end(api, "Succeeded")
    result = k8s(first, "demo", *rest)
    assert result.exit_code == 2 and f"nothing to {first}" in result.stderr


def test_differences_skip_what_a_server_adds():
    """Defaults of the API are no difference; other values of theirs are."""
    wanted = manifest.objects(spec.load(None, {}, []))[-1]
    live = json.loads(json.dumps(wanted))
    live["spec"]["runPolicy"]["suspend"] = False
    worker(live)["template"]["metadata"]["creationTimestamp"] = None
    pod_spec(live)["containers"][0]["ports"][0]["protocol"] = "TCP"
    assert difference.differences(live, wanted) == []
    live["spec"]["runPolicy"]["suspend"] = True
    assert difference.differences(live, wanted) == ["spec.runPolicy.suspend: True -> (none)"]
    del pod_spec(live)["containers"][0]["livenessProbe"]["exec"]["command"][1:]
    assert "exec.command[1]: (none) -> -c" in difference.differences(live, wanted)[0]
