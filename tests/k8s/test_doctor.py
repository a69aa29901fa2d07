"""`doctor` finds each thing that a cluster can lack, with its fix, and changes nothing."""

import json

import pytest
from support.queue_cases import local_queue
from support.writable_api_server import WriteAPI, put_claims, submit

NODES, OPERATOR = "/api/v1/nodes", "/apis/apps/v1/deployments"
SIZE = {"cpu": "64", "memory": "640Gi", "pods": "110", "nvidia.com/gpu": "8"}


def items(*found):
    return {"items": list(found)}


def node(taints=(), labels=None, **size):
    meta = {"name": "n", "labels": labels or {}}
    return {
        "metadata": meta,
        "spec": {"taints": list(taints)},
        "status": {"allocatable": SIZE | size},
    }


def operator(ready=1):
    spec = {"template": {"spec": {"containers": [{"image": "r.io/training-operator:v1-x"}]}}}
    meta = {"name": "training-operator", "namespace": "kubeflow"}
    return {"metadata": meta, "spec": spec, "status": {"availableReplicas": ready}}


def healthy(folder):
    """A server of a cluster that lacks nothing."""
    server = WriteAPI(folder)
    put_claims(server)
    server.paths = {
        "/version": {"gitVersion": "v1.34.4"},
        OPERATOR: items(operator()),
        NODES: items(node(), node()),
    }
    server.unserved = ("kueue.x-k8s.io/",)
    return server


def doctor(api, *args):
    """Run it; returns (exit code, {id: the worst check of this id})."""
    done = api.command_line("doctor", "--replicas", "4", "-o", "json", *args)
    assert type(done.exception) in (SystemExit, type(None)), done.exception
    found = sorted(
        json.loads(done.stdout), key=lambda it: ["ok", "warn", "fail"].index(it["status"])
    )
    assert all(it["fix"] for it in found if it["status"] != "ok")
    assert not api.writes
    return done.exit_code, {it["id"]: it for it in found}


@pytest.fixture
def server_in():
    """A cluster that lacks nothing."""
    return healthy


CHECKS = ["api", "operator", "job", "beside", "pod", "needs", "nodes"]


def test_a_healthy_cluster_has_no_findings(api):
    """Exit code 0, one line per check, and `all is well` on stderr; also if the job exists."""
    submit(api.command_line)
    text = api.command_line("doctor", "--replicas", "4", "--name", "demo")
    assert text.exit_code == 0 and text.stderr == "all is well\n"
    lines = text.stdout.splitlines()
    assert lines[0] == "ok    api        Kubernetes v1.34.4, namespace default"
    assert [line.split()[:2] for line in lines] == [["ok", id] for id in CHECKS]


GPU_TAINT = {"key": "dedicated", "value": "team", "effect": "NoSchedule"}
LOST = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}  # tolerated for 10 s
SOFT_TAINT = {"key": "a", "effect": "PreferNoSchedule"}
TAINTED, ZONE_A = items(node([GPU_TAINT])), items(node(labels={"zone": "a"}))
MAY_NOT = (403, "it is forbidden: U cannot list resource")


