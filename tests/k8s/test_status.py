"""`status`, `list`, `logs` and `wait` as their users meet them, against a small API server."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from support.api_objects import at, job, pod, terminated, waiting
from support.api_server import Log
from support.paths import ROOT

from gptddp.k8s.cli.main import cli
from gptddp.k8s.observe import status
from gptddp.k8s.observe.progress import progress

STEPS = [
    "runs/demo: tiny, 0.8 M parameters, fp32 on cpu, 4 ranks; 48 rows of 256 tokens a step",
    "life 2: from step-000000000100.1, step 100 of 400, 3 steps to do again",
    "step 120/400  loss 3.2144  lr 1.00e-03  45.2k tok/s  4 ranks  1:23 left",
    "step 130/400  loss 3.1002  lr 9.90e-04  44.0k tok/s  4 ranks  1:20 left",
    "step 130: validation loss 3.2000, 1.9000 bits a byte",
]
# How a test reads what a process prints.
PIPES = {
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "text": True,
    "env": {**os.environ, "PYTHONPATH": str(ROOT)},
}


@pytest.fixture
def k8s(api):
    """Run `gptddp-k8s COMMAND ... --kubeconfig` of the API server."""

    def run(*args):
        named = [*args, "--kubeconfig", str(api.kubeconfig)]
        return CliRunner().invoke(cli, named, prog_name="gptddp-k8s")

    return run


@pytest.fixture
def running(api):
    """A job of four pods, one of them without a node's room, that has done some steps."""
    pods = [pod(0), pod(1, restarts=2), pod(2), pod(3, waiting("ImagePullBackOff", "no such"))]
    api.put(job("Created", "Running"), *pods)
    api.logs["demo-worker-0"] = Log([(at(n), line) for n, line in enumerate(STEPS)])


def test_status_says_how_a_job_does(k8s, api, running):
    """State, reason, step, and a row for each pod; what to type next is a note."""
    result = k8s("status", "demo")
    assert result.exit_code == 0, result.output
    rows = dict(x.split(":", 1) for x in result.stdout.split("\n\n")[0].splitlines())
    rows = {key: value.strip() for key, value in rows.items()}
    assert rows["state"] == "Running" and rows["pods"] == "3 of 4 ready (goes on with 2 to 4)"
    assert rows["why"].startswith("pod demo-worker-3: cannot get the image gptddp:0.1.0")
    assert rows["step"] == "130/400  loss 3.1002  44.0k tok/s"
    assert "checkpoint" not in rows  # it went on from one, thirty steps ago
    table = [line.split() for line in result.stdout.split("\n\n")[1].splitlines()]
    assert table[0] == ["POD", "STATUS", "NODE", "RESTARTS", "AGE"]
    assert table[2][:4] == ["demo-worker-1", "Running", "gptddp-worker", "2"]
    assert table[4][:2] == ["demo-worker-3", "ImagePullBackOff"]
    assert result.stderr == f"next: gptddp-k8s logs -f demo --kubeconfig {api.kubeconfig}\n"


def test_a_container_that_is_done_says_nothing_of_a_pod_that_runs():
    """A Worker behind the operator's init container is Running, and Completed when it has ended."""
    done = {"name": "init", "state": terminated(0, reason="Completed")}
    assert status.pod_status(pod(0, initContainerStatuses=[done])) == "Running"
    assert status.pod_status(pod(0, done["state"], phase="Succeeded")) == "Completed"


def test_status_as_json_has_everything(k8s, running):
    """The same facts under names, and nothing else on stdout."""
    result = k8s("status", "demo", "-o", "json")
    found = json.loads(result.stdout)
    assert found["progress"] == {
        "step": 130,
        "steps": 400,
        "loss": 3.1002,
        "tok_s": 44000.0,
        "left_s": 80,
        "goodput": None,
        "slow": [],  # as version 0.1.0 logged it
    }
    assert (found["stall"], found["fault"]) == (None, None)
    assert found["replicas"] == {"ready": 3, "desired": 4, "min": 2, "max": 4}
    assert found["causes"][0]["id"] == "image" and found["causes"][0]["pods"] == ["demo-worker-3"]
    assert [c["type"] for c in found["conditions"]] == ["Created", "Running"]
    assert result.stderr == ""


