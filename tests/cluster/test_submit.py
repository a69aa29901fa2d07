"""gptddp-k8s on a real cluster: a job that kubectl applied, and short Jobs that end early."""

import signal

from support.cluster_jobs import cli, start
from support.toy import SMALL
from support.waiting import until

KINDS = "pytorchjobs,pods,services,secrets,serviceaccounts,networkpolicies,pdb,jobs"
JOB = ("--name=demo", "--replicas=2", "--cpu=250m", "--memory=2Gi", "--data=data/set")


def names(namespace):
    """kind/name of all objects that may be left, without those of every namespace."""
    found = namespace.get(KINDS)
    return {f"{o['kind']}/{o['metadata']['name']}" for o in found} - {"ServiceAccount/default"}


def test_submit_recognises_a_job_that_kubectl_applied(namespace):
    """`submit` leaves a job of `render | kubectl apply` unchanged; its companions get an owner."""
    job = (*JOB, "--", *SMALL, "--steps", "12")
    rendered = cli(namespace, "render", *job).stdout
    namespace.kubectl("apply", "-f", "-", stdin=rendered)
    same = cli(namespace, "submit", *job).stdout
    assert same == "pytorchjob.kubeflow.org/demo unchanged\n"
    for kind in ("serviceaccount", "networkpolicy", "poddisruptionbudget"):
        assert namespace.get(kind, "demo")["metadata"]["ownerReferences"]
    cli(namespace, "delete", "demo")
    assert names(namespace) == set()


def test_short_jobs_that_end_early_say_why_and_leave_nothing(namespace):
    """Ctrl-C of a sample, a run directory that does not exist, and missing sources."""
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
