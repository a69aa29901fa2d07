"""Jobs in queues of Kueue: their status, and submit, suspend, resume and scale."""

import pytest
from support import queue_cases
from support.api_objects import at
from support.queue_cases import QUEUE, workload
from support.queue_server import NO_RIGHT, WAITS, WORKLOADS, live, put_job, queue_server
from support.writable_api_server import job, submit


@pytest.fixture
def server_in():
    return queue_server


SUSPENDED, QUEUED = "Suspended", "Queued"


def without_label(api):
    del api.objects["pytorchjobs", "demo"]["metadata"]["labels"][QUEUE]


def without_both(api):
    without_label(api)
    del live(api)["spec"]["queueName"]


def unread(api):
    api.paths[WORKLOADS] = (403, NO_RIGHT)


def without_kueue(api):
    api.unserved = ("kueue.x-k8s.io/",)


def with_an_older_workload(api):
    """For a job that was queued again, the older Workload is being deleted."""
    old, new = workload(WAITS, active=False), live(api)
    old["metadata"] |= {"name": "older", "creationTimestamp": at(1)}
    api.objects = {("workloads", "older"): old, **api.objects}
    assert list(api.objects.values()).index(old) < list(api.objects.values()).index(new)


@pytest.mark.parametrize(
    ("made", "change", "state", "words"),
    [
        (None, lambda api: None, QUEUED, "it waits in the queue team; Pending: insufficient"),
        (None, with_an_older_workload, QUEUED, "it waits in the queue team"),
        (None, unread, QUEUED, 'User "u" cannot list'),
        # Kueue manages all jobs, also those without a queue
        (None, without_both, QUEUED, "it names no queue"),
        # Kueue ignores a job whose label was removed
        (None, without_label, SUSPENDED, "it is suspended (spec.runPolicy.suspend)"),
        (None, without_kueue, SUSPENDED, "the cluster has no Kueue"),
        (workload(WAITS, active=False), None, SUSPENDED, "run `gptddp-k8s resume demo"),
        (workload(*queue_cases.ADMITTED, queue_cases.CONFLICT), None, SUSPENDED, "has given up"),
    ],
)
def test_a_job_is_queued_while_kueue_will_start_it(api, k8s, made, change, state, words):
    """`status` and `list` show Queued, and `wait` continues; out of its queue it is Suspended."""
    put_job(api, made)
    if change:
        change(api)
    shown = k8s("status", "demo")
    assert f"state:      {state}" in shown.stdout and words in shown.stdout
    assert state in k8s("list").stdout
    code = 124 if state == QUEUED else 103
    assert k8s("wait", "demo", "--timeout", "0.05").exit_code == code
    assert ("resume" in shown.output) == (state == SUSPENDED)


# -- submit --------------------------------------------------------------------------------------


def test_a_job_for_a_queue_is_created_as_rendered(api, k8s):
    """It has its label, and Kueue's webhook has suspended it."""
    result = submit(k8s, "--queue", "team")
    assert result.exit_code == 0, result.output
    assert job(api)["metadata"]["labels"][QUEUE] == "team"
    assert job(api)["spec"]["runPolicy"]["suspend"] is True
    again = submit(k8s, "--queue", "team")
    assert again.exit_code == 0 and "is Queued" in again.stderr
    assert "resume" not in again.stderr and "gptddp-k8s status demo" in again.stderr


def test_existing_or_unreadable_objects_are_not_refused(api, k8s):
    """Submit accepts an existing priority, and a queue that this user may not read."""
    api.put({"kind": "WorkloadPriorityClass", "metadata": {"name": "high"}, "value": 9})
    assert submit(k8s, "--queue", "team", "--priority", "high").exit_code == 0
    k8s("delete", "demo")
    path = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/hidden"
    api.paths[path] = (403, 'localqueues is forbidden: User "u" cannot get it')
    assert submit(k8s, "--queue", "hidden").exit_code == 0


# -- suspend, resume, scale ----------------------------------------------------------------------


def test_suspend_takes_a_job_out_of_its_queue_and_resume_puts_it_in(api, k8s):
    """Both change the job's Workload, as Kueue reverts changes to the job itself."""
    put_job(api, suspend=False)
    result = k8s("suspend", "demo")
    assert (result.exit_code, result.stdout) == (0, "pytorchjob.kubeflow.org/demo suspended\n")
    assert "60 s to commit a checkpoint" in result.stderr
    assert "gptddp-k8s resume demo" in result.stderr and live(api)["spec"]["active"] is False
    assert k8s("suspend", "demo").stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
    job(api)["spec"]["runPolicy"]["suspend"] = True  # as Kueue does
    result = k8s("resume", "demo")
    assert (result.exit_code, result.stdout) == (0, "pytorchjob.kubeflow.org/demo resumed\n")
    assert "it is in the queue team" in result.stderr and live(api)["spec"]["active"] is True
    assert api.writes == ["patch Workload"] * 2
    result = k8s("resume", "demo")
    assert result.stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
    assert "`gptddp-k8s status demo" in result.stderr


def test_a_running_job_of_a_queue_is_not_scaled(api, k8s):
    """Kueue would stop it: the message has a way that works."""
    put_job(api, suspend=False)
    result = k8s("scale", "demo", "--replicas", "2")
    assert result.exit_code == 2 and api.writes == []
    assert "Kueue stops a job" in result.stderr and "`gptddp-k8s suspend demo" in result.stderr
    k8s("suspend", "demo")
    job(api)["spec"]["runPolicy"]["suspend"] = True  # as Kueue does
    result = k8s("scale", "demo", "--replicas", "2")
    assert result.stdout == "pytorchjob.kubeflow.org/demo scaled: 4 -> 2\n"
    assert "waits in the queue team for room for its pods" in result.stderr


@pytest.mark.parametrize("kueue", [True, False])
def test_a_job_that_kueue_does_not_manage_is_suspended_directly(api, k8s, kueue):
    """Kueue's integration is off, or Kueue is gone: there is no Workload."""
    put_job(api, suspend=False)
    api.remove("Workload", "pytorchjob-demo-1a2b3")
    api.unserved = () if kueue else ("kueue.x-k8s.io/",)
    assert k8s("suspend", "demo").exit_code == 0
    assert job(api)["spec"]["runPolicy"]["suspend"] is True
    assert k8s("resume", "demo").stdout == "pytorchjob.kubeflow.org/demo resumed\n"


def test_a_job_whose_label_was_removed_is_in_no_queue(api, k8s):
    """Kueue ignores it, though its Workload still exists: `resume` starts it."""
    del put_job(api)["metadata"]["labels"][QUEUE]
    assert k8s("resume", "demo").exit_code == 0
    assert job(api)["spec"]["runPolicy"]["suspend"] is False
