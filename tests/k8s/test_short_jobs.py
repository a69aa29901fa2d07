"""`prepare` and `sample` on a cluster: their short Jobs, through an API server."""

import pytest
from support.manifests import render_job
from support.short_jobs import run_pods, server_with_texts

from gptddp.k8s.act import short_job

PREPARE = ("prepare", "--source", "texts/books")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(short_job, "_POLL_S", 0.05)


@pytest.fixture
def server_in():
    return server_with_texts


# -- prepare -----------------------------------------------------------------------------------


def test_prepare_returns_at_once_and_is_idempotent(api, k8s):
    """A second `prepare` changes nothing; while the Job runs, other options are refused."""
    first = k8s(*PREPARE)
    assert (first.exit_code, first.stdout) == (0, "job.batch/prepare created\n")
    again = k8s(*PREPARE)
    assert again.stdout == "job.batch/prepare unchanged\n" and "--follow shows" in again.stderr
    other = k8s(*PREPARE, "--cpu", "2")
    assert other.exit_code == 2 and "is running with other settings" in other.stderr
    assert f"`gptddp-k8s delete prepare --kubeconfig {api.kubeconfig}`" in other.stderr
    assert api.writes == ["create Job"]


def test_prepare_follow_prints_the_log_to_its_end(api, k8s):
    """The log is on stdout, the next command on stderr; a log that breaks off is continued."""
    run_pods(api, log=["reading", "writing"])
    ended = api.created["Job"]

    def breaking(body):
        ended(body)
        api.logs["prepare-pod"].break_after = [len("2026-11-21T09:00:00.000000001Z reading\n") + 9]

    api.created["Job"] = breaking
    result = k8s(*PREPARE, "--follow")
    assert result.exit_code == 0, result.output
    assert result.stdout == "job.batch/prepare created\nreading\nwriting\n"
    assert "gptddp-k8s submit --data data" in result.stderr


@pytest.mark.parametrize(
    ("end", "options", "words"),
    [
        ({"exitCode": 2, "message": "Error: cannot write --out /data/books: check"}, [],
         "failed: cannot write --data /data/books: check"),
        ({}, ["--", "--seed", "3"], ""),
    ],
)  # fmt: skip
def test_an_ended_prepare_job_is_replaced(api, k8s, end, options, words):
    """The same command replaces a failed Job and prints its error, other options a finished Job."""
    run_pods(api, **end)
    first, again = k8s(*PREPARE, "--wait"), k8s(*PREPARE, "--wait", *options)
    assert first.exit_code == (100 if end else 0) and words in first.stderr
    assert words in again.stderr and ("the last Job prepare failed" in again.stderr) is bool(end)
    assert api.writes == ["create Job", "delete Job", "create Job"]


def test_a_prepare_job_that_is_deleted_during_the_wait_has_failed(api, k8s):
    """The exit code is 100, whoever deleted the Job."""
    api.created["Job"] = lambda body: api.remove("Job", "prepare")
    result = k8s(*PREPARE, "--wait")
    assert result.exit_code == 100 and "prepare was deleted before it ended" in result.stderr


# -- sample ------------------------------------------------------------------------------------


def test_sample_prints_the_text_alone_and_deletes_its_job(api, k8s):
    """stdout is the sample; step and seed are on stderr. A Job that cannot be deleted is named, and
    the text is not lost."""
    run_pods(api, message="step 40, seed 0", log=["def f():", "    pass"])
    result = k8s("sample", "demo", "--prompt", "def")
    assert result.exit_code == 0, result.output
    assert result.stdout == "def f():\n    pass\n" and result.stderr == "step 40, seed 0\n"
    assert api.all() == []
    api.forbidden = {"DELETE jobs"}
    result = k8s("sample", "demo")
    assert (result.exit_code, result.stdout) == (0, "def f():\n    pass\n")
    ((_, left),) = [it for it in api.all() if it[0] == "Job"]
    there = f"-n default --kubeconfig {api.kubeconfig}"
    assert f"`kubectl delete job {left} {there}`" in result.stderr


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        ({"exitCode": 4, "message": "Error: /runs/demo has no checkpoint"}, "has no checkpoint;"),
        ({"exitCode": 137, "reason": "OOMKilled"}, "137 (SIGKILL), OOMKilled; give it more, --me"),
        ({"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such host"}}},
         "pod demo-sample-x1y2z-pod: cannot get the image i: ImagePullBackOff: no such host; --ima"
         "ge names another"),
    ],
)  # fmt: skip
def test_a_failed_sample_prints_the_reason(api, k8s, ended, words):
    """Exit code 100 with the program's or the kubelet's message; the Job is deleted."""
    api.put(render_job({"name": "demo"}))
    run_pods(api, **ended)
    result = k8s("sample", "demo", "--timeout", "5")
    assert result.exit_code == 100 and words in result.stderr and result.stdout == ""
    assert "gptddp-k8s status demo" in result.stderr or "--image" in result.stderr
    assert api.writes == ["create Job", "delete Job"]


