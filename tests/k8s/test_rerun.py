"""`rerun`: the same job again, from what is on the cluster."""

import glob
import json
import tempfile
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.api_objects import condition
from support.writable_api_server import WriteAPI, job, put_claims, submit

from gptddp.k8s.cli.main import cli
from gptddp.k8s.render.manifest import SPEC_HASH


@pytest.fixture
def api(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = WriteAPI(tmp_path)
    put_claims(server)
    yield server
    server.close()


def rerun(api, *args):
    return api.command_line("rerun", "demo", *args)


def ended(api, kind, *args):
    """A job that has been submitted with these options, and has ended so."""
    submit(api.command_line, *args)
    worker = job(api)["spec"]["pytorchReplicaSpecs"]["Worker"]  # what a server adds
    worker["template"]["metadata"]["creationTimestamp"] = None
    worker["template"]["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"
    job(api)["spec"]["runPolicy"]["suspend"] = False
    job(api)["metadata"] |= {"resourceVersion": "7", "generation": 2}
    job(api)["status"] = {"conditions": [condition(kind)]}
    return json.loads(json.dumps(job(api)))


def shown(done):
    """What -o yaml has printed, by kind and name."""
    assert done.exit_code == 0, done.stderr
    found = yaml.safe_load_all(done.stdout)
    return {(it["kind"], it["metadata"]["name"]): it for it in found}


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--cpu", "2", "--env", "A=1", "--data", "demo/books", "--runs", "demo"],
        ["--node-selector", "a=b", "--toleration", "demo", "--min", "4"],
        ["--runs", "demo/old/demo", "--", "--init-from", "/runs/demo"],
        ["--without", "networkpolicy", "--service-account", "own"],
        ["--", "--steps", "700", "--from-scratch"],
    ],
)
def test_another_name_gives_what_submit_would_have_given(api, args):
    """Every object equals that of `render` with the new name, to the hash of the job."""
    api.put({"kind": "ServiceAccount", "metadata": {"name": "own"}})
    for claim in ("demo", "data", "runs"):
        put = {"kind": "PersistentVolumeClaim", "metadata": {"name": claim}}
        api.put({**put, "spec": {"accessModes": ["ReadWriteMany"]}})
    ended(api, "Running", *args)
    made = shown(rerun(api, "--name", "next", "--dry-run=client", "-o", "yaml"))
    command = ["render", "--name", "next", "-n", "default", "--replicas", "4", *args]
    assert made == shown(CliRunner().invoke(cli, command))


def test_settings_of_the_trainer_can_be_changed(api):
    """As if they had been given to submit; and the image."""
    ended(api, "Running", "--", "--lr", "0.001", "--steps", "70")
    given = ["--image", "gptddp:new", "--", "--steps", "90"]
    made = shown(rerun(api, "--name", "next", "--dry-run=client", "-o", "yaml", *given))
    command = ["render", "--name", "next", "-n", "default", "--replicas", "4", "--image"]
    command += ["gptddp:new", "--", "--lr", "0.001", "--steps", "90"]
    assert made == shown(CliRunner().invoke(cli, command))


def test_the_new_job_runs_beside_the_old_one(api):
    """Which stays as it is."""
    before = ended(api, "Running")
    done = rerun(api, "--name", "next")
    assert done.exit_code == 0 and done.stdout == "pytorchjob.kubeflow.org/next created\n"
    assert job(api) == before
    assert {("PyTorchJob", "next"), ("ServiceAccount", "next")} <= set(api.all())
    assert "the run next begins anew" in done.stderr


def test_a_failed_job_is_replaced_by_the_same(api):
    """Another object of the same hash, which submit takes for its own; no file is left."""
    before = ended(api, "Failed")
    done = rerun(api)
    assert done.exit_code == 0 and done.stdout == "pytorchjob.kubeflow.org/demo created\n"
    after = job(api)
    assert after["metadata"]["uid"] != before["metadata"]["uid"] and "status" not in after
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert after["spec"]["elasticPolicy"] == before["spec"]["elasticPolicy"]
    assert submit(api.command_line).stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
    assert not glob.glob(f"{tempfile.gettempdir()}/*.yaml")
    assert "goes on from its newest checkpoint" in done.stderr


