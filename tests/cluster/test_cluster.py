"""The cluster itself: what every other test of this folder takes for granted."""

import subprocess
from pathlib import Path

import pytest
import yaml
from support.waiting import until

from gptddp import __version__

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s/overlays").iterdir())
IMAGE = f"gptddp:{__version__}"


def pod(name: str, node: str, script: str) -> dict:
    """A pod that runs a Python script on one node, as the restricted Pod Security wants it."""
    restricted = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-uc", script],
        "securityContext": restricted,
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "nodeName": node,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
        },
    }


def output(namespace, name: str) -> str:
    """What a pod printed, once it has ended well."""

    def ended() -> str:
        found = namespace.get("pod", name)["status"]["phase"]
        return found if found in ("Succeeded", "Failed") else ""

    phase = until(ended, f"the end of {name}")
    logs = namespace.kubectl("logs", name, check=False).stdout
    assert phase == "Succeeded", f"{name} is {phase}: {logs}"
    return logs


def test_nodes_are_ready(cluster):
    """There are a control plane and two nodes for pods, all of them ready."""
    nodes = cluster.get("nodes")
    ready = [c["status"] for n in nodes for c in n["status"]["conditions"] if c["type"] == "Ready"]
    assert ready == ["True"] * len(nodes)
    assert len(cluster.workers()) >= 2


def test_operator_is_available(cluster):
    """The training operator runs and PyTorchJob is a known kind."""
    deployment = cluster.get("deployment", "-n", "kubeflow", "training-operator")
    assert deployment["status"]["availableReplicas"] >= 1
    assert isinstance(cluster.get("pytorchjobs", "--all-namespaces"), list)


def test_webhook_refuses_a_bad_job(namespace):
    """The operator's webhook is asked about every job: without a container `pytorch` it says no."""
    job = yaml.safe_load((Path(__file__).parent / "job.yaml").read_text())
    job["metadata"]["namespace"] = namespace.namespace
    namespace.kubectl("create", "--dry-run=server", "-f", "-", stdin=job)
    containers = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    containers[0]["name"] = "other"
    done = namespace.kubectl("create", "-f", "-", stdin=job, check=False)
    assert done.returncode == 1
    assert "validator.pytorchjob.training-operator.kubeflow.org" in done.stderr
    assert not namespace.get("pytorchjobs")


def test_pods_reach_each_other_across_nodes(namespace):
    """A pod finds a Service by name and its pod by address, from its own node and from another."""
    first, second = namespace.workers()[:2]
    serve = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8000)"
    port = {"port": 80, "targetPort": 8000}
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "server"}}
    service["spec"] = {"selector": {"app": "server"}, "ports": [port]}
    namespace.kubectl("apply", "-f", "-", stdin=[pod("server", first, serve), service])
    namespace.kubectl("wait", "pod/server", "--for=condition=Ready", "--timeout=90s")
    address = namespace.get("pod", "server")["status"]["podIP"]
    ask = f"""
import time, urllib.request as u
for url in ("http://{address}:8000", "http://server", "http://server.{namespace.namespace}.svc"):
    for attempt in range(30):
        try:
            print(b"Directory listing" in u.urlopen(url, timeout=2).read())
            break
        except OSError as error:  # kube-proxy learns of a Service within a second or so
            print(url, error) if attempt == 29 else time.sleep(1)
"""
    near, far = pod("near", first, ask), pod("far", second, ask)
    namespace.kubectl("apply", "-f", "-", stdin=[near, far])
    assert output(namespace, "near").split() == ["True"] * 3
    assert output(namespace, "far").split() == ["True"] * 3


def test_nodes_share_the_volumes(namespace):
    """What a pod writes to a claim, a pod on another node reads, and this machine if it is kind."""
    first, second = namespace.workers()[:2]
    write = "import os; open('/runs/a', 'w').write(str(os.getuid()))"
    namespace.kubectl("apply", "-f", "-", stdin=pod("writer", first, write))
    output(namespace, "writer")
    read = "print(open('/runs/a').read())"
    namespace.kubectl("apply", "-f", "-", stdin=pod("reader", second, read))
    assert output(namespace, "reader") == "1000\n"
    if namespace.shared:
        assert (namespace.shared / "runs/a").read_text() == "1000"


def test_pod_security_is_restricted(namespace):
    """The namespace refuses a pod that does not give up its rights."""
    careless = pod("careless", namespace.workers()[0], "pass")
    del careless["spec"]["containers"][0]["securityContext"]
    done = namespace.kubectl("apply", "-f", "-", stdin=careless, check=False)
    assert "violates PodSecurity" in done.stderr


@pytest.mark.parametrize("folder", ["k8s/base", *(f"k8s/overlays/{name}" for name in OVERLAYS)])
def test_kustomize_folders_build(cluster, folder):
    """kubectl builds each folder, and the server takes every object in it."""
    done = subprocess.run(["kubectl", "kustomize", ROOT / folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {o["kind"] for o in yaml.safe_load_all(done.stdout)}
    assert {"Namespace", "PersistentVolumeClaim"} <= names
    if folder.endswith("kind"):  # the claims of others differ from those there, which are fixed
        cluster.kubectl("apply", "--dry-run=server", "-k", str(ROOT / folder))


def test_all_nodes_share_a_folder():
    """kind.yaml names one folder for all nodes."""
    kind = yaml.safe_load((ROOT / "operator/kind.yaml").read_text())
    assert [n["role"] for n in kind["nodes"]] == ["control-plane", "worker", "worker"]
    assert len({m["hostPath"] for n in kind["nodes"] for m in n["extraMounts"]}) == 1
