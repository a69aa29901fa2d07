"""Jobs in queues of Kueue: what is said of them, against a small server."""

import pytest
from support import queue_cases
from support.api_objects import at
from support.queue_cases import QUEUE, workload
from support.queue_server import NO_RIGHT, WAITS, WORKLOADS, live, put_job, queue_server

from gptddp.k8s.cluster import connect
from gptddp.k8s.observe import wait


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
    """Of a job that was queued anew, the older one is on its way out."""
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


def test_wait_goes_on_for_a_queued_job(api, monkeypatch):
    """Until it has run: the reason is told at once, and again only when it changes."""
    monkeypatch.setattr(wait, "POLL_S", 0.02)
    put_job(api)
    said, looks = [], iter(range(100))

    real = wait.Changes.tell

    def tell(changes, facts):
        state, step = real(changes, facts), next(looks)
        if step == 2:
            live(api)["status"]["conditions"][0]["message"] = "other words"
        if step == 5:
            done = {"type": "Succeeded", "status": "True"}
            api.objects["pytorchjobs", "demo"]["status"]["conditions"].append(done)
        return state

    monkeypatch.setattr(wait.Changes, "tell", tell)
    assert wait.until_done(connect(None, api.kubeconfig), "demo", said.append, 20) == 0
    assert said[0].startswith("demo: Queued: it waits in the queue team; Pending: insufficient")
    assert said[1].startswith("demo: it waits in the queue team; Pending: other words")
    assert said[2:] == ["demo: Succeeded"]
