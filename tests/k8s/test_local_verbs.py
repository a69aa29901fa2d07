"""Commands with --local: jobs of this machine, with the same output as a cluster's."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.local_jobs import job, pod_file, status
from support.manifests import container
from support.processes import alive
from support.rank_0_lines import of_a_life
from support.waiting import until

from gptddp.k8s.cli.main import cli
from gptddp.k8s.local import locks
from gptddp.k8s.local.controller import Conditions
from gptddp.k8s.local.paths import options_for
from gptddp.k8s.render import manifest


@pytest.fixture
def here(tmp_path):
    """The folder of a job with two pods, which this process seems to run."""
    folder = tmp_path / "local/jobs/job"
    (folder / "logs").mkdir(parents=True)
    (folder / "manifest.yaml").write_text(manifest.to_yaml([job()]))
    for index, lines in enumerate((of_a_life(), ["a", "b", "c"])):
        (folder / f"logs/job-worker-{index}.log").write_text("\n".join(lines) + "\n")
    made = Conditions()
    made.set("Created", "x"), made.set("Running", "x")
    pods = {
        "job-worker-0": {"phase": "Running", "pid": os.getpid(), "exitCode": None},
        "job-worker-1": {"phase": "Pending", "pid": None, "exitCode": 137},
    }
    for pod, age_s in zip(pods.values(), (100, 7), strict=True):
        at = time.gmtime(time.time() - age_s)
        pod["startTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", at)
    began, run = pods["job-worker-0"]["startTime"], str(tmp_path / "runs/job")
    told = {"startTime": began, "run": run, "conditions": made.items, "pods": pods}
    (folder / "status.json").write_text(json.dumps(told))
    fd = locks.lock(folder)
    yield folder
    os.close(fd)


@pytest.fixture
def k8s(tmp_path):
    """Run a command on the jobs of this test."""

    def run(*args):
        at = ["--local", "--local-dir", str(tmp_path / "local")]
        return CliRunner().invoke(cli, [*args, *at], prog_name="gptddp-k8s")

    return run


def test_status_and_list_show_a_job_on_this_machine(here, k8s, tmp_path):
    """They show state, causes, and the numbers of rank 0's log; a replaced pod has its own age."""
    result = k8s("status", "job", "--watch")
    assert result.exit_code == 0, result.output
    assert "job  Running  pods 1/2\n" in result.stdout and "120/400" in result.stdout
    shown = json.loads(k8s("status", "job", "-o", "json").stdout)
    assert shown["progress"]["goodput"] == 0.974 and shown["fault"]["step"] == 99
    assert [it["ready"] for it in shown["pods"]] == [True, False]
    assert [it["age_s"] // 50 for it in shown["pods"]] == [2, 0]
    assert shown["pods"][1]["status"].startswith("Error 137 (SIGKILL")  # as on a cluster
    assert shown["causes"][0]["id"] == "crash" and "137 (SIGKILL" in shown["causes"][0]["text"]
    assert k8s("list").stdout.splitlines()[1].split()[:3] == ["job", "Running", "1/2"]
    newest = {"step": 130, "loss": 1.5, "tok_s": 9e3, "world_size": 2, "time": time.time() - 50}
    (tmp_path / "runs/job").mkdir(parents=True)
    (tmp_path / "runs/job/log.1.jsonl").write_text(json.dumps(newest) + "\n")
    shown = k8s("status", "job").stdout
    assert re.search("state: +Running on 1 of 2: job-worker-1 is being replaced\n", shown)
    assert re.search(r"step: +130/400  loss 1.5000\n", shown)  # its speed is outdated
    named = f"gptddp-k8s logs -f job --local --local-dir {tmp_path}/local"
    assert f"next: {named}\n" in k8s("status", "job").stderr
    result = k8s("status", "jb")
    assert result.exit_code == 102 and "no local job jb in " in result.stderr
    assert "there are job" in result.stderr


def test_a_local_job_without_its_submit_is_suspended(here, k8s):
    """Nothing runs its pods, whatever status.json says."""
    (here / "lock").unlink()
    shown = k8s("status", "job").stdout
    assert "state:      Suspended" in shown and "the same submit continues it" in shown
    assert "Stopped" in shown
    assert k8s("wait", "job").exit_code == 103


@pytest.mark.parametrize("text", ["", "{", "a: 1", "spec: {}\nmetadata: 3"])
def test_an_unreadable_manifest_is_reported_with_a_fix(here, k8s, text):
    """Each command names the file and `delete`, which removes the job's folder; volumes stay."""
    (here / "lock").unlink()
    (here / "manifest.yaml").write_text(text)
    for verb in ("status", "wait", "logs", "suspend", "sample"):
        result = k8s(verb, "job")
        assert result.exit_code == 1 and "jobs/job/manifest.yaml cannot be read" in result.stderr
        assert "`gptddp-k8s delete job --local --local-dir" in result.stderr
    assert k8s("delete", "job").exit_code == 0 and not here.exists()


@pytest.mark.parametrize(
    "torn",
    [
        "",
        "[]",
        {"conditions": 5},
        {"conditions": [3]},
        {"conditions": [{"type": "Succeeded"}]},
        {"startTime": 3},
        {"pods": [1]},
        {"pods": {"job-worker-0": 3}},
        {"pods": {"job-worker-0": {"startTime": 3}}},
    ],
)
def test_a_malformed_status_file_counts_as_unreadable(here, k8s, torn):
    """The job counts as stopped, `sample` says how to write the file again; delete works."""
    (here / "lock").unlink()
    told = here / "status.json"
    told.write_text(torn if isinstance(torn, str) else json.dumps({**status_of(told), **torn}))
    for args in (("status", "job"), ("list",)):
        result = k8s(*args)
        assert result.exit_code == 0 and "Suspended" in result.stdout, result.output
    assert k8s("wait", "job").exit_code == 103 and k8s("logs", "job").exit_code == 0
    result = k8s("sample", "job")
    assert result.exit_code == 2
    assert "jobs/job/status.json cannot be read: the same `submit --local`" in result.stderr
    assert "its volumes stay" in k8s("delete", "job").stderr


def status_of(path):
    return json.loads(path.read_text())


def test_a_suggested_command_quotes_the_folder():
    """A --local-dir with a space is one word."""
    assert options_for(Path("my jobs")) == " --local --local-dir 'my jobs'"


def test_logs_prints_the_log_files(here, k8s):
    """Pods are printed in turn; options select the last lines of each, or one pod, unprefixed."""
    lines = k8s("logs", "job", "--tail", "2").stdout.splitlines()
    assert [line[:5] for line in lines] == ["[w0] "] * 2 + ["[w1] "] * 2
    assert lines[0] == f"[w0] {of_a_life()[-2]}" and lines[2:] == ["[w1] b", "[w1] c"]
    assert k8s("logs", "job", "--pod", "1").stdout.splitlines() == ["a", "b", "c"]
    result = k8s("logs", "job", "--pod", "7")
    assert result.exit_code == 2 and "its pods are 0, 1" in result.stderr


RUNS = """
(runs / "job").mkdir(exist_ok=True)
signal.signal(signal.SIGTERM, lambda *_: ((runs / "job" / f"{name}.saved").touch(), sys.exit(143)))
print("begun", flush=True)
if not (runs / "end").exists(): wait("never")
"""


@pytest.fixture
def running(start, tmp_path):
    """A running job that saves when it is stopped."""
    built = job(RUNS)
    container(built)["args"] = ["--run-dir", "/runs/job"]
    process = start(built)
    until(lambda: all(p["phase"] == "Running" for p in status(tmp_path)["pods"].values()))
    logs = [tmp_path / f"local/jobs/job/logs/job-worker-{i}.log" for i in (0, 1)]
    until(lambda: all(log.read_text() for log in logs))
    return built, process


def saved(tmp_path):
    return [pod_file(tmp_path, f"job/job-worker-{i}.saved").exists() for i in (0, 1)]


def test_suspend_saves_and_the_same_submit_continues(running, finish, k8s, tmp_path):
    """Suspend ends the pods like Ctrl-C; a second suspend changes nothing."""
    built, process = running
    result = k8s("suspend", "job")
    assert result.exit_code == 0 and result.stdout == "local job job suspended\n", result.output
    assert "the same `submit --local` continues it" in result.stderr
    assert process.wait(5) == 130 and saved(tmp_path) == [True, True]
    assert "Suspended" in k8s("status", "job").stdout
    result = k8s("suspend", "job")
    assert result.exit_code == 0 and "the job is not running" in result.stderr
    pod_file(tmp_path, "end").touch()
    assert finish(built)[0] == 0


def test_delete_ends_a_job_and_keeps_its_run(running, k8s, tmp_path):
    """Its folder is removed; its run directory stays and is named; files of others stay too."""
    pid = status(tmp_path)["pods"]["job-worker-0"]["pid"]
    folder = tmp_path / "local/jobs/job"
    (folder / "mine.txt").touch()
    (folder.parent / "stray").touch()  # not a job
    result = k8s("delete", "job")
    assert result.exit_code == 0 and result.stdout == "local job job deleted\n", result.output
    assert f"its run directory stays: {tmp_path}/local/volumes/runs/job" in result.stderr
    assert not alive(pid) and saved(tmp_path) == [True, True]
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    assert k8s("status", "job").exit_code == k8s("delete", "job").exit_code == 102
    assert f"no jobs of gptddp in {tmp_path}/local\n" in k8s("list").stderr


def test_logs_follow_a_job_to_its_end(running, k8s, tmp_path):
    """`logs -f` prints the lines of all pods as they come, also of pods that replace others."""
    pod_file(tmp_path, "end").touch()
    os.kill(status(tmp_path)["pods"]["job-worker-1"]["pid"], 9)
    result = k8s("logs", "job", "-f")
    assert result.exit_code == 0
    assert sorted(result.stdout.splitlines()) == ["[w0] begun", *["[w1] begun"] * 2]
