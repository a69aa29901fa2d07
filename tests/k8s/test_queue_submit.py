"""A job that is put into a queue of Kueue, or again: what is looked at first, on a small server."""

import pytest
from support.queue_cases import QUEUE, local_queue
from support.queue_server import live, put_job, put_place, queue_server
from support.writable_api_server import job, submit


@pytest.fixture
def server_in():
    return queue_server


# -- submit --------------------------------------------------------------------------------------


def test_a_job_for_a_queue_is_created_as_it_is_rendered(api, k8s):
    """Its label is there, and Kueue's webhook has suspended it."""
    result = submit(k8s, "--queue", "team")
    assert result.exit_code == 0, result.output
    assert job(api)["metadata"]["labels"][QUEUE] == "team"
    assert job(api)["spec"]["runPolicy"]["suspend"] is True
    again = submit(k8s, "--queue", "team")
    assert again.exit_code == 0 and "is Queued" in again.stderr
    assert "resume" not in again.stderr and "gptddp-k8s status demo" in again.stderr


def test_a_queue_that_does_not_exist_is_refused_with_those_that_do(api, k8s):
    """Kueue would let the job wait for ever."""
    result = submit(k8s, "--queue", "tema")
    assert result.exit_code == 2 and api.writes == []
    assert "no LocalQueue tema (--queue)" in result.stderr and "there are team" in result.stderr


def test_a_priority_that_does_not_exist_is_refused(api, k8s):
    """Kueue would make no Workload, and say so nowhere but in its log."""
    result = submit(k8s, "--queue", "team", "--priority", "high")
    assert result.exit_code == 2 and api.writes == []
    assert "no WorkloadPriorityClass high (--priority)" in result.stderr
    api.put({"kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 9})
    assert submit(k8s, "--queue", "team", "--priority", "high").exit_code == 0


def test_a_kueue_that_does_not_hold_pytorchjobs_is_told_before_the_job_runs(api, k8s):
    """Its integration is off, and the job would start at once, outside of any quota."""
    api.kueue = False
    result = submit(k8s, "--queue", "team")
    assert result.exit_code == 2 and api.writes == []
    assert "would start at once" in result.stderr
    assert "kubeflow.org/pytorchjob" in result.stderr and "integrations" in result.stderr


def test_a_cluster_without_kueue_is_told_before_the_job_runs(api, k8s):
    """The API of queues is not there."""
    api.unserved = ("kueue.x-k8s.io/",)
    result = submit(k8s, "--queue", "team")
    assert result.exit_code == 2 and "the cluster has no Kueue" in result.stderr
    assert api.writes == []


@pytest.mark.parametrize("missing", ["v1beta1", "v1beta2"])
def test_either_version_of_kueues_api_will_do(api, k8s, missing):
    """Kueue 0.14 serves the older one alone, 0.20 the newer one."""
    api.unserved = (f"kueue.x-k8s.io/{missing}/",)
    assert "no LocalQueue tema" in submit(k8s, "--queue", "tema").stderr
    assert submit(k8s, "--queue", "team").exit_code == 0
    put_job(api)
    put_place(api, 3)
    assert "3 before it; Pending: insufficient" in k8s("status", "demo").stdout
    assert k8s("suspend", "demo").exit_code == 0 and live(api)["spec"]["active"] is False


def test_what_may_not_be_seen_is_left_to_kueue(api, k8s):
    """No right to read queues is no reason to refuse; a stopped one is a warning."""
    path = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/hidden"
    api.paths[path] = (403, 'localqueues is forbidden: User "u" cannot get it')
    assert submit(k8s, "--queue", "hidden").exit_code == 0
    del api.objects["pytorchjobs", "demo"]
    api.put(local_queue("Hold"))
    result = submit(k8s, "--queue", "team")
    assert result.exit_code == 0
    assert "warning: the queue team is stopped (spec.stopPolicy: Hold)" in result.stderr
    del api.objects["pytorchjobs", "demo"]
    api.put(local_queue(active="False", reason="ClusterQueueIsInactive"))
    assert (
        "ClusterQueue gpus of the queue team takes no jobs" in submit(k8s, "--queue", "team").stderr
    )