@pytest.mark.parametrize(
    ("path", "answer", "args", "id", "status", "words"),
    [
        (OPERATOR, items(), [], "operator", "warn", "install the Kubeflow training op"),
        (OPERATOR, items(operator(0)), [], "operator", "fail", "no ready pod"),
        (OPERATOR, MAY_NOT, [], "operator", "warn", "U cannot list resource"),
        (NODES, items(node(cpu="1")), ["--cpu", "2"], "nodes", "fail", "cpu 1 of 2 (1)"),
        (NODES, items(node()), ["--gpus", "9"], "nodes", "fail", "nvidia.com/gpu 8 of 9"),
        (NODES, items(node()), ["--gpus", "1", "--gpu-resource", "amd.com/gpu"], "nodes", "fail",
         "amd.com/gpu 0 of 1"),
        (NODES, TAINTED, [], "nodes", "fail", "taint dedicated=team:NoSchedule"),
        (NODES, TAINTED, ["--toleration", "dedicated=team:NoExecute"], "nodes", "fail", "taint"),
        (NODES, TAINTED, ["--toleration", "dedicated=other"], "nodes", "fail", "taint"),
        (NODES, items(node([LOST])), [], "nodes", "fail", "unreachable:NoExecute"),
        (NODES, items(node()), ["--node-selector", "zone=a"], "nodes", "fail", "no label zone=a"),
        (NODES, items(), [], "nodes", "fail", "none of the 0 nodes"),
        # one node that takes a pod is enough
        (NODES, TAINTED, ["--toleration", "dedicated=team:NoSchedule"], "nodes", "ok", ""),
        (NODES, TAINTED, ["--toleration", "dedicated"], "nodes", "ok", ""),
        (NODES, items(node([SOFT_TAINT])), [], "nodes", "ok", ""),
        (NODES, items(node(), node([GPU_TAINT])), [], "nodes", "ok", ""),
        (NODES, ZONE_A, ["--node-selector", "zone=a"], "nodes", "ok", ""),
        (NODES, items(node(cpu="2")), ["--cpu", "2"], "nodes", "ok", ""),
        (NODES, MAY_NOT, [], "nodes", "warn", "U cannot list resource"),
        (NODES, (500, "it is broken"), [], "nodes", "fail", "it is broken"),
        (NODES, items(), ["--queue", "team"], "queue", "fail", "the cluster has no Kueue"),
        (NODES, items(), ["--runs", "no"], "needs", "fail", "kubectl get pvc -n default"),
        (NODES, items(), ["--env-from-secret", "A=hf/token"], "needs", "fail",
         "kubectl create secret generic hf --from-literal=token=... -n default"),
        (NODES, items(), ["--image-pull-secret", "reg"], "needs", "warn", "create secret docker-"),
    ],
)  # fmt: skip
def test_a_missing_part_is_found_with_its_fix(api, path, answer, args, id, status, words):
    """Each check reports the problem; a failed check sets the exit code."""
    api.paths[path] = answer
    code, found = doctor(api, *args)
    assert found[id]["status"] == status
    assert words in f"{found[id]['text']}; {found[id]['fix']}"
    assert code == any(it["status"] == "fail" for it in found.values())


@pytest.mark.parametrize(
    ("kind", "refusal", "id", "words"),
    [
        ("Pod", (403, 'pods "x" is forbidden: violates PodSecurity "restricted"'), "pod", ""),
        ("Pod", (422, "Pod is invalid: spec.priority: Forbidden"), "pod", ""),
        ("PyTorchJob", (403, "pytorchjobs is forbidden: exceeded quota: q"), "job", ""),
        ("PyTorchJob", (404, 'namespaces "default" not found'), "job", "kubectl create namespace"),
        ("NetworkPolicy", (422, "denied request: no"), "beside", "--without networkpolicy"),
    ],
)
def test_a_refusal_is_reported_in_the_servers_words(api, kind, refusal, id, words):
    """If the server refuses the job, a companion or a pod, one check has its message or the fix."""
    api.refuse[kind] = refusal
    code, found = doctor(api)
    assert code == 1 and found[id]["status"] == "fail"
    assert words in found[id]["fix"] and (words or refusal[1] in found[id]["text"])
    assert {id for id, it in found.items() if it["status"] == "fail"} == {id}


def test_a_missing_namespace_is_reported_once(api):
    """The other checks are skipped, as they need the namespace."""
    api.refuse["PyTorchJob"] = (404, 'namespaces "default" not found')
    assert list(doctor(api)[1]) == ["api", "operator", "job"]


def test_the_right_to_create_pods_is_not_needed(api):
    """The operator creates them: no check fails, and the output says that no pod was tried."""
    api.refuse["Pod"] = (403, 'U cannot create resource "pods"')
    code, found = doctor(api)
    assert code == 0 and "not tried" in found["pod"]["text"]


STOPPED = local_queue(active="False", reason="Stopped")  # its message is c


@pytest.mark.parametrize(
    ("queue", "args", "status", "words"),
    [
        (local_queue(), ["--queue", "team"], "ok", "the LocalQueue team admits jobs"),
        (STOPPED, ["--queue", "team"], "fail", "LocalQueue team: Stopped: c"),
        (local_queue(), ["--queue", "tema"], "fail", "there are team"),
        (local_queue(), [], "warn", "the namespace has queues (team), and the job is in none"),
    ],
)
def test_a_queue_says_whether_it_admits_jobs(api, queue, args, status, words):
    """The check has the queue's own message; a missing queue is refused as by `submit`."""
    api.unserved = ()
    api.put(queue)
    _, found = doctor(api, *args)
    assert found["queue"]["status"] == status
    assert words in f"{found['queue']['text']}; {found['queue']['fix']}"


def test_without_an_api_server_only_one_check_is_printed(api):
    """The check says that the server is away, and has a fix; all other checks are skipped."""
    api.down = True
    done = api.command_line("doctor")
    assert done.exit_code == 1 and done.stdout.startswith("fail  api")
    assert len(done.stdout.splitlines()) == 2 and "fix: " in done.stdout.splitlines()[1]
