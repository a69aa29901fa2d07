"""The first half of a job's life on a real cluster: doctor, dry run, list, logs, replace.

The container of the job is a shell that fails after five seconds, so that a test can watch it.
"""

import json

import pytest
from support.cluster_jobs import cli


@pytest.fixture(scope="module")
def namespace(new_namespace):
    made = new_namespace()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def pod(tmp_path_factory) -> list[str]:
    """Options of a job whose container prints a line and fails."""
    file = tmp_path_factory.mktemp("patch") / "patch.yaml"
    container = {"name": "pytorch", "command": ["sh", "-c", "echo no dataset; sleep 5; exit 2"]}
    template = {"spec": {"containers": [container]}}
    worker = {"pytorchReplicaSpecs": {"Worker": {"template": template}}}
    file.write_text(json.dumps({"spec": worker}))
    return ["--cpu=100m", f"--patch={file}"]


@pytest.fixture(scope="module")
def failed(namespace, pod) -> list[str]:
    """The job `life` has failed; returns the states that `status --watch` printed meanwhile."""
    cli(namespace, "submit", "--name=life", *pod)
    watched = cli(namespace, "status", "life", "--watch", "-o", "json", code=100).stdout
    return [json.loads(line)["state"] for line in watched.splitlines()]


def test_a_dry_run_leaves_nothing(namespace, pod):
    """The server checks every object, and a pod, but creates none."""
    done = cli(namespace, "submit", "--name=dry", *pod, "--dry-run")
    assert done.stdout.count("would be created") == 5 and "warning" not in done.stderr
    assert cli(namespace, "list", "-o", "json").stdout.strip() == "[]"
    kinds = "serviceaccounts,networkpolicies,poddisruptionbudgets,secrets"
    assert "/dry" not in namespace.kubectl("get", kinds, "-o", "name").stdout
    wrong = cli(namespace, "submit", "--name=dry", *pod, "--dry-run", "--data=no", code=2)
    assert "no claim no" in wrong.stderr


def test_doctor_passes_a_sound_job_and_finds_a_missing_claim(namespace, pod):
    """No check fails for a job that can run; a missing claim and missing GPUs make checks fail."""
    done = cli(namespace, "doctor", "--name=doc", *pod, "-o", "json", code=None)
    found = {it["id"]: it["status"] for it in json.loads(done.stdout)}
    assert "fail" not in found.values()
    well = {id for id, status in found.items() if status == "ok"}
    assert well >= {"api", "operator", "job", "beside", "pod", "nodes"}
    worse = cli(namespace, "doctor", "--name=doc", "--runs=no", "--gpus=1", "-o", "json", code=1)
    failing = {it["id"] for it in json.loads(worse.stdout) if it["status"] == "fail"}
    assert failing == {"needs", "nodes"}


def test_status_watch_prints_each_state(failed):
    """It prints the states before the end too, and the end last."""
    assert failed[0] in ("Pending", "Running") and failed.index("Failed") == len(failed) - 1


def test_first_failure_prints_the_log_of_the_failed_pod(namespace, failed):
    """stdout has the log of the pod that failed first, and stderr names the pod."""
    done = cli(namespace, "logs", "life", "--first-failure")
    assert done.stdout == "no dataset\n" and "failed first at" in done.stderr
    recent = cli(namespace, "logs", "life", "--since=1h").stdout
    assert "[w0]" in recent


def test_a_dry_run_ignores_the_defaults_of_the_server(namespace, failed, pod):
    """Defaults are no difference; another setting and a changed companion object are."""
    same = cli(namespace, "submit", "--name=life", *pod, "--dry-run").stdout
    assert same.count("is the same") == 4 and "->" not in same
    other = cli(namespace, "submit", "--name=life", *pod, "--cpu=200m", "--dry-run", code=2)
    assert other.stdout.count("->") == 2 and "--replace" in other.stderr
    patch = '{"spec": {"maxUnavailable": 3}}'
    namespace.kubectl("patch", "pdb", "life", "--type=merge", "-p", patch)
    changed = cli(namespace, "submit", "--name=life", *pod, "--dry-run").stdout
    assert "  spec.maxUnavailable: 3 -> 1" in changed.splitlines()


def test_a_failed_job_is_replaced_only_with_replace(namespace, failed, pod):
    """The new job has another uid, its own companion objects, and the command that made it."""
    before = namespace.get("pytorchjob", "life")["metadata"]["uid"]
    left = cli(namespace, "submit", "--name=life", *pod, code=100)
    assert left.stdout == "pytorchjob.kubeflow.org/life unchanged\n" and "--replace" in left.stderr
    cli(namespace, "submit", "--name=life", *pod, "--replace")
    meta = namespace.get("pytorchjob", "life")["metadata"]
    assert meta["uid"] != before and meta["annotations"]["gptddp/submit"].endswith(" --replace")
    owners = namespace.get("pdb", "life")["metadata"]["ownerReferences"]
    assert [it["uid"] for it in owners] == [meta["uid"]]
