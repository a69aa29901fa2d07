"""`delete`, `scale`, `suspend` and `resume` against a small API server on a real socket."""

import time
from types import SimpleNamespace

import pytest
from support.manifests import worker
from support.writable_api_server import job, submit

from gptddp.k8s.act import lifecycle
from gptddp.k8s.cluster import Cluster, connect
from gptddp.k8s.render import manifest

OURS = manifest.labels("demo") | {"training.kubeflow.org/job-name": "demo"}


def disown(api):
    """Remove the owners, as after a submit that was interrupted before the job owned anything."""
    for it in api.objects.values():
        it["metadata"].pop("ownerReferences", None)


# -- delete --------------------------------------------------------------------------------------


def test_delete_removes_the_job_and_its_objects(api, k8s, tmp_path):
    """Delete sends one request; the garbage collector deletes owned objects, own code too. The run
    directory stays."""
    (tmp_path / "code/gptddp").mkdir(parents=True)
    (tmp_path / "code/gptddp/a.py").write_text("x = 1\n")
    submit(k8s, "--code", str(tmp_path / "code"))
    api.put({"kind": "ServiceAccount", "metadata": {"name": "default"}})
    del api.writes[:]
    result = k8s("delete", "demo")
    assert result.exit_code == 0, result.output
    assert result.stdout == 'pytorchjob.kubeflow.org "demo" deleted\n'
    assert "demo in the claim runs" in result.stderr
    assert api.writes == ["delete PyTorchJob"] and api.all() == [("ServiceAccount", "default")]
    assert k8s("delete", "demo").exit_code == 102


def test_a_job_that_another_delete_removed_first_is_missing(api, k8s, monkeypatch):
    """The exit code is 102, with the message of a missing job, and not of a replaced one."""
    submit(k8s)
    real = Cluster.delete

    def late(cluster, kind, name, uid=None):
        api.remove("PyTorchJob", "demo")
        api.collect_garbage()
        return real(cluster, kind, name, uid)

    monkeypatch.setattr(Cluster, "delete", late)
    result = k8s("delete", "demo")
    assert result.exit_code == 102 and "no PyTorchJob demo in the namespace" in result.stderr


@pytest.mark.parametrize("there", [True, False], ids=["job", "no job"])
def test_delete_removes_objects_without_an_owner(api, k8s, there):
    """Companions without an owner and short Jobs are deleted, also after their job."""
    submit(k8s)
    disown(api)
    labels = job(api)["metadata"]["labels"]
    api.put({"kind": "Job", "metadata": {"name": "demo-sample-x", "labels": labels}})
    api.objects["secrets", "demo"]["metadata"]["labels"] = {}  # the user's own
    if not there:
        api.remove("PyTorchJob", "demo")
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and api.all() == [("Secret", "demo")]
    assert 'networkpolicy.networking.k8s.io "demo" deleted\n' in result.stdout


def test_an_object_that_may_not_be_deleted_is_named(api, k8s):
    """The exit code is 0, and the next time 102; both messages have the object and the command."""
    submit(k8s)
    disown(api)
    api.forbidden = {"DELETE secrets", "GET configmaps", "GET jobs"}
    api.paths["/api/v1/namespaces/default/secrets"] = (403, "U cannot list resource secrets")
    for code in (0, 102):
        result = k8s("delete", "demo")
        assert result.exit_code == code and api.all() == [("Secret", "demo")]
        assert "kubectl delete secret/demo -n default" in result.stderr
        assert "secret" not in result.stdout
    api.forbidden = set()
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


def test_a_short_job_that_may_not_be_deleted_is_an_error(api, k8s):
    """The job is deleted; the exit code is 1, as the short Job continues to run."""
    submit(k8s)
    api.put({"kind": "Job", "metadata": {"name": "demo", "labels": job(api)["metadata"]["labels"]}})
    api.forbidden = {"DELETE jobs"}
    result = k8s("delete", "demo")
    assert result.exit_code == 1 and api.all() == [("Job", "demo")]
    assert "probably not deleted: job.batch/demo" in result.stderr


