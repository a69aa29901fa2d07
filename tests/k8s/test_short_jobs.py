"""The short Jobs: their objects, and the way of `prepare` through a small API server."""

import pytest
from click.testing import CliRunner
from support.manifests import pod_spec, render_job
from support.short_jobs import dry_run, pod_of, run_pods, server_with_texts

from gptddp.k8s.cli.main import cli

PREPARE = ("prepare", "--source", "texts/books")


@pytest.fixture
def server_in():
    return server_with_texts


# -- the objects -------------------------------------------------------------------------------


def test_prepare_runs_the_images_own_command():
    """Source read-only, data writable, options as given; the same bytes for the same options."""
    job = dry_run("--source", "texts/a/b", "--data", "sets/new", "--", "--vocab-size", "4096")
    (container,) = pod_of(job)["containers"]
    assert container["command"] == [
        *("gptddp", "prepare", "/source/a/b", "--out", "/data/new", "--vocab-size", "4096")
    ]
    mounts = {m["mountPath"]: m.get("readOnly", False) for m in container["volumeMounts"]}
    assert mounts == {"/data": False, "/source": True, "/tmp": False}
    claims = {v["name"]: v.get("persistentVolumeClaim") for v in pod_of(job)["volumes"]}
    assert claims["data"] == {"claimName": "sets"} and claims["source"] == {"claimName": "texts"}
    assert job == dry_run(
        "--source", "texts/a/b", "--data", "sets/new", "--", "--vocab-size", "4096"
    )


def test_source_and_data_in_one_claim_are_mounted_once():
    """So that prepare can see whether one folder lies in the other."""
    job = dry_run("--source", "v/raw", "--data", "v/set")
    (container,) = pod_of(job)["containers"]
    assert container["command"] == ["gptddp", "prepare", "/data/raw", "--out", "/data/set"]
    assert len(pod_of(job)["volumes"]) == 2  # and the scratch folder


def test_a_validation_source_is_in_the_volume_of_the_texts():
    """All options of `gptddp prepare` go through; --val has to be a path that the pod has."""
    options = ["--on-bad", "skip", "--max-bad", "5", "--keep-copies", "--val"]
    for args, val in (
        (["--source", "texts/a"], "/source/val.jsonl"),
        (["--source", "v/raw", "--data", "v/set"], "/data/raw/val"),
    ):
        (container,) = pod_of(dry_run(*args, "--", *options, val))["containers"]
        assert container["command"][-len(options) - 1 :] == [*options, val]


def test_short_jobs_meet_the_restricted_standard():
    """As the trainer's pods: the very same parts."""
    trainer, pod = pod_spec(render_job()), pod_of(dry_run("--source", "texts"))
    for key in ("securityContext", "automountServiceAccountToken", "enableServiceLinks"):
        assert pod[key] == trainer[key]
    assert pod["containers"][0]["securityContext"] == trainer["containers"][0]["securityContext"]
    env = {e["name"]: e["value"] for e in pod["containers"][0]["env"]}
    assert env == {"HOME": "/tmp", "TMPDIR": "/tmp"} and pod["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--source", "v/set/raw", "--data", "v/set"], "lies in --data v/set"),
        (["--source", "v", "--data", "v"], "a folder of its own"),
        (["--source", "/mnt/x"], "PersistentVolumeClaim"),
        (["--source", "v/../x"], "--source: 'v/../x' is not the name of a Persist"),
        (["--source", "v", "--cpu", "many"], "--cpu: 'many'"),
        (["--source", "v", "--wait"], "--dry-run asks no cluster: leave out --wait"),
        (["--source", "v", "--image", ""], "--image"),
        (["--source", "v", "--name", "A"], "--name: 'A'"),
        (["--source", "v", "--", "--vocab", "3"], "after --: No such option '--vocab'"),
        (["--source", "v", "--", "--out", "x"], "with --data"),
        (["--source", "v", "--", "more"], "with --source"),
        (["--source", "v/a", "--", "--val", "b"], "such as /source/a/val.jsonl"),
        (["--source", "v/a", "--data", "v/b", "--", "--val", "/source/b"], "at /data: give a path"),
        (["--source", "v", "--", "--on-bad", "quarantine"], "after --: Invalid value"),
    ],
)
def test_what_cannot_work_is_refused_before_a_cluster_is_asked(args, words):
    """Exit code 2, the option and the fix."""
    result = CliRunner().invoke(cli, ["prepare", "--dry-run", *args])
    assert result.exit_code == 2 and words in result.stderr and result.stdout == ""


# -- prepare -----------------------------------------------------------------------------------


def test_prepare_returns_at_once_and_does_nothing_twice(api, k8s):
    """Created, then unchanged; its running Job refuses other options with the difference."""
    first = k8s(*PREPARE)
    assert (first.exit_code, first.stdout) == (0, "job.batch/prepare created\n")
    again = k8s(*PREPARE)
    assert again.stdout == "job.batch/prepare unchanged\n" and "is running" in again.stderr
    other = k8s(*PREPARE, "--cpu", "2")
    assert other.exit_code == 2 and "resources.limits.cpu: 1 -> 2" in other.stderr
    assert api.writes == ["create Job"]


def test_prepare_waits_and_follows(api, k8s):
    """The log on stdout, what to type next on stderr."""
    run_pods(api, log=["reading", "writing"])
    result = k8s(*PREPARE, "--follow")
    assert result.exit_code == 0, result.output
    assert result.stdout == "job.batch/prepare created\nreading\nwriting\n"
    assert "gptddp-k8s submit --data data" in result.stderr


def test_a_failed_prepare_tells_why_and_is_run_again(api, k8s):
    """Exit code 100 with the program's last words; the same command replaces it."""
    run_pods(api, message="Error: cannot read /source/books: check the path", exitCode=2)
    result = k8s(*PREPARE, "--wait")
    assert result.exit_code == 100
    assert "prepare failed: cannot read /source/books: check the path" in result.stderr
    again = k8s(*PREPARE, "--wait")
    assert "the last Job prepare failed: cannot read" in again.stderr
    assert api.writes == ["create Job", "delete Job", "create Job"]


def test_a_done_prepare_makes_room_for_another(api, k8s):
    """Other options after the end: replaced without a word of refusal."""
    run_pods(api)
    k8s(*PREPARE, "--wait")
    assert k8s(*PREPARE, "--wait", "--", "--seed", "3").exit_code == 0
    assert api.writes == ["create Job", "delete Job", "create Job"]


def test_a_job_of_somebody_else_is_left_alone(api, k8s):
    """A batch Job of that name which is not of gptddp-k8s: refused, with --name."""
    api.put({"kind": "Job", "metadata": {"name": "prepare"}, "spec": {}})
    result = k8s(*PREPARE)
    assert result.exit_code == 2 and "not from gptddp-k8s: use another --name" in result.stderr
    assert api.writes == []


def test_a_prepare_that_is_deleted_meanwhile_has_failed(api, k8s):
    """By whoever: exit code 100."""
    api.created["Job"] = lambda body: api.remove("Job", "prepare")
    result = k8s(*PREPARE, "--wait")
    assert result.exit_code == 100 and "prepare was deleted before it ended" in result.stderr


def test_a_missing_source_claim_is_named(api, k8s):
    """Nothing is created."""
    result = k8s("prepare", "--source", "nope/x")
    assert result.exit_code == 2 and "no claim nope (--source)" in result.stderr
    assert api.writes == []
