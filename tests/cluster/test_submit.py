"""gptddp-k8s on a real cluster: what kubectl has applied, what is cut off, what is refused."""

import signal
import subprocess
import time

from support.cluster_jobs import cli, command
from support.toy import SMALL
from support.waiting import until

KINDS = "pytorchjobs,pods,services,secrets,serviceaccounts,networkpolicies,pdb,jobs"
JOB = ("--name=demo", "--replicas=2", "--cpu=250m", "--memory=2Gi", "--data=data/set")


def start(namespace, verb, *args):
    """`gptddp-k8s` as a process, in the namespace of a test."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command(namespace, verb, *args), **pipes)


def names(namespace):
    """kind/name of everything that may be left, but what every namespace has."""
    found = namespace.get(KINDS)
    return {f"{o['kind']}/{o['metadata']['name']}" for o in found} - {"ServiceAccount/default"}


def test_what_kubectl_applies_is_the_same_job(namespace):
    """render | kubectl apply, then submit: unchanged, and the companions get their owner."""
    job = (*JOB, "--", *SMALL, "--steps", "12")
    rendered = cli(namespace, "render", *job).stdout
    namespace.kubectl("apply", "-f", "-", stdin=rendered)
    same = cli(namespace, "submit", *job).stdout
    assert same == "pytorchjob.kubeflow.org/demo unchanged\n"
    for kind in ("serviceaccount", "networkpolicy", "poddisruptionbudget"):
        assert namespace.get(kind, "demo")["metadata"]["ownerReferences"]
    cli(namespace, "delete", "demo")
    assert names(namespace) == set()


def test_a_killed_submit_is_completed_by_the_same_command(namespace):
    """SIGKILL while it creates objects: the second call ends with all of them, owned."""
    for after_s in (0.5, 0.6, 0.7, 0.8):
        job = ("--name", f"demo-{after_s * 10:.0f}", "--", *SMALL, "--steps", "12")
        process = start(namespace, "submit", *job)
        time.sleep(after_s)
        process.kill()
        process.communicate()
        cli(namespace, "submit", *job)
        for kind in ("serviceaccount", "networkpolicy", "poddisruptionbudget", "secret"):
            assert namespace.get(kind, job[1])["metadata"]["ownerReferences"]
        cli(namespace, "delete", job[1], "--no-wait")


def test_the_server_has_the_last_word_before_anything_is_created(namespace):
    """A quota is told as a warning, a missing claim and a missing namespace as an error."""
    quota = {"kind": "ResourceQuota", "apiVersion": "v1", "metadata": {"name": "small"}}
    namespace.kubectl("create", "-f", "-", stdin={**quota, "spec": {"hard": {"pods": "0"}}})
    err = cli(namespace, "submit", *JOB).stderr
    assert "warning: its pods would be refused now" in err and "exceeded quota" in err
    cli(namespace, "delete", "demo")
    err = cli(namespace, "submit", *JOB, "--runs", "other", code=2).stderr
    assert "no claim other (--runs)" in err and names(namespace) == set()
    namespace.namespace, kept = "gptddp-test-nowhere", namespace.namespace
    err = cli(namespace, "submit", *JOB, code=1).stderr
    namespace.namespace = kept
    assert "kubectl create namespace gptddp-test-nowhere" in err


def test_short_jobs_that_end_early_say_why_and_leave_nothing(namespace):
    """Ctrl-C of a sample, a run without a checkpoint, sources that are not there."""
    process = start(namespace, "sample", "demo")
    until(lambda: namespace.get("jobs"), "the Job of the sample", 60)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    err = cli(namespace, "sample", "demo", code=100).stderr
    assert "/runs/demo is not a run directory" in err and "no PyTorchJob demo in the " in err
    until(lambda: not namespace.get("jobs"), "its end", 60)
    err = cli(
        namespace, "prepare", "--source", "data/none", "--data", "data/set", "--wait", code=100
    ).stderr
    assert "cannot read /data/none" in err
