"""What a cluster asks of pods, in the Jobs of prepare and sample."""

import pytest
from click.testing import CliRunner
from support.manifests import render_job
from support.short_jobs import dry_run, pod_of

from gptddp.k8s.cli.main import cli

ASKED = (
    *("--service-account", "trainer", "--image-pull-secret", "registry", "--toleration", "spot"),
    *("--node-selector", "pool=cpu", "--env-from-secret", "PW=proxy/pw"),
    *("--env-from-secret", "site", "--priority-class", "low"),
)
PATCH = """
spec:
  pytorchReplicaSpecs:
    Worker:
      template:
        metadata: {labels: {team: nlp}, annotations: {example.com/cost: '1'}}
        spec:
          securityContext: {fsGroup: null, fsGroupChangePolicy: null}
          volumes:
          - {name: data, persistentVolumeClaim: {readOnly: true}}
          - {name: scratch, emptyDir: {sizeLimit: 4Gi}}
"""


@pytest.fixture
def patch(tmp_path):
    (tmp_path / "patch.yaml").write_text(PATCH)
    return tmp_path / "patch.yaml"


def test_prepare_has_what_the_cluster_asks_of_pods(patch):
    """Every option of a pod that is no PyTorchJob's, in the pod of the Job."""
    job = dry_run("--source", "texts", "--read-only-source", *ASKED, "--patch", str(patch))
    spec, meta = pod_of(job), job["spec"]["template"]["metadata"]
    assert spec["serviceAccountName"] == "trainer" and spec["priorityClassName"] == "low"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert spec["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    assert "fsGroup" not in spec["securityContext"]
    (container,) = spec["containers"]
    assert container["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "proxy", "key": "pw"}}
    assert container["envFrom"] == [{"secretRef": {"name": "site"}}]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["scratch"]["emptyDir"] == {"sizeLimit": "4Gi"}
    assert volumes["source"]["persistentVolumeClaim"]["readOnly"] is True
    assert meta["labels"]["team"] == "nlp"
    assert meta["annotations"] == {"example.com/cost": "1"}


def test_one_job_toml_serves_all_commands(tmp_path):
    """Image, namespace, dataset and pods are the file's; what is of a PyTorchJob is left out."""
    file = tmp_path / "job.toml"
    file.write_text(
        '[job]\nimage = "r.io/g:1"\nnamespace = "team"\ndata = "sets/books"\nreplicas = 4\n'
        'gpus = 8\ncpu = 64\nimage_pull_secret = "registry"\n'
        'without = "networkpolicy"\n[train]\nsteps = 5\n'
    )
    job = dry_run("--source", "texts", "-f", str(file))
    (container,) = pod_of(job)["containers"]
    assert container["image"] == "r.io/g:1" and job["metadata"]["namespace"] == "team"
    assert "/data/books" in container["command"]
    assert container["resources"]["limits"] == {"cpu": "1", "memory": "4Gi"}
    assert pod_of(job)["imagePullSecrets"] == [{"name": "registry"}]
    flags = ("-f", str(file), "-n", "mine", "--image", "r.io/g:2")
    job = dry_run("--source", "texts", *flags)
    assert job["metadata"]["namespace"] == "mine"
    assert pod_of(job)["containers"][0]["image"] == "r.io/g:2"


def test_what_is_asked_wrongly_of_a_short_job_is_refused():
    """By the rules of a job's pods, with exit code 2."""
    command = ["prepare", "--dry-run", "--source", "texts", "--toleration", "a:Never"]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 2 and "--toleration: 'a:Never' is not a taint" in result.stderr


def test_a_sample_has_what_the_cluster_asks_of_the_jobs_pods(api, k8s, patch):
    """Nodes, account, labels, group and read-only data are the job's; options win over them."""
    asked = {
        "service_account": "trainer",
        "image_pull_secret": ("registry",),
        "node_selector": (("pool", "gpu"),),
        "priority_class": "high",
        "patch": patch,
    }
    api.put(render_job({"name": "demo", **asked}))
    api.put({"kind": "ServiceAccount", "metadata": {"name": "trainer"}})
    made = []
    api.created["Job"] = made.append
    k8s("sample", "demo", "--timeout", "0", "--node-selector", "pool=cpu")
    (job,) = made
    spec, meta = pod_of(job), job["spec"]["template"]["metadata"]
    assert spec["serviceAccountName"] == "trainer" and spec["priorityClassName"] == "high"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["nodeSelector"] == {"pool": "cpu"}
    assert "fsGroup" not in spec["securityContext"]
    claims = {v["name"]: v.get("persistentVolumeClaim") for v in spec["volumes"]}
    assert claims["data"] == {"claimName": "data", "readOnly": True}
    assert meta["labels"]["team"] == "nlp"
    assert meta["labels"]["app.kubernetes.io/component"] == "sample"
    assert meta["annotations"] == {"example.com/cost": "1"}


def test_a_sample_does_not_need_the_account_that_goes_with_its_job(api, k8s):
    """The job's own ServiceAccount is deleted with it; the group stays ours."""
    api.put(render_job({"name": "demo"}))
    made = []
    api.created["Job"] = made.append
    k8s("sample", "demo", "--timeout", "0")
    spec = pod_of(made[0])
    assert "serviceAccountName" not in spec and spec["securityContext"]["fsGroup"] == 1000
