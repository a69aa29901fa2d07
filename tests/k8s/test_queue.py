"""Jobs in queues of Kueue: what each command does about them, against a small server."""

import copy

import pytest
from support import queue_cases
from support.api_objects import at
from support.queue_cases import QUEUE, workload
from support.queue_server import NO_RIGHT, WAITS, WORKLOADS, live, put_job, put_place, queue_server

from gptddp.k8s.cluster import connect
from gptddp.k8s.observe import wait


@pytest.fixture
def server_in():
    return queue_server


# -- status, list and wait -----------------------------------------------------------------------

SUSPENDED, QUEUED = "Suspended", "Queued"


def without_label(api):
    del api.objects["pytorchjobs", "demo"]["metadata"]["labels"][QUEUE]


def without_both(api):
    without_label(api)
    del live(api)["spec"]["queueName"]


def without_a_place(api):
    path = "/apis/visibility.kueue.x-k8s.io/v1beta2/namespaces/default/localqueues/team"
    api.paths[f"{path}/pendingworkloads"] = (503, "the server is currently unable to handle it")


def unread(api):
    api.paths[WORKLOADS] = (403, NO_RIGHT)


def without_kueue(api):
    api.unserved = ("kueue.x-k8s.io/",)


def with_an_older_workload(api):
    """Of a job that was queued anew, the older one is on its way out."""
    old, new = workload(WAITS, active=False), live(api)
    old["metadata"] |= {"name": "older", "creationTimestamp": at(1)}
    api.objects = {("workloads", "older"): old, **api.objects}
    assert list(api.objects.values()).index(old) < list(api.objects.values()).index(new)


@pytest.mark.parametrize(
    ("made", "change", "state", "words"),
    [
        (None, lambda api: put_place(api, 3), QUEUED, "queue team, 3 before it; Pending: insuff"),
        (None, without_a_place, QUEUED, "it waits in the queue team; Pending: insufficient"),
        (None, with_an_older_workload, QUEUED, "it waits in the queue team"),
        (None, unread, QUEUED, 'User "u" cannot list'),
        # Kueue manages all jobs, also those without a queue
        (None, without_both, QUEUED, "it names no queue"),
        # Kueue looks no more at a job whose label was removed
        (None, without_label, SUSPENDED, "it is suspended (spec.runPolicy.suspend)"),
        (None, without_kueue, SUSPENDED, "the cluster has no Kueue"),
        (workload(WAITS, active=False), None, SUSPENDED, "run `gptddp-k8s resume demo"),
        (workload(*queue_cases.ADMITTED, queue_cases.CONFLICT), None, SUSPENDED, "tries no more"),
    ],
)
def test_a_job_is_queued_while_kueue_will_start_it(api, k8s, made, change, state, words):
    """For status, list and wait, which goes on; out of its queue it is suspended, and wait ends."""
    put_job(api, made)
    if change:
        change(api)
    shown = k8s("status", "demo")
    assert f"state:      {state}" in shown.stdout and words in shown.stdout
    assert state in k8s("list").stdout
    code = 124 if state == QUEUED else 103
    assert k8s("wait", "demo", "--timeout", "0.05").exit_code == code
    assert ("resume" in shown.output) == (state == SUSPENDED)


def test_a_queued_job_is_no_resumed_one(api, k8s):
    """`resume` says what is to be done: a queue, a wait, or a new job."""
    put_job(api)
    without_both(api)
    refused = k8s("resume", "demo").stderr
    assert "kubectl label pytorchjob demo kueue.x-k8s.io/queue-name=NAME -n default" in refused
    live(api)["spec"]["queueName"] = "team"
    assert k8s("resume", "demo").exit_code == 0  # its queue was taken from it
    assert api.objects["pytorchjobs", "demo"]["spec"]["runPolicy"]["suspend"] is False
    put_job(api, workload(*queue_cases.ADMITTED, queue_cases.CONFLICT))
    result = k8s("resume", "demo")
    assert result.exit_code == 2 and "gptddp-k8s delete demo" in result.stderr


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
    assert said[0].startswith("demo: Queued: it waits in the queue team; Pending: insufficient")
    assert said[1].startswith("demo: it waits in the queue team; Pending: other words")
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
