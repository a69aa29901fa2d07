"""`status` and `list` against a small API server."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from support.api_objects import at, job, pod, terminated, waiting
from support.api_server import Log
from support.paths import ROOT

from gptddp.k8s.observe import status
from gptddp.k8s.observe.rank_0_log import progress

STEPS = [
    "runs/demo: tiny, 0.8 M parameters, fp32 on cpu, 4 ranks; 48 rows of 256 tokens a step",
    "life 2: from step-000000000100.1, step 100 of 400, 3 steps to do again",
    "step 120/400  loss 3.2144  lr 1.00e-03  45.2 k tok/s  4 ranks  ETA 1 min 23 s",
    "step 130/400  loss 3.1002  lr 9.90e-04  44.0 k tok/s  4 ranks  ETA 1 min 20 s",
    "step 130: validation loss 3.2000, 1.9000 bits a byte",
]
LINE = "gptddp-k8s submit --name demo --replicas 4 -- --steps 400"


@pytest.fixture
def running(api):
    """A job of four pods, one of them without an image, that has done some steps."""
    pods = [pod(0), pod(1, restarts=2), pod(2), pod(3, waiting("ImagePullBackOff", "no such"))]
    pods[0]["status"]["podIP"] = "10.2.3.4"
    api.put(job("Created", "Running", annotations={"gptddp/submit": LINE}), *pods)
    api.logs["demo-worker-0"] = Log([(at(n), line) for n, line in enumerate(STEPS)])


# -- status ------------------------------------------------------------------------------------


def test_status_shows_a_job(k8s, api, running):
    """State, reason, step, submit line, and a row for each pod; the next command is a note."""
    result = k8s("status", "demo")
    assert result.exit_code == 0, result.output
    rows = dict(x.split(":", 1) for x in result.stdout.split("\n\n")[0].splitlines())
    rows = {key: value.strip() for key, value in rows.items()}
    assert rows["state"] == "Running on 3 of 4: demo-worker-3 is being replaced"
    assert rows["pods"] == "3 of 4 ready (runs with 2 to 4)"
    assert rows["why"].startswith("pod demo-worker-3: cannot get the image gptddp:0.2.0")
    assert rows["step"] == "130/400  loss 3.1002"  # its speed is outdated
    assert rows["bits/byte"] == "1.900"
    assert "checkpoint" not in rows  # the run has loaded it thirty steps ago
    assert rows["submit"] == LINE
    table = [line.split() for line in result.stdout.split("\n\n")[1].splitlines()]
    assert table[0] == ["POD", "STATUS", "NODE", "RESTARTS", "AGE"]
    assert table[2][:4] == ["demo-worker-1", "Running", "gptddp-worker", "2"]
    assert table[4][:2] == ["demo-worker-3", "ImagePullBackOff"]
    assert result.stderr == f"next: gptddp-k8s logs -f demo --kubeconfig {api.kubeconfig}\n"


def test_the_step_is_from_the_pod_that_has_rank_0_now(k8s, api, running):
    """After rank 0 has moved, its newest line is in another pod's log."""
    begun = "life 3: from memory, step 131 of 400"
    api.logs["demo-worker-2"] = Log([(at(10), begun)])
    lost = ["[rank 2] the world is over: lost a peer", "step 140/400 is none of ours"]
    api.logs["demo-worker-1"] = Log([(at(20), line) for line in lost])
    assert "130/400" not in k8s("status", "demo").stdout
    step = "step 140/400  loss 3.0  lr 1.00e-03  45.2 k tok/s  3 ranks  ETA 1 min 23 s"
    api.logs["demo-worker-2"].lines.append((at(11), step))
    shown = k8s("status", "demo").stdout
    assert "140/400  loss 3.0000  45.2 k tok/s" in shown and "rank 0:     demo-worker-2" in shown


def test_status_has_formats_for_programs(k8s, running):
    """JSON and YAML have the facts as fields, and stdout nothing else; wide has addresses."""
    result = k8s("status", "demo", "-o", "json")
    found = json.loads(result.stdout)
    assert found["progress"]["step"] == 130
    assert (found["stall"], found["fault"], found["submit"]) == (None, None, LINE)
    assert found["replicas"] == {"ready": 3, "desired": 4, "min": 2, "max": 4}
    assert found["causes"][0]["id"] == "image" and found["causes"][0]["pods"] == ["demo-worker-3"]
    assert [c["type"] for c in found["conditions"]] == ["Created", "Running"]
    assert result.stderr == ""
    again = yaml.safe_load(k8s("status", "demo", "-o", "yaml").stdout)
    of_now = dict.fromkeys(["age_s", "pods", "causes"])  # their seconds differ
    assert again | of_now == found | of_now
    assert k8s("status", "demo", "-o", "name").stdout == "pytorchjob.kubeflow.org/demo\n"
    assert "10.2.3.4" in k8s("status", "demo", "-o", "wide").stdout