def test_a_sample_of_a_missing_job_names_the_existing_jobs(api, k8s):
    """The error does not suggest `status` of the missing job, which would be refused."""
    api.put(render_job({"name": "demo"}))
    run_pods(api, exitCode=2, message="Error: /runs/dem is not a run directory")
    result = k8s("sample", "dem", "--timeout", "5")
    assert result.exit_code == 100 and "gptddp-k8s status" not in result.stderr
    assert "not a run directory; no PyTorchJob dem in the namespace default: there are demo" in (
        result.stderr
    )


def event(kind, name, message, second=0, type="Warning"):
    about = {"involvedObject": {"kind": kind, "name": name}, "type": type, "message": message}
    at = f"2026-11-21T09:00:0{second}Z"
    return {"kind": "Event", "metadata": {"name": message}, "lastTimestamp": at, **about}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "message": "2 Insufficient cpu. x"}
PENDING = {"phase": "Pending", "containerStatuses": []}
JOB_NAME, POD_NAME = "demo-sample-x1y2z", "demo-sample-x1y2z-pod"


@pytest.mark.parametrize(
    ("status", "events", "words"),
    [
        (PENDING | {"conditions": [UNSCHEDULABLE]}, [],
         f"pod {POD_NAME}: no node takes it: 2 Insufficient cpu; see `kubectl describe no"),
        (PENDING | {"conditions": [{**UNSCHEDULABLE, "message": "unbound PersistentVolumeClaims"}]},
         [event("PersistentVolumeClaim", "texts", "no class fast", 1)],
         "its PersistentVolumeClaim texts has no volume: no class fast; see `kubectl describe pvc"),
        (PENDING,
         [event("Pod", POD_NAME, "old", 1), event("Pod", POD_NAME, "MountVolume failed", 2)],
         f"pod {POD_NAME}: MountVolume failed"),
        (None, [event("Job", JOB_NAME, "exceeded quota: x")], f"{JOB_NAME}: exceeded quota: x"),
    ],
)  # fmt: skip
def test_the_reason_why_a_sample_does_not_run_is_reported(api, k8s, status, events, words):
    """The reason is printed once during the wait, with a command that shows more, and at the
    timeout with exit code 124; then the Job is deleted."""
    api.objects["persistentvolumeclaims", "texts"]["status"] = {"phase": "Pending"}
    api.put(*events, event("Job", JOB_NAME, "Created pod", 9, "Normal"))
    if status:
        run_pods(api, status=status)
    result = k8s("sample", "demo", "--timeout", "0.5")
    assert result.exit_code == 124 and "is not done after 0.5 s: " in result.stderr
    first, last = result.stderr.splitlines()
    told, _, _ = first.partition(": ")[2].partition("; see `")
    assert words in first and last.endswith(told)
    assert api.writes == ["create Job", "delete Job"]


def test_without_the_right_to_read_events_a_sample_waits(api, k8s):
    """The message says `it runs` in place of a reason."""
    api.forbidden = {"GET events"}
    result = k8s("sample", "demo", "--timeout", "0.1")
    assert result.exit_code == 124 and "is not done after 0.1 s: it runs" in result.stderr
