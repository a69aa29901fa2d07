"""kubectl builds our kustomize folders, and the nodes of the kind cluster share a folder."""

import subprocess
from pathlib import Path

import pytest
import yaml
from support.prometheus import FOLDER

ROOT = Path(__file__).parents[2]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s/overlays").iterdir())


@pytest.mark.parametrize("folder", ["k8s/base", *(f"k8s/overlays/{name}" for name in OVERLAYS)])
def test_kustomize_folders_build(cluster, folder):
    """kubectl builds each folder, and the server takes every object in it."""
    done = subprocess.run(["kubectl", "kustomize", ROOT / folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {o["kind"] for o in yaml.safe_load_all(done.stdout)}
    assert {"Namespace", "PersistentVolumeClaim"} <= names
    if folder.endswith("kind"):  # claims cannot change, and those of other folders differ
        cluster.kubectl("apply", "--dry-run=server", "-k", str(ROOT / folder))


def test_all_nodes_share_a_folder():
    """kind.yaml names one folder for all nodes."""
    kind = yaml.safe_load((ROOT / "operator/kind.yaml").read_text())
    assert [n["role"] for n in kind["nodes"]] == ["control-plane", "worker", "worker"]
    assert len({m["hostPath"] for n in kind["nodes"] for m in n["extraMounts"]}) == 1


def test_the_monitoring_component_builds(cluster, tmp_path):
    """kubectl builds it in the kustomization of docs/alerts.md, with our namespace."""
    page = (ROOT / "docs/alerts.md").read_text()
    text = page.split("```yaml\n")[1].split("```")[0]
    for name in ("k8s/base", "k8s/components/monitoring"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "kustomization.yaml").write_text(text)
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = {it["kind"]: it for it in yaml.safe_load_all(done.stdout)}
    assert made["ConfigMap"]["data"]["gptddp.json"] == (FOLDER / "dashboard.json").read_text()
    for kind in ("PodMonitor", "PrometheusRule", "ConfigMap"):
        assert made[kind]["metadata"]["namespace"] == "gptddp"
        assert made[kind]["metadata"]["labels"]["release"] == "monitoring"
