"""The cluster itself: what every other test of this folder takes for granted."""

import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s/overlays").iterdir())


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