def test_status_of_a_failed_job_names_the_log_to_read(k8s, api):
    """Exit code 0: the question was answered."""
    said = "gptddp.launch: rank 2: no dataset"
    api.put(job("Failed"), pod(0), pod(2, terminated(2, said), phase="Failed"))
    result = k8s("status", "demo")
    assert result.exit_code == 0 and "rank 2: no dataset" in result.stdout
    assert result.stderr == f"next: gptddp-k8s logs demo --pod 2 --kubeconfig {api.kubeconfig}\n"


@pytest.mark.parametrize("command", ["status", "wait", "logs"])
def test_a_job_that_is_not_there_is_102(k8s, api, command):
    """With the name that was meant, and no traceback."""
    api.put(job("Running", name="demo-large"))
    result = k8s(command, "demo-lage")
    assert result.exit_code == 102 and result.stdout == ""
    assert "error: no PyTorchJob demo-lage in the namespace default" in result.stderr
    assert "demo-large" in result.stderr


def test_list_shows_our_jobs(k8s, api):
    """State, pods and age; jobs of others are not ours."""
    foreign = job("Running", name="other", labels={})
    api.put(job("Running"), pod(0), pod(1), foreign)
    table = [line.split() for line in k8s("list").stdout.splitlines()]
    assert table[0] == ["NAME", "STATE", "PODS", "AGE"] and len(table) == 2
    assert table[1][:3] == ["demo", "Running", "2/4"]
    assert k8s("list", "-A").stdout.splitlines()[1].split()[:2] == ["default", "demo"]
    assert k8s("list", "-o", "name").stdout == "pytorchjob.kubeflow.org/demo\n"
    assert json.loads(k8s("list", "-o", "json").stdout)[0]["state"] == "Running"


def test_an_empty_list_is_a_note(k8s):
    """Nothing on stdout."""
    result = k8s("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no jobs of gptddp in namespace default" in result.stderr


def test_logs_of_one_pod_have_no_prefix(k8s, running):
    """Of all pods each line has one; pods without a log are noted."""
    assert k8s("logs", "demo", "--pod", "0").stdout.splitlines() == STEPS
    result = k8s("logs", "demo", "--tail", "2")
    assert result.stdout.splitlines() == [f"[w0] {line}" for line in STEPS[-2:]]
    assert "demo-worker-1" in result.stderr


def test_previous_and_follow_exclude_each_other(k8s):
    """A usage error, before any cluster is asked."""
    assert k8s("logs", "demo", "-f", "--previous").exit_code == 2


@pytest.mark.parametrize("command", [["logs", "-f"], ["wait"]])
def test_ctrl_c_ends_at_once_with_130(api, running, command, spawn):
    """No traceback, and no waiting for a stream that is open."""
    api.logs["demo-worker-0"].done = False
    code = "from gptddp.k8s import main; main()"
    named = [*command, "demo", "--kubeconfig", str(api.kubeconfig)]
    process = spawn([sys.executable, "-c", code, *named], **PIPES)
    assert "demo: Running" in process.stderr.readline()
    time.sleep(0.3)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in err
    assert time.monotonic() - begin < 5


def test_a_closed_pipe_ends_the_following(api, running, spawn):
    """`| head -1` has its line and the command is gone, quietly."""
    api.logs["demo-worker-0"].done = False
    command = "from gptddp.k8s import main; main()"
    pipe = f'"{sys.executable}" -c "{command}" logs -f demo --kubeconfig {api.kubeconfig} | head -1'
    run = spawn(["sh", "-c", pipe], **PIPES)
    assert run.stdout.readline() == f"[w0] {STEPS[0]}\n"
    log = api.logs["demo-worker-0"]
    for n in range(100):
        log.lines.append((at(n % 60, minute=1 + n // 60), "more " * 100))
    assert "Traceback" not in run.communicate(timeout=30)[1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (200, "3m20s"), (3000, "50m"), (20000, "5h"),
     (200000, "2d")],
)  # fmt: skip
def test_ages_are_kubectls(seconds, text):
    """Short, and no more exact than anyone needs."""
    assert status.duration(seconds) == text


def test_an_end_that_is_an_estimate_is_an_end():
    """Where tokens or time end a run, its log has `~` before the last step."""
    line = "step 7/~9  loss 3.2144  lr 1.00e-03  1.2k tok/s  4 ranks  0:01 left"
    assert progress([line])["progress"]["steps"] == 9


def test_a_step_that_is_not_finite_is_a_step():
    """No number is made up for it."""
    line = "step 7/9  loss not finite  lr 1.00e-03  1.2k tok/s  4 ranks  0:01 left"
    assert progress([line])["progress"]["loss"] is None
