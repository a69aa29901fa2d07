"""A cluster that lacks nothing for a job, on the small API server; and `doctor` asked of it."""

import json

from support.writable_api_server import WriteAPI, put_claims

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
    """(exit code, {id: the worst check of it})."""
    done = api.command_line("doctor", "--replicas", "4", "-o", "json", *args)
    assert type(done.exception) in (SystemExit, type(None)), done.exception
    found = sorted(
        json.loads(done.stdout), key=lambda it: ["ok", "warn", "fail"].index(it["status"])
    )
    assert all(it["fix"] for it in found if it["status"] != "ok")
    assert not api.writes
    return done.exit_code, {it["id"]: it for it in found}
