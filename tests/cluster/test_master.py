"""A PyTorchJob not made by gptddp-k8s, with a Master and without elasticPolicy, in our image."""

from collections.abc import Iterator

import pytest
from support.cluster_jobs import TINY, Job
from support.waiting import until

from gptddp import __version__

STEPS = 300
NSLOOKUP = f"""FROM gptddp:{__version__}
USER 0
RUN printf '#!/bin/sh\\nexec getent hosts "$1"\\n' >/usr/local/bin/nslookup \\
 && chmod +x /usr/local/bin/nslookup
"""


@pytest.fixture
def master(prepared, load_image) -> Iterator[Job]:
    """A Master and two Workers train, in a namespace that allows the operator's init container."""
    enforce = "pod-security.kubernetes.io/enforce"
    prepared.kubectl("label", "namespace", prepared.namespace, f"{enforce}=baseline", "--overwrite")
    load_image("alpine:3.10", NSLOOKUP)
    it = Job(prepared, "theirs")
    prepared.kubectl("create", "-f", "-", stdin=manifest())
    yield it
    prepared.kubectl("delete", "pytorchjob", "theirs")
    prepared.kubectl(
        "label", "namespace", prepared.namespace, f"{enforce}=restricted", "--overwrite"
    )


def manifest():
    """The job, like the operator's own examples, plus the volumes."""
    claims = [{"name": n, "persistentVolumeClaim": {"claimName": n}} for n in ("data", "runs")]
    mounts = [{"name": n, "mountPath": f"/{n}"} for n in ("data", "runs")]
    flags = ["--data", "/data/corpus", "--run-dir", "/runs/theirs", f"--steps={STEPS}", *TINY]
    container = {
        "name": "pytorch",
        "image": f"gptddp:{__version__}",
        "args": flags,
        "resources": {"requests": {"cpu": "400m", "memory": "600Mi"}},
        "volumeMounts": mounts,
    }
    pod = {"containers": [container], "volumes": claims}
    roles = {"Master": 1, "Worker": 2}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "theirs"},
        "spec": {
            "nprocPerNode": "1",
            "pytorchReplicaSpecs": {
                role: {
                    "replicas": count,
                    "restartPolicy": "OnFailure",
                    "template": {"spec": pod},
                }
                for role, count in roles.items()
            },
        },
    }


def test_a_job_with_a_master_survives_a_lost_worker_and_a_lost_master(master):
    """The others wait after each loss, all three do every step once, and the job succeeds."""
    master.reach(0, world_size=3, timeout_s=240)
    for pod in ("theirs-worker-1", "theirs-master-0"):
        lost = ("delete", "pod", pod, "--force", "--grace-period=0")
        found = master.recover(lambda lost=lost: master.namespace.kubectl(*lost), 3, timeout_s=180)
        assert found.lost == {pod}
    until(lambda: master.condition("Succeeded"), "its success", 180, poll_s=1)
    lines = master.lines()
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["world_size"] for line in lines} == {3}  # the others save and wait
