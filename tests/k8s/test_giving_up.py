"""A job whose pod never starts is failed by a command that waits, and no other job is."""

from dataclasses import replace

import pytest
from support.api_objects import event, pod, terminated, waiting
from support.cause_cases import made_again
from support.writable_api_server import NO_ANSWER, WriteAPI

from gptddp.k8s.act.giving_up import LEAST_S, MOST_PODS, GivingUp
from gptddp.k8s.act.lifecycle import ours
from gptddp.k8s.cluster import connect
from gptddp.k8s.observe import job_causes, why


@pytest.fixture
def server_in():
    return WriteAPI


@pytest.fixture
def look(api):
    """Let a waiting command look at these facts: what it has said."""
    said = []
    giving_up = GivingUp(connect(kubeconfig=api.kubeconfig), said.append)

    def look(facts):
        api.objects.setdefault(("pytorchjobs", "demo"), facts.job)
        giving_up(facts)
        return said

    return look


def hopeless(count=MOST_PODS, seconds=LEAST_S, size=1, least=1):
    """A job of ours whose pod 0 was made so often, in so many seconds."""
    facts = made_again(count)
    facts.job["metadata"]["labels"] = dict(pair.split("=") for pair in ours("demo").split(","))
    facts.job["spec"]["elasticPolicy"] = {"minReplicas": least, "maxReplicas": size}
    facts.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = size
    return replace(facts, now=facts.now + seconds - 60)


def patched(api):
    return [write for write in api.writes if write == "patch PyTorchJob"]


def test_the_operator_is_let_to_fail_the_job_and_the_reason_is_in_it(api, look):
    """Once; with the pod, its number, the kubelet's words and how to go on."""
    facts = hopeless()
    assert look(facts) == look(facts) == []
    assert len(patched(api)) == 1
    made = api.objects["pytorchjobs", "demo"]
    assert made["spec"]["runPolicy"]["activeDeadlineSeconds"] == 1
    reason = made["metadata"]["annotations"][job_causes.GIVEN_UP]
    assert reason.startswith(
        f"pod demo-worker-0: it was made {MOST_PODS} times in {LEAST_S:.0f} s, and its container "
        "never started: OutOfcpu: Node didn't have enough resource: cpu; mend that, then the same"
    )
    made["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "deadline"}]}
    assert why.why(replace(facts, job=made)).startswith(reason)


def test_the_reason_is_the_best_that_a_look_has_seen(api, look):
    """How an init container ended is in the status of a pod that is gone at most looks."""
    gone = hopeless()
    for it in gone.events:
        it["reason"], it["type"] = "Started", "Normal"
        it["involvedObject"]["fieldPath"] = "spec.initContainers{before}"
    seen = pod(0, waiting("PodInitializing"), phase="Pending")
    state = terminated(1, "no database")
    seen["status"]["initContainerStatuses"] = [{"name": "before", "ready": False, "state": state}]
    look(replace(gone, pods=[seen], events=gone.events[:5]))
    look(gone)
    reason = api.objects["pytorchjobs", "demo"]["metadata"]["annotations"][job_causes.GIVEN_UP]
    assert "its container before exited with 1 (an error): no database" in reason


def others_train(index):
    """Pod `index` of three never starts; the others run, and two are enough."""
    facts = hopeless(size=3, least=2)
    for it in facts.events:
        it["involvedObject"]["name"] = f"demo-worker-{index}"
    return replace(facts, pods=[pod(n) for n in range(3) if n != index])


def started(container):
    """A container of the newest pod has started."""
    newest = event(pod(0, uid="new"), "Started", "Container started", second=59)
    newest["involvedObject"]["fieldPath"] = container
    facts = hopeless()
    return replace(facts, events=[*facts.events, newest])


def of_others():
    facts = hopeless()
    facts.job["metadata"]["labels"] = {}
    return facts


@pytest.mark.parametrize(
    ("facts", "ended"),
    [
        (hopeless(), 1),
        (hopeless(count=MOST_PODS - 1), 0),
        (hopeless(seconds=LEAST_S - 1), 0),
        (others_train(2), 0),
        (others_train(0), 1),  # without the host of the rendezvous the others cannot train
        (started("spec.containers{pytorch}"), 0),
        (started("spec.initContainers{a}"), 1),  # nothing is trained by it
        (of_others(), 0),
    ],
    ids=["yes", "seldom", "short", "others train", "no host", "started", "init", "not ours"],
)
def test_only_a_job_that_cannot_go_on_is_ended(api, look, facts, ended):
    """Each is one step from the other side."""
    assert look(facts) == [] and len(patched(api)) == ended


def test_who_may_not_change_the_job_is_told_once(api, look):
    """With what somebody else can do; a server that does not answer is asked again."""
    api.fault, api.requests = (0, NO_ANSWER), []
    assert look(hopeless()) == []
    api.fault, api.forbidden = None, {"PATCH pytorchjobs"}
    assert look(hopeless()) == look(hopeless())
    (said,) = look(hopeless())
    assert "cannot be ended" in said and "gptddp-k8s suspend demo" in said
