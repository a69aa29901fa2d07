"""Refusals of gptddp-k8s on a cluster: the exit code, the message with the fix, and no change."""

import copy

import pytest
from support.manifests import pod_spec, render, render_job
from support.queue_cases import local_queue
from support.queue_server import NO_RIGHT, WORKLOADS, held, put_job
from support.short_jobs import server_with_texts
from support.writable_api_server import end, job, submit

SUBMIT = "submit --name demo --replicas 4"
PREPARE = "prepare --source texts"


def demo(api):
    assert submit(api.command_line).exit_code == 0


def ended(api):
    demo(api)
    end(api, "Succeeded")


def of_others(api):
    demo(api)
    job(api)["metadata"]["labels"] = {}


def another(kind, name="demo"):
    return lambda api: api.put({"kind": kind, "metadata": {"name": name}, "spec": {"a": 1}})


def refusing(kind, code, words):
    return lambda api: api.refuse.update({kind: (code, words)})


def claim(**changes):
    return lambda api: api.objects["persistentvolumeclaims", "runs"].update(changes)


def without(kind, name):
    return lambda api: api.remove(kind, name)


def leaving(api):
    """A companion of a deleted job is being deleted."""
    policy = render({"name": "demo"})[1]
    policy["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.put(policy)


def idle_queue(api):
    """The queue's Kueue does not hold PyTorchJobs."""
    api.put(local_queue())


def queue(api):
    idle_queue(api)
    api.kueue, api.webhook = True, lambda body: held(api, body)


def no_kueue(api):
    queue(api)
    api.unserved = ("kueue.x-k8s.io/",)


def hidden_workloads(api):
    put_job(api)
    api.paths[WORKLOADS] = (403, NO_RIGHT)


def fixed_workloads(api):
    put_job(api, suspend=False)
    api.forbidden.add("PATCH workloads")


def without_volumes(api):
    made = render_job({"name": "demo"})
    pod_spec(made)["volumes"] = []
    api.put(made)


def nothing(api):
    pass


SUSPEND = """patch pytorchjob demo --type merge -p '{"spec": {"runPolicy": {"suspend": %s}}}'"""
THERE = " -n default --context x --kubeconfig"
POLICY = (403, "a policy forbids it")
ROWS = [
    # the preparation, the command, its exit code, the words
    (demo, "scale demo --replicas 0", 2, "gptddp-k8s suspend demo"),
    (demo, "scale demo --replicas 1", 2, "below the job's minimum, 2"),
    (demo, "scale demo --replicas 5", 2, "submit it with --max 5"),
    (ended, "scale demo --replicas 2", 2, "nothing to scale", "submit it with --replace"),
    (ended, "suspend demo", 2, "nothing to suspend", "submit it with --replace"),
    (ended, "resume demo", 2, "nothing to resume", "submit it with --replace"),
    # not ours, so it may not commit a checkpoint: kubectl's command, for the same cluster
    (of_others, "delete demo --context x", 2, f"`kubectl delete pytorchjob demo{THERE}"),
    (of_others, "scale demo --replicas 5 --context x", 2,
     "was not created by gptddp-k8s", f"`kubectl scale pytorchjob demo --replicas 5{THERE}"),
    (of_others, "suspend demo --context x", 2, f"`kubectl {SUSPEND % 'true'}{THERE}"),
    (of_others, "resume demo --context x", 2, f"`kubectl {SUSPEND % 'false'}{THERE}"),
    # with a similar name, or the command that shows the log of a short Job
    *((another("PyTorchJob", "demo-large"), f"{it} demo-lage", 102,
       "no PyTorchJob demo-lage in the namespace default", "demo-large")
      for it in ("status", "status --watch", "wait", "logs", "logs -f", "suspend", "resume",
                 "scale --replicas 2")),
    *((another("Job", "prepare"), f"{it} prepare", 102, "prepare is a short Job",
       "`kubectl logs job/prepare -n default --kubeconfig")
      for it in ("status", "logs", "wait", "suspend")),
    # an object of the name that is not ours
    *((another(it), SUBMIT, 2, "exists, not created by gptddp-k8s", "use another --name")
      for it in ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "PyTorchJob")),
    (another("Job", "prepare"), PREPARE, 2, "not created by gptddp-k8s: use another --name"),
    # without the companion the pods would start unprotected
    (leaving, SUBMIT, 1, "networkpolicy.networking.k8s.io/demo is being"),
    # objects that pods would wait for
    (nothing, f"{PREPARE} --env-from-secret PASS=proxy/pass", 2, "there is no Secret proxy"),
    (without("PersistentVolumeClaim", "runs"), SUBMIT, 2, "nothing was created",
     "there is no claim runs (--runs) in the namespace default: create it as "),
    (without("PersistentVolumeClaim", "runs"), "sample demo", 2, "no claim runs"),
    (nothing, "prepare --source nope", 2, "no claim nope (--source)"),
    (claim(status={"phase": "Lost"}, spec={"volumeName": "pv-7"}), SUBMIT, 2,
     "Lost: its volume pv-7"),
    (claim(metadata={"name": "runs", "deletionTimestamp": "now"}), SUBMIT, 2,
     "(--runs) is being deleted"),
    (queue, f"{SUBMIT} --queue tema", 2, "no LocalQueue of this name here; there are team"),
    (queue, f"{SUBMIT} --queue team --priority x", 2, "no WorkloadPriorityClass of this"),
    (no_kueue, f"{SUBMIT} --queue team", 2, "--queue team: the cluster has no Kueue"),
    (idle_queue, f"{SUBMIT} --queue team", 2, "would start at once", "kubeflow.org/pytorchjob"),
    # refusals by the server, in its words
    (refusing("NetworkPolicy", 403, "U cannot create"), SUBMIT, 1, "ask for the right"),
    (refusing("PodDisruptionBudget", *POLICY), SUBMIT, 1, "--without poddisruptionbudget"),
    (refusing("PyTorchJob", 403, "the webhook denied it"), SUBMIT, 1, "denied it"),
    (refusing("PyTorchJob", 403, "the webhook denied it"), f"{SUBMIT} --dry-run", 1, "denied it"),
    (refusing("PyTorchJob", 404, 'namespaces "a" not found'), SUBMIT, 1, "create namespace"),
    (refusing("PyTorchJob", 500, "failed calling webhook: x"), SUBMIT, 1, "is it running?"),
    (refusing("Pod", 422, "spec.a: Invalid"), SUBMIT, 1, "its pods would be refused: spec.a"),
    (refusing("Pod", 422, "spec.a: Invalid"), f"{SUBMIT} --dry-run", 1, "would be refused: spec.a"),
    (refusing("Pod", 500, "failed calling webhook: x"), SUBMIT, 1, "is it running?"),
    # without the right to read or change Workloads, a way that does not need it
    (fixed_workloads, "suspend demo", 1, "the job was not changed; `gptddp-k8s delete"),
    *((hidden_workloads, it, 1, 'cannot list resource "workloads"', "nothing was changed")
      for it in ("suspend demo", "resume demo", "scale demo --replicas 2")),
    (without_volumes, "sample demo", 2, "has no volumes data and runs: is it gptddp"),
    *((nothing, f"logs demo {it}", 2, "leave one out")
      for it in ("--first-failure -f", "--first-failure --previous", "--first-failure --pod 0",
                 "-f --previous")),
    (demo, "status demo --watch -o yaml", 2, "-o yaml has no meaning with --watch"),
    (demo, "status demo --every 5", 2, "--every has no meaning without --watch"),
]  # fmt: skip


@pytest.fixture
def server_in():
    return server_with_texts


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_a_refusal_has_the_fix_and_changes_nothing(api, row):
    """Nothing is written or printed; the message names the problem and the fix."""
    given, command, code, *words = row
    given(api)
    before = copy.deepcopy(api.objects)
    del api.writes[:]
    result = api.command_line(*command.split())
    assert result.exit_code == code, result.output
    assert all(word in result.stderr for word in words), result.stderr
    assert api.writes == [] and api.objects == before and result.stdout == ""
