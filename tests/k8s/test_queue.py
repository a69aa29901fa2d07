"""Jobs in queues of Kueue: what each command does about them, against a small server."""

import copy

import pytest
from support import queue_cases
from support.api_objects import JOB_UID, at
from support.queue_cases import QUEUE, workload
from support.queue_server import NO_RIGHT, WAITS, WORKLOADS, live, put_job, put_place, queue_server

from gptddp.k8s.cluster import connect
from gptddp.k8s.observe import wait


@pytest.fixture
def server_in():
    return queue_server


# -- status, list and wait -----------------------------------------------------------------------


def test_status_says_what_a_job_waits_for_and_who_is_before_it(api, k8s):
    """Queued is no suspension, and `resume` is no advice."""
    put_job(api)
    put_place(api, 3)
    result = k8s("status", "demo")
    assert "state:      Queued" in result.stdout and "resume" not in result.output
    assert "it waits in the queue team with 3 jobs before it: insufficient" in result.stdout
    assert "next: gptddp-k8s wait demo" in result.stderr
    assert "Queued" in k8s("list").stdout


def test_a_place_that_kueue_does_not_tell_is_left_out(api, k8s):
    """Its aggregated API may fail for long while it works: that is no sign of anything."""
    put_job(api)
    path = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/team"
    api.paths[f"{path}/pendingworkloads"] = (503, "the server is currently unable to handle it")
    assert "it waits in the queue team: insufficient" in k8s("status", "demo").stdout


def test_a_job_that_was_taken_out_of_its_queue_is_suspended(api, k8s):
    """For status, and for wait, which ends."""
    put_job(api, workload(WAITS, active=False))
    result = k8s("status", "demo")
    assert (
        "state:      Suspended" in result.stdout and "run `gptddp-k8s resume demo" in result.stdout
    )
    assert "Suspended" in k8s("list").stdout
    assert k8s("wait", "demo").exit_code == 103


def test_what_may_not_be_read_of_a_queue_is_said(api, k8s):
    """The job is queued all the same."""
    put_job(api)
    api.paths[WORKLOADS] = (403, NO_RIGHT)
    result = k8s("status", "demo")
    assert "Queued" in result.stdout and 'User "u" cannot list' in result.stdout


def test_a_job_without_a_queue_that_kueue_has_taken_is_queued(api, k8s):
    """Where Kueue manages all jobs: it is suspended, and has a Workload."""
    found = put_job(api)
    del found["metadata"]["labels"][QUEUE]
    del live(api)["spec"]["queueName"]
    assert "Queued" in k8s("status", "demo").stdout and "Queued" in k8s("list").stdout
    assert "it names no queue" in k8s("status", "demo").stdout
    refused = k8s("resume", "demo").stderr
    assert "kubectl label pytorchjob demo kueue.x-k8s.io/queue-name=NAME -n default" in refused
    del api.objects["workloads", "pytorchjob-demo-1a2b3"]
    assert "Suspended" in k8s("status", "demo").stdout and "Suspended" in k8s("list").stdout


def test_a_job_whose_queue_was_taken_from_it_is_suspended(api, k8s):
    """Kueue looks at it no more, though it has its Workload still: `resume` starts it."""
    found = put_job(api)
    del found["metadata"]["labels"][QUEUE]
    assert "Suspended" in k8s("status", "demo").stdout and "Suspended" in k8s("list").stdout
    assert k8s("resume", "demo").exit_code == 0
    assert api.objects["pytorchjobs", "demo"]["spec"]["runPolicy"]["suspend"] is False


def test_a_job_that_kueue_could_not_start_is_not_waited_for(api, k8s):
    """It tries no more, and `resume` cannot change that."""
    put_job(api, workload(*queue_cases.ADMITTED, queue_cases.CONFLICT))
    assert "Suspended" in k8s("status", "demo").stdout and k8s("wait", "demo").exit_code == 103
    result = k8s("resume", "demo")
    assert result.exit_code == 2 and "gptddp-k8s delete demo" in result.stderr


def test_a_queue_of_a_cluster_without_kueue_is_no_queue(api, k8s):
    """Nothing would start the job: `list` says what `status` says."""
    put_job(api)
    api.unserved = ("kueue.x-k8s.io/",)
    assert "the cluster has no Kueue" in k8s("status", "demo").stdout
    assert "Suspended" in k8s("list").stdout and k8s("wait", "demo").exit_code == 103


