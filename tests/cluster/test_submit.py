"""gptddp-k8s on a real cluster: from texts in a volume to a sample, and what may come between."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from support.toy import SMALL
from support.waiting import until

ROOT = Path(__file__).parents[2]
KINDS = "pytorchjobs,pods,services,secrets,serviceaccounts,networkpolicies,pdb,jobs"
JOB = (
    "--name",
    "demo",
    "--replicas",
    "2",
    "--cpu",
    "250m",
    "--memory",
    "2Gi",
    "--data",
    "data/set",
)


class K8s:
    """`gptddp-k8s` as a process, in the namespace of a test."""

    def __init__(self, namespace):
        self.namespace = namespace

    def start(self, command, *args):
        main = [sys.executable, "-c", "from gptddp.k8s import main; main()"]
        given = {"KUBECONFIG": str(self.namespace.kubeconfig), "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [*main, command, "-n", self.namespace.namespace, *args],
            env={**os.environ, **given},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __call__(self, *args, code=0):
        process = self.start(*args)
        out, err = process.communicate(timeout=240)
        assert process.returncode == code, f"{args}: {process.returncode}\n{out}\n{err}"
        return out, err


@pytest.fixture
def k8s(namespace):
    return K8s(namespace)


def names(namespace):
    """kind/name of everything that may be left, but what every namespace has."""
    found = namespace.get(KINDS)
    return {f"{o['kind']}/{o['metadata']['name']}" for o in found} - {"ServiceAccount/default"}


def texts(k8s, namespace):
    """Put the Python files of the image into the folder raw of the volume `data`."""
    job = yaml.safe_load(k8s("prepare", "--dry-run", "--source", "data/x", "--data", "data/y")[0])
    job["metadata"]["name"] = "texts"
    container = job["spec"]["template"]["spec"]["containers"][0]
    copy = "cd /opt/gptddp && find gptddp -name '*.py' -exec cp --parents {} /data/raw/ ';'"
    container["command"] = ["sh", "-c", f"mkdir /data/raw && {copy}"]
    namespace.kubectl("create", "-f", "-", stdin=job)
    namespace.kubectl("wait", "--for=condition=complete", "job/texts", "--timeout=120s")
    namespace.kubectl("delete", "job", "texts")


def prepared(k8s, namespace):
    """A dataset in the folder set of the volume `data`, by the command for it."""
    texts(k8s, namespace)
    prepare = ("prepare", "--source", "data/raw", "--data", "data/set", "--cpu", "250m")
    return k8s(*prepare, "--follow", "--", "--vocab-size", "300")


def pods(namespace):
    return [p for p in namespace.get("pods") if "deletionTimestamp" not in p["metadata"]]


def test_from_texts_to_a_sample(k8s, namespace):
    """prepare, submit --wait, sample, delete: nothing else is needed, and nothing left behind."""
    out, err = prepared(k8s, namespace)
    assert out.startswith("job.batch/prepare created\n") and "vocabulary 300" in out
    assert "gptddp-k8s submit --data data/set" in err
    again = ("prepare", "--source", "data/raw", "--data", "data/set", "--cpu", "250m")
    assert k8s(*again, "--", "--vocab-size", "300")[0] == "job.batch/prepare unchanged\n"

    out, err = k8s("submit", *JOB, "--wait", "--", *SMALL, "--steps", "12")
    assert out == "pytorchjob.kubeflow.org/demo created\n" and "Succeeded" in err
    uid = namespace.get("pytorchjob", "demo")["metadata"]["uid"]
    for kind in ("serviceaccount", "networkpolicy", "poddisruptionbudget", "secret"):
        assert [o["uid"] for o in namespace.get(kind, "demo")["metadata"]["ownerReferences"]] == [
            uid
        ]

    out, err = k8s("sample", "demo", "--prompt", "import", "--tokens", "20")
    assert out.startswith("import") and err.startswith("step 12, seed 0")
    k8s("delete", "demo")
    k8s("delete", "prepare")
    assert names(namespace) == set()
    assert k8s("sample", "demo", "--prompt", "import", "--tokens", "20")[0] == out
    k8s("delete", "demo", code=102)


def test_scale_suspend_resume_and_delete_a_running_job(k8s, namespace):
    """Each shows in the pods; the last one waits until they are gone."""
    prepared(k8s, namespace)
    k8s("delete", "prepare")
    job = (*JOB, "--", *SMALL, "--steps", "100000")
    k8s("submit", *job)
    running = ("Running",) * 2
    until(lambda: tuple(p["status"]["phase"] for p in pods(namespace)) == running)
    assert "demo scaled: 2 -> 1" in k8s("scale", "demo", "--replicas", "1")[0]
    until(lambda: len(pods(namespace)) == 1)
    assert k8s("submit", *job)[0] == "pytorchjob.kubeflow.org/demo unchanged\n"
    assert len(pods(namespace)) == 1
    _, err = k8s("submit", *JOB, "--", *SMALL, "--steps", "9", code=2)
    assert "args[--steps]: 100000 -> 9" in err
    k8s("suspend", "demo")
    until(lambda: not pods(namespace))
    k8s("resume", "demo")
    until(lambda: len(pods(namespace)) == 1)
    k8s("delete", "demo")
    assert names(namespace) == set()


def test_what_kubectl_applies_is_the_same_job(k8s, namespace):
    """render | kubectl apply, then submit: unchanged, and the companions get their owner."""
    out, _ = k8s("render", *JOB, "--", *SMALL, "--steps", "12")
    namespace.kubectl("apply", "-f", "-", stdin=out)
    job = (*JOB, "--", *SMALL, "--steps", "12")
    assert k8s("submit", *job)[0] == "pytorchjob.kubeflow.org/demo unchanged\n"
    for kind in ("serviceaccount", "networkpolicy", "poddisruptionbudget"):
        assert namespace.get(kind, "demo")["metadata"]["ownerReferences"]
    k8s("delete", "demo")
    assert names(namespace) == set()


def test_a_killed_submit_is_completed_by_the_same_command(k8s, namespace):
    """SIGKILL while it creates objects: the second call ends with all of them, owned."""
    for after_s in (0.5, 0.6, 0.7, 0.8):
        job = ("--name", f"demo-{after_s * 10:.0f}", "--", *SMALL, "--steps", "12")
        process = k8s.start("submit", *job)
        time.sleep(after_s)
        process.kill()
        process.communicate()
        k8s("submit", *job)
        for kind in ("serviceaccount", "networkpolicy", "poddisruptionbudget", "secret"):
            assert namespace.get(kind, job[1])["metadata"]["ownerReferences"]
        k8s("delete", job[1], "--no-wait")


def test_the_server_has_the_last_word_before_anything_is_created(k8s, namespace):
    """A quota is told as a warning, a missing claim and a missing namespace as an error."""
    quota = {"kind": "ResourceQuota", "apiVersion": "v1", "metadata": {"name": "small"}}
    namespace.kubectl("create", "-f", "-", stdin={**quota, "spec": {"hard": {"pods": "0"}}})
    _, err = k8s("submit", *JOB)
    assert "warning: its pods would be refused now" in err and "exceeded quota" in err
    k8s("delete", "demo")
    _, err = k8s("submit", *JOB, "--runs", "other", code=2)
    assert "no claim other (--runs)" in err and names(namespace) == set()
    namespace.namespace, kept = "gptddp-test-nowhere", namespace.namespace
    _, err = k8s("submit", *JOB, code=1)
    namespace.namespace = kept
    assert "kubectl create namespace gptddp-test-nowhere" in err


def test_short_jobs_that_end_early_say_why_and_leave_nothing(k8s, namespace):
    """Ctrl-C of a sample, a run without a checkpoint, sources that are not there."""
    process = k8s.start("sample", "demo")
    until(lambda: namespace.get("jobs"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _, err = k8s("sample", "demo", code=100)
    assert "/runs/demo is not a run directory" in err and "no PyTorchJob demo in the " in err
    until(lambda: not namespace.get("jobs"))
    _, err = k8s("prepare", "--source", "data/none", "--data", "data/set", "--wait", code=100)
    assert "cannot read /data/none" in err
