"""A cluster that lacks nothing for a job, on the small API server; and `doctor` asked of it."""

import json

from support.writable_api_server import WriteAPI, put_claims

SET = "/apis/apps/v1/daemonsets"
NODES, QUOTAS = "/api/v1/nodes", "/api/v1/namespaces/default/resourcequotas"
OPERATOR = "/apis/apps/v1/deployments"
QUEUES = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/localqueues"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
SIZE = {"cpu": "64", "memory": "640Gi", "pods": "110", "nvidia.com/gpu": "8"}
IMAGE = "docker.io/library/gptddp:0.1.0"


def items(*found):
    return {"items": list(found)}


def named(name, **rest):
    return {"metadata": {"name": name, "namespace": "kubeflow", "labels": {}}, **rest}


def node(name="n", taints=(), labels=None, images=(IMAGE,), **size):
    made = named(name, spec={"taints": list(taints)})
    made["metadata"]["labels"] = labels or {}
    made["status"] = {"allocatable": SIZE | size, "images": [{"names": list(images)}]}
    return made


def daemon_set(name, *containers):
    spec = {"template": {"spec": {"containers": [{"name": it} for it in containers]}}}
    return named(name, spec=spec)


def operator(ready=1):
    image = {"image": "r.io/training-operator:v1-x"}
    spec = {"template": {"spec": {"containers": [image]}}}
    return named("training-operator", spec=spec, status={"availableReplicas": ready})


def quota(hard, used, **spec):
    return named("q", spec={"hard": hard, **spec}, status={"hard": hard, "used": used})


def refuses_wrong_names(body):
    """As the operator's webhook."""
    spec = body.get("spec", {}).get("pytorchReplicaSpecs", {})
    containers = [c for it in spec.values() for c in it["template"]["spec"]["containers"]]
    return "" if all(c["name"] == "pytorch" for c in containers) else "none is named pytorch"


def healthy(folder):
    """A server of a cluster that lacks nothing."""
    server = WriteAPI(folder)
    put_claims(server)
    server.webhook = refuses_wrong_names
    server.paths = {
        "/version": {"gitVersion": "v1.34.4"},
        "/api/v1/namespaces/default": named("default"),
        "/apis/kubeflow.org/v1": {"resources": [{"name": "pytorchjobs"}]},
        OPERATOR: items(operator()),
        NODES: items(node("a"), node("b")),
        QUOTAS: items(quota({"requests.cpu": "100"}, {"requests.cpu": "90"})),
        SET: items(daemon_set("calico-node")),
        POLICIES: items(),
    }
    server.unserved = ("kueue.x-k8s.io/",)
    return server


def doctor(api, *args):
    """(exit code, {id: the worst check of it})."""
    done = api.command_line("doctor", "--replicas", "4", "-o", "json", *args)
    assert type(done.exception) in (SystemExit, type(None)), done.exception
    found = sorted(
        json.loads(done.stdout), key=lambda it: ["ok", "warn", "fail"].index(it["status"])
    )
    assert all(it["fix"] for it in found if it["status"] != "ok")
    assert not api.writes
    return done.exit_code, {it["id"]: it for it in found}
