"""`status`, `logs` and `wait` on a real cluster: real reasons, real logs, pods that really go."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from gptddp import __version__

SLEEP = "import time; time.sleep(600)"
COUNT = """
import os, signal, sys, time, uuid
def stop(*_):
    print(life, "last", number, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
life, number, end = uuid.uuid4().hex[:8], 0, float(sys.argv[1])
while time.time() < end:
    print(life, number, flush=True)
    number += 1
    time.sleep(0.01)
print(life, "last", number, flush=True)
"""


def job(name, code, *args, replicas=1, suspend=False, policy="ExitCode", pod=(), **container):
    """A PyTorchJob that runs Python code in our image, as the restricted Pod Security wants it."""
    main = {
        "name": "pytorch",
        "image": f"gptddp:{__version__}",
        "command": ["python", "-uc", code, *args],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **container,
    }
    spec = {"terminationGracePeriodSeconds": 5, "containers": [main], **dict(pod)}
    worker = {"replicas": replicas, "restartPolicy": policy, "template": {"spec": spec}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "gptddp"}},
        "spec": {
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": replicas},
            "runPolicy": {"cleanPodPolicy": "Running", "suspend": suspend},
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }


def command(namespace, *args):
    """The `gptddp-k8s` command line for this namespace."""
    cluster = ("-n", namespace.namespace, "--kubeconfig", str(namespace.kubeconfig))
    return [sys.executable, "-c", "from gptddp.k8s import main; main()", *args, *cluster]


def run(namespace, *args, timeout_s=120):
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        command(namespace, *args),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
    )


MISSING = {"name": "d", "persistentVolumeClaim": {"claimName": "nothing"}}
NO_MAP = {"name": "d", "configMap": {"name": "nothing"}}
KEY = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "nothing", "key": "k"}}}
GREED = "x = []\nwhile True: x.append(bytearray(10**7))"
# name: (job, the id of its first cause, a word of the sentence)
BAD = {
    "cpu": (job("cpu", SLEEP, resources={"requests": {"cpu": "500"}}), "unschedulable", "cpu"),
    "claim": (job("claim", SLEEP, pod={"volumes": [MISSING]}), "claim-missing", "nothing"),
    "user": (job("user", SLEEP, pod={"serviceAccountName": "nobody"}), "pods-refused", "nobody"),
    "security": (job("security", SLEEP, securityContext={}), "pods-refused", "Pod Security"),
    "image": (job("image", SLEEP, image="none.invalid/gptddp:1"), "image", "none.invalid/gptddp:1"),
    "never": (
        job("never", SLEEP, image="gptddp:none", imagePullPolicy="Never"),
        "image",
        "ErrImageNeverPull",
    ),
    "secret": (job("secret", SLEEP, env=[KEY]), "container", 'secret "nothing" not found'),
    "mount": (
        job(
            "mount", SLEEP, pod={"volumes": [NO_MAP]},
            volumeMounts=[{"name": "d", "mountPath": "/d"}],
        ),
        "volume",
        'configmap "nothing" not found',
    ),
    "greed": (job("greed", GREED, policy="OnFailure"), "out-of-memory", "memory of 64Mi"),
    "error": (job("error", "raise ValueError('no luck')"), "failed", "ValueError: no luck"),
    "rank": (
        job("rank", "print('gptddp.launch: rank 3: no data'); raise SystemExit(2)"),
        "failed",
        "exited with 2 (bad configuration or data): rank 3: no data",
    ),
    "held": (job("held", SLEEP, suspend=True), "suspended", "gptddp-k8s resume held"),
    "x" * 58: (job("x" * 58, SLEEP), "service-refused", "63 characters"),
}  # fmt: skip


def test_the_reason_is_found(namespace):
    """Thirteen jobs that cannot run, each for another reason: the first cause is that one."""
    namespace.kubectl("create", "-f", "-", stdin=[made for made, _, _ in BAD.values()])
    wanted, found, end = dict(BAD), {}, time.monotonic() + 90
    while wanted and time.monotonic() < end:
        for name, (_, cause, word) in list(wanted.items()):
            found[name] = json.loads(run(namespace, "status", name, "-o", "json").stdout)
            first = next(iter(found[name]["causes"]), {"id": None})
            if first["id"] == cause and word in found[name]["why"]:
                del wanted[name]
        time.sleep(1)
    assert not wanted, {name: (found[name]["state"], found[name]["why"]) for name in wanted}


def test_no_line_is_lost_when_pods_are(namespace):
    """Followed from the start through four killed pods: every life counts without a gap."""
    end = time.time() + 50
    namespace.kubectl("create", "-f", "-", stdin=job("count", COUNT, str(end), replicas=3))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    follower = subprocess.Popen(
        command(namespace, "logs", "-f", "count"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    for pods in (["count-worker-2"], ["count-worker-0"], ["count-worker-1", "count-worker-2"]):
        for name in (f"count-worker-{n}" for n in range(3)):
            namespace.kubectl("wait", f"pod/{name}", "--for=create", "--timeout=30s")
            namespace.kubectl("wait", f"pod/{name}", "--for=condition=Ready", "--timeout=30s")
        time.sleep(3)
        namespace.kubectl("delete", "pod", "--force", *pods)
    out, err = follower.communicate(timeout=90)
    assert follower.returncode == 0 and "count: Succeeded" in err
    lives = defaultdict(list)
    for line in out.splitlines():
        pod, life, *words = line.split()
        lives[pod, life].append(words)
    assert len(lives) >= 7 and {pod for pod, _ in lives} == {"[w0]", "[w1]", "[w2]"}
    for lines in lives.values():
        numbers = [words[0] for words in lines if words[0] != "last"]
        assert numbers == [str(n) for n in range(len(numbers))]
    ends = [lines[-1] == ["last", str(len(lines) - 1)] for lines in lives.values()]
    assert ends.count(True) >= 3  # a killed pod's last words may not leave its node


@pytest.mark.parametrize(
    ("made", "code", "said"),
    [
        (job("wait", "print('done')"), 0, "wait: Succeeded"),
        (job("wait", "raise SystemExit(3)"), 100, "exited with 3 (loss or gradient not finite)"),
        (job("wait", SLEEP, suspend=True), 103, "wait: Suspended"),
        (job("wait", SLEEP), 124, "still"),
        (job("other", SLEEP, suspend=True), 102, "no PyTorchJob wait"),
    ],
    ids=["succeeded", "failed", "suspended", "running", "absent"],
)
def test_how_a_job_ended_is_an_exit_code(namespace, made, code, said):
    """Each with its line on stderr, and nothing on stdout."""
    namespace.kubectl("create", "-f", "-", stdin=made)
    done = run(namespace, "wait", "wait", "--timeout", "8" if code == 124 else "60")
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