def test_delete_waits_for_pods_and_for_the_collector(api, k8s, monkeypatch):
    """Notes name the objects; --no-wait skips the wait, and a new job of the name ends it."""
    submit(k8s)
    pod = {"kind": "Pod", "metadata": {"name": "demo-worker-0", "labels": OURS}}
    api.put({**pod, "spec": {}, "status": {"phase": "Running"}})
    assert k8s("delete", "demo", "--no-wait").exit_code == 0
    gone = {"kind": "PyTorchJob", "name": "demo", "uid": "gone"}
    meta = {"name": "demo", "labels": OURS, "uid": "u"}
    api.put({"kind": "NetworkPolicy", "metadata": meta | {"ownerReferences": [gone]}})
    rest = [("Pod", "demo-worker-0"), ("NetworkPolicy", "demo")]
    its_time = SimpleNamespace(**vars(time) | {"sleep": lambda _: api.remove(*rest.pop(0))})
    monkeypatch.setattr(lifecycle, "time", its_time)
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and api.all() == []
    told = result.stderr.splitlines()
    assert told[0].startswith("waiting for pod/demo-worker-0, networkpolicy.networking.k8s.io/demo")
    assert told[0].endswith("a pod commits a checkpoint first")
    assert told[1] == "waiting for networkpolicy.networking.k8s.io/demo to end"


def test_pods_of_running_short_jobs_are_not_waited_for(api):
    """A running sample of a deleted job does not delay a new job; a new job ends the wait."""
    labels = OURS | {"batch.kubernetes.io/job-name": "demo-sample-x"}
    api.put({"kind": "Pod", "metadata": {"name": "demo-sample-x-1", "labels": labels}})
    api.put({"kind": "Job", "metadata": {"name": "demo-sample-x", "labels": OURS}})
    cluster = connect(kubeconfig=api.kubeconfig)
    assert lifecycle.wait_gone(cluster, "demo", print) == ""
    api.remove("Job", "demo-sample-x")
    assert lifecycle.wait_gone(cluster, "demo", print, limit_s=0) == "pod/demo-sample-x-1"
    api.put({"kind": "PyTorchJob", "metadata": {"name": "demo"}})
    assert lifecycle.wait_gone(cluster, "demo", print) == ""


def test_delete_names_a_pod_that_should_have_ended(api, k8s, monkeypatch):
    """Its node may be down: the message says once how to remove it. The wait includes Services."""
    submit(k8s)
    meta = {"labels": OURS, "deletionTimestamp": "2026-01-01T00:00:00Z"}
    pod = {"kind": "Pod", "metadata": {"name": "demo-worker-0", **meta}}
    api.put({**pod, "spec": {"nodeName": "n"}})
    api.put({"kind": "Service", "metadata": {"name": "demo-worker-1", "labels": OURS}})
    ends = [("Service", "demo-worker-1"), ("Pod", "demo-worker-0")]
    its_time = SimpleNamespace(**{**vars(time), "sleep": lambda _: api.remove(*ends.pop(0))})
    monkeypatch.setattr(lifecycle, "time", its_time)  # threads of other tests may sleep too
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and api.all() == []
    late = "pod/demo-worker-0 should have ended by now: the node may be down"
    assert result.stderr.count(late) == 1
    assert "waiting for pod/demo-worker-0, service/demo-worker-1 to end" in result.stderr


# -- scale, suspend, resume ----------------------------------------------------------------------


def test_scale_prints_old_and_new(api, k8s):
    """Sizes between min and max are set; the current size gives a note."""
    submit(k8s)
    result = k8s("scale", "demo", "--replicas", "2")
    assert result.stdout == "pytorchjob.kubeflow.org/demo scaled: 4 -> 2\n"
    assert worker(job(api))["replicas"] == 2
    again = k8s("scale", "demo", "--replicas", "2")
    assert again.stdout.endswith("unchanged\n") and "2 replicas already" in again.stderr


def test_suspend_and_resume(api, k8s):
    """Each sets a field of the job; the second call gives a note."""
    submit(k8s)
    result = k8s("suspend", "demo")
    assert result.stdout == "pytorchjob.kubeflow.org/demo suspended\n" and "60 s" in result.stderr
    assert job(api)["spec"]["runPolicy"]["suspend"] is True
    assert "suspended already" in k8s("suspend", "demo").stderr
    assert "`gptddp-k8s resume demo" in submit(k8s).stderr
    scaled = k8s("scale", "demo", "--replicas", "3")
    assert "the change takes effect with `gptddp-k8s resume demo" in scaled.stderr
    assert k8s("resume", "demo").stdout == "pytorchjob.kubeflow.org/demo resumed\n"
    assert job(api)["spec"]["runPolicy"]["suspend"] is False
    assert "not suspended" in k8s("resume", "demo").stderr