def test_an_ended_job_has_no_phase(k8s, api):
    """`status` of an ended job does not show the last phase in its log."""
    api.put(job("Succeeded"), pod(0, phase="Succeeded"))
    lines = [*STEPS, "[70.1 s] waiting for Prometheus to read the last numbers"]
    api.logs["demo-worker-0"] = Log([(at(n), line) for n, line in enumerate(lines)])
    said = k8s("status", "demo").stdout
    assert "130/400" in said and "now:" not in said


def test_status_of_a_failed_job_names_the_log_to_read(k8s, api):
    """`status` prints the reason and the command for the log; it exits with 0, as it succeeded."""
    said = "gptddp.launch: rank 2: no dataset"
    api.put(job("Failed"), pod(0), pod(2, terminated(2, said), phase="Failed"))
    result = k8s("status", "demo")
    assert result.exit_code == 0 and "rank 2: no dataset" in result.stdout
    assert result.stderr == f"next: gptddp-k8s logs demo --pod 2 --kubeconfig {api.kubeconfig}\n"


def test_an_ended_container_does_not_set_the_status_of_a_running_pod():
    """A Worker with the operator's init container is Running, and Completed once it has ended."""
    done = {"name": "init", "state": terminated(0, reason="Completed")}
    assert status.pod_status(pod(0, initContainerStatuses=[done])) == "Running"
    assert status.pod_status(pod(0, done["state"], phase="Succeeded")) == "Completed"


@pytest.mark.parametrize(
    ("step", "steps", "loss"),
    [("step 7/~9  loss 3.2144", 9, 3.2144), ("step 7/9  loss not finite", 9, None)],
)
def test_an_estimated_end_and_a_missing_loss_are_read(step, steps, loss):
    """If tokens or time end a run, its log has `~` before the last step."""
    done = progress([f"{step}  lr 1.00e-03  1.2 k tok/s  4 ranks  ETA 1 s"])["progress"]
    assert (done["steps"], done["loss"]) == (steps, loss)


@pytest.mark.parametrize(
    ("command", "pipe"), [(["logs", "-f"], False), (["logs", "-f"], True), (["wait"], False)]
)
def test_interrupts_end_the_command_at_once(api, running, spawn, command, pipe):
    """Ctrl-C ends with 130, a closed pipe quietly: no traceback, no wait for an open stream."""
    api.logs["demo-worker-0"].done = False
    code = "from gptddp.k8s import main; main()"
    args = [sys.executable, "-c", code, *command, "demo", "--kubeconfig", str(api.kubeconfig)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
    process = spawn(args, **pipes)
    assert "demo: Running" in process.stderr.readline()
    if pipe:
        assert process.stdout.readline() == f"[w0] {STEPS[0]}\n"
        process.stdout.close()
        process.stdout = None
        more = [(at(n % 60, minute=1 + n // 60), "more " * 100) for n in range(100)]
        api.logs["demo-worker-0"].lines += more
    else:
        process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    assert "Traceback" not in process.communicate(timeout=20)[1]
    assert time.monotonic() - begin < 5 and (pipe or process.returncode == 130)


# -- list --------------------------------------------------------------------------------------


@pytest.fixture
def listed(api):
    """A job in a queue with two of its pods, a job without pods, and a job that is not ours."""
    ours = job("Created", "Running")
    ours["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team"
    worker = ours["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["template"] = {"spec": {"containers": [{"name": "pytorch", "image": "gptddp:0.2.0"}]}}
    idle = job("Created", name="idle", uid="another")
    api.put(ours, idle, pod(0), pod(1), job("Running", name="other", labels={}))
    return ours


@pytest.mark.parametrize(
    ("options", "header", "row"),
    [
        ([], "NAME STATE PODS AGE", ["demo", "Running", "2/4"]),
        (["-A"], "NAMESPACE NAME STATE PODS AGE", ["default", "demo", "Running", "2/4"]),
        (["-o", "wide"], "NAME STATE PODS AGE NODES QUEUE IMAGE", ["demo", "Running", "2/4"]),
    ],
)
def test_list_shows_our_jobs(k8s, listed, options, header, row):
    """The table has state, pods and age of our jobs, and no other jobs."""
    lines = k8s("list", *options).stdout.splitlines()
    assert lines[0].split() == header.split() and len(lines) == 3 and "0/4" in lines[2]
    assert lines[1].split()[: len(row)] == row
    wide = ["gptddp-worker", "team", "gptddp:0.2.0"]
    assert "wide" not in options or lines[1].split()[-3:] == wide


def test_list_has_formats_for_programs(k8s, api, listed):
    """json and yaml have the same rows; without jobs json is [], and the others are empty."""
    found = json.loads(k8s("list", "-o", "json").stdout)
    again = yaml.safe_load(k8s("list", "-o", "yaml").stdout)
    assert [it | {"age_s": 0} for it in again] == [it | {"age_s": 0} for it in found]
    assert found[0]["nodes"] == ["gptddp-worker"] and found[0]["ready"] == 2
    assert k8s("list", "-o", "name").stdout.splitlines()[0] == "pytorchjob.kubeflow.org/demo"
    api.objects.clear()
    assert json.loads(k8s("list", "-o", "json").stdout) == []
    assert k8s("list", "-o", "name").stdout == k8s("list").stdout == ""
    assert "no jobs of gptddp in namespace default" in k8s("list").stderr