def test_a_job_that_has_succeeded_goes_on_with_more_steps_only(api):
    """Without other settings there is nothing left to do: what else there is, is said."""
    before = ended(api, "Succeeded", "--", "--steps", "70")
    done = rerun(api)
    assert done.exit_code == 2 and "-- --steps N" in done.stderr and "--name NEW" in done.stderr
    assert job(api) == before
    assert rerun(api, "--", "--steps", "90").exit_code == 0
    after = job(api)
    args = after["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0][
        "args"
    ]
    assert args[args.index("--steps") + 1] == "90"
    notes = [it["metadata"]["annotations"][SPEC_HASH] for it in (before, after)]
    assert notes[0] != notes[1]


@pytest.mark.parametrize(
    ("kind", "suspend", "words"),
    [("Running", False, "gptddp-k8s delete demo"), ("Created", True, "gptddp-k8s resume demo")],
)
def test_a_job_that_has_not_ended_is_not_replaced(api, kind, suspend, words):
    """Exit code 2, and what ends it, or lets it go on."""
    ended(api, kind)
    job(api)["spec"]["runPolicy"]["suspend"] = suspend
    before = len(api.writes)
    done = rerun(api)
    assert done.exit_code == 2 and words in done.stderr and len(api.writes) == before


@pytest.mark.parametrize("fault", ["killed", "refused"])
def test_a_job_is_not_lost_between_its_end_and_its_beginning(api, fault):
    """What is to come is in a file that is named before anything is deleted."""
    ended(api, "Failed")
    if fault == "refused":
        api.refuse["ServiceAccount"] = (403, "serviceaccounts is forbidden")
    else:
        api.cut_at = len(api.writes) + 5
    done = rerun(api)
    assert done.exit_code == 1 and ("PyTorchJob", "demo") not in api.all()
    (file,) = glob.glob(f"{tempfile.gettempdir()}/demo-*.yaml")
    assert f"{file} has it" in done.stderr
    api.refuse, api.cut_at = {}, None
    kept = list(yaml.safe_load_all(Path(file).read_text()))
    assert kept[-1]["kind"] == "PyTorchJob" and "uid" not in kept[-1]["metadata"]
    again = submit(api.command_line)
    assert again.exit_code == 0
    assert job(api)["metadata"]["annotations"] == kept[-1]["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--", "--run-dir", "/x"], "--name begins another run"),
        (["--", "--data", "/x"], "the job decides where it lies"),
        (["--", "--stepz", "9"], "did you mean '--steps'?"),
        (["--lr", "1"], "put it after --"),
        (["--dry-run=client", "--wait"], "--dry-run creates no job"),
        (["--name", "No"], "cannot name a job"),
    ],
)
def test_what_cannot_be_is_refused(api, args, words):
    """Before anything is changed."""
    ended(api, "Failed")
    before = len(api.writes)
    done = rerun(api, *args)
    assert done.exit_code == 2 and words in done.stderr and len(api.writes) == before


def test_a_job_of_somebody_else_is_left_alone(api):
    """It may have parts of which nothing is known here."""
    ended(api, "Failed")
    del job(api)["metadata"]["labels"]
    done = rerun(api)
    assert done.exit_code == 2 and "kubectl get pytorchjob demo" in done.stderr
    assert api.command_line("rerun", "absent").exit_code == 102


def test_own_code_goes_with_the_job(api, tmp_path):
    """Under the name of another job as `submit --code` would make it, and again with the same."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mine.py").write_text("x = 1\n")
    code = ["--code", str(tmp_path / "own")]
    ended(api, "Failed", *code)
    made = shown(rerun(api, "--name", "next", "--dry-run=client", "-o", "yaml"))
    command = ["render", "--name", "next", "-n", "default", "--replicas", "4", *code]
    assert made == shown(CliRunner().invoke(cli, command))
    (before,) = [it for it in api.all() if it[0] == "ConfigMap"]
    assert rerun(api).exit_code == 0 and before in api.all()
    assert submit(api.command_line, *code).stdout == "pytorchjob.kubeflow.org/demo unchanged\n"
