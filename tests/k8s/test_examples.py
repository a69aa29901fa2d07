"""The jobs in k8s/jobs are what `render` prints for the commands in their README."""

import re
import shlex

import pytest
import yaml
from click.testing import CliRunner
from support.manifests import worker
from support.paths import ROOT

from gptddp import __version__
from gptddp.k8s.cli.main import cli
from gptddp.k8s.render import manifest, spec

JOBS = ROOT / "k8s/jobs"
OVERLAYS = ROOT / "k8s/overlays"
CLOUDS = sorted(path.parent.name for path in OVERLAYS.glob("*/job.toml"))
COMMANDS = dict(re.findall(r"\((\S+\.yaml)\).*`gptddp-k8s (.*)`", (JOBS / "README.md").read_text()))


def render(command):
    result = CliRunner().invoke(cli, shlex.split(command))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_the_output_of_its_command(name):
    """The file equals the output, byte for byte.

    After an intended change: `PYTHONPATH=tests python tests/k8s/test_examples.py`.
    """
    assert (JOBS / name).read_text() == render(COMMANDS[name])


def test_every_example_has_its_command():
    """Each example file has a line in the README, and each line a file."""
    assert {path.name for path in JOBS.glob("*.yaml")} == set(COMMANDS)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_job_of_a_cloud_is_allowed(cloud):
    """A cloud's job and `prepare` Job render without a warning, in the namespace of the claims."""
    file = OVERLAYS / cloud / "job.toml"
    for command in ("render", "prepare --source texts --dry-run"):
        result = CliRunner().invoke(cli, [*command.split(), "-f", str(file)])
        assert result.exit_code == 0 and "warning" not in result.stderr, result.stderr
        documents = list(yaml.safe_load_all(result.stdout))
        assert {it["metadata"]["namespace"] for it in documents} == {"gptddp"}
        if cloud == "openshift":  # refuses a pod with fsGroup
            assert "fsGroup" not in result.stdout
        image = re.search(r"image: (\S+)", result.stdout)
        assert image and image[1].endswith(f"/gptddp:{__version__}")


def test_the_clouds_have_their_documented_differences():
    """Each cloud's taint, devices, group, driver folder and patch are in its job."""
    templates = {}
    for cloud in CLOUDS:
        built = spec.load(OVERLAYS / cloud / "job.toml", {}, [])
        templates[cloud] = worker(manifest.pytorchjob(built))["template"]
    pods = {cloud: template["spec"] for cloud, template in templates.items()}
    assert "fsGroup" not in pods["openshift"]["securityContext"]
    assert pods["gke"]["securityContext"]["fsGroup"] == 1000
    limits = pods["eks"]["containers"][0]["resources"]["limits"]
    assert (limits["vpc.amazonaws.com/efa"], limits["hugepages-2Mi"]) == ("32", "5120Mi")
    assert "nodeAffinity" in pods["eks"]["affinity"]
    taint = {"key": "sku", "operator": "Equal", "value": "gpu", "effect": "NoSchedule"}
    assert taint in pods["aks"]["tolerations"]
    assert templates["aks"]["metadata"]["labels"]["azure.workload.identity/use"] == "true"
    assert "cloud.google.com/gke-accelerator" in pods["gke"]["nodeSelector"]
    annotations = templates["gke"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    env = {item["name"]: item.get("value") for item in pods["gke"]["containers"][0]["env"]}
    assert env["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert all(gpu in it["tolerations"] for it in pods.values())


@pytest.mark.parametrize("cloud", CLOUDS)
def test_every_cloud_sets_the_storage_class_of_its_claims(cloud):
    """Its kustomization sets a storage class for the claims of k8s/base."""
    made = yaml.safe_load((OVERLAYS / cloud / "kustomization.yaml").read_text())
    (patch,) = made["patches"]
    assert made["resources"][0] == "../../base"
    assert patch["target"] == {"kind": "PersistentVolumeClaim"}
    changed = {it["path"] for it in yaml.safe_load(patch["patch"])}
    assert changed == {"/spec/storageClassName", "/spec/resources/requests/storage"}


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        (JOBS / name).write_text(render(command))