def test_wait_goes_on_for_a_queued_job(api, monkeypatch, capsys):
    """Until it has run: the reason is told at once, and again only when it changes."""
    monkeypatch.setattr(wait, "POLL_S", 0.02)
    put_job(api)
    said, steps = [], iter(range(100))

    def say(line):
        said.append(line)

    real = wait.Watcher.poll

    def poll(watcher, end):
        step = next(steps)
        if step == 3:
            live(api)["status"]["conditions"][0]["message"] = "other words"
        if step == 6:
            done = {"type": "Succeeded", "status": "True"}
            api.objects["pytorchjobs", "demo"]["status"]["conditions"].append(done)
        return real(watcher, end)

    monkeypatch.setattr(wait.Watcher, "poll", poll)
    assert wait.until_done(connect(None, api.kubeconfig), "demo", say, 20) == 0
    assert said[0].startswith("demo: Queued: it waits in the queue team: insufficient")
    assert said[1].startswith("demo: it waits in the queue team: other words")
    assert said[2:] == ["demo: Succeeded"]


# -- suspend, resume, scale ----------------------------------------------------------------------


def test_suspend_takes_a_job_out_of_its_queue_and_resume_puts_it_in(api, k8s):
    """By its Workload: what is set on the job itself, Kueue sets back."""
    put_job(api, suspend=False)
    before = copy.deepcopy(api.objects["pytorchjobs", "demo"]["spec"])
    result = k8s("suspend", "demo")
    assert (result.exit_code, result.stdout) == (0, "pytorchjob.kubeflow.org/demo suspended\n")
    assert "commit a checkpoint" in result.stderr and "gptddp-k8s resume demo" in result.stderr
    assert live(api)["spec"]["active"] is False
    assert k8s("suspend", "demo").stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
    result = k8s("resume", "demo")
    assert (result.exit_code, result.stdout) == (0, "pytorchjob.kubeflow.org/demo resumed\n")
    assert live(api)["spec"]["active"] is True
    assert api.objects["pytorchjobs", "demo"]["spec"] == before


def test_resume_of_a_job_that_waits_says_why_it_is_of_no_use(api, k8s):
    """Kueue would stop it at once."""
    put_job(api)
    result = k8s("resume", "demo")
    assert result.exit_code == 2 and api.writes == []
    assert "it waits in the queue team" in result.stderr and "Kueue would stop" in result.stderr
    api.objects["pytorchjobs", "demo"]["spec"]["runPolicy"]["suspend"] = False
    assert k8s("resume", "demo").stdout == "pytorchjob.kubeflow.org/demo unchanged\n"


def test_who_may_not_change_workloads_is_told_who_can(api, k8s):
    """The command for somebody who may."""
    put_job(api)
    api.forbidden.add("PATCH workloads")
    result = k8s("suspend", "demo")
    assert result.exit_code == 1 and "the job was not changed" in result.stderr
    patch = """--type merge -p '{"spec": {"active": false}}'`"""
    assert f"`kubectl patch workload pytorchjob-demo-1a2b3 -n default {patch}" in result.stderr
    assert "You can delete the job" in result.stderr
    api.paths[WORKLOADS] = (403, NO_RIGHT)
    for command in (("suspend", "demo"), ("resume", "demo"), ("scale", "demo", "--replicas", "2")):
        result = k8s(*command)
        assert result.exit_code == 1 and "Kueue, which decides when it runs" in result.stderr
        assert "nothing was changed" in result.stderr


def test_a_running_job_of_a_queue_is_not_scaled(api, k8s):
    """Kueue would stop it: the way that works is said, and works."""
    put_job(api, suspend=False)
    result = k8s("scale", "demo", "--replicas", "2")
    assert result.exit_code == 2 and api.writes == []
    assert "Kueue stops a job" in result.stderr and "`gptddp-k8s suspend demo" in result.stderr
    k8s("suspend", "demo")
    api.objects["pytorchjobs", "demo"]["spec"]["runPolicy"]["suspend"] = True  # as Kueue does
    result = k8s("scale", "demo", "--replicas", "2")
    assert result.stdout == "pytorchjob.kubeflow.org/demo scaled: 4 -> 2\n"
    assert "waits in the queue team again, for room for its pods" in result.stderr


def test_a_job_that_kueue_has_not_taken_is_suspended_as_any_other(api, k8s):
    """Its integration is off, and there is no Workload."""
    put_job(api, suspend=False)
    del api.objects["workloads", "pytorchjob-demo-1a2b3"]
    assert k8s("suspend", "demo").exit_code == 0
    assert api.objects["pytorchjobs", "demo"]["spec"]["runPolicy"]["suspend"] is True
    assert k8s("resume", "demo").stdout == "pytorchjob.kubeflow.org/demo resumed\n"


def test_the_newest_workload_is_the_jobs(api, k8s):
    """Of a job that was queued anew, the older one is on its way out."""
    put_job(api)
    old = workload(WAITS, active=False)
    old["metadata"] |= {"name": "older", "creationTimestamp": at(1)}
    api.put(old)
    assert old["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == JOB_UID
    assert "Queued" in k8s("status", "demo").stdout
