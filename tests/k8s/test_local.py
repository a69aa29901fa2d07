"""Local jobs: the environment of a pod, its restarts, the end of its job; real processes."""

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.local_jobs import job, kinds, pod_file, status
from support.manifests import container, pod_spec, worker

from gptddp.k8s.local.container import localized
from gptddp.k8s.local.controller import Controller

# -- environment of a pod ----------------------------------------------------------------------


def test_a_pod_has_the_environment_of_operator_and_kubelet(finish, tmp_path, monkeypatch):
    """A local pod has the environment, address, arguments, volumes and CPUs of its manifest."""
    code = """
seen = {"env": dict(os.environ), "args": sys.argv[1:], "cpus": [*os.sched_getaffinity(0)],
        "session": os.getsid(0) == os.getpid()}
(runs / f"{name}.json").write_text(json.dumps(seen))
wait("job-worker-0.json"), wait("job-worker-1.json")
"""
    built = job(code)
    own = container(built)
    own["args"] = ["--run=/runs/x", "--data", "/data/set", "s3://b/data", "$(POD_NAME)", "$$"]
    own["env"] += [
        {"name": "PET_NNODES", "value": "9"},
        {"name": "CACHE", "value": "/dev/shm/cache:/runs"},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "api", "key": "token"}}},
    ]
    monkeypatch.setenv("PET_RDZV_ID", "of another job")
    monkeypatch.setenv("TOKEN", "the shell's")
    code, _, err = finish(built)
    assert code == 0, err
    one, two = (
        json.loads(pod_file(tmp_path, f"job-worker-{i}.json").read_text()) for i in range(2)
    )
    volumes, env = tmp_path / "local" / "volumes", one["env"]
    host, key = env["POD_ADDRESS"], env["GPTDDP_RENDEZVOUS_KEY"]
    assert re.fullmatch(r"127\.\d+\.\d+\.100", host)
    assert two["env"]["POD_ADDRESS"] == host.removesuffix("100") + "101"
    assert re.fullmatch(r"[0-9a-f]{64}", key) and two["env"]["GPTDDP_RENDEZVOUS_KEY"] == key
    assert {(env[n], two["env"][n][:-1] + "0") for n in ("POD_NAME", "HOSTNAME")} == {
        ("job-worker-0", "job-worker-0")
    }
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == ("1:2", "1")
    assert env["PET_RDZV_ENDPOINT"] == two["env"]["PET_RDZV_ENDPOINT"]
    assert env["PET_RDZV_ENDPOINT"].startswith(f"{host}:")
    assert env["PET_RDZV_BACKEND"] == "c10d"
    assert env["PET_RDZV_ID"] == built["spec"]["elasticPolicy"]["rdzvId"]
    assert (env["PYTHONUNBUFFERED"], env["GPTDDP_GRACE_S"]) == ("1", "60")
    assert env["CACHE"].endswith(f"/shm/cache:{volumes}/runs") and env["TOKEN"] == "the shell's"
    assert one["args"] == [
        f"--run={volumes}/runs/x",
        *("--data", f"{volumes}/data/set", "s3://b/data", "job-worker-0", "$"),
    ]
    assert len(one["cpus"]) == 1 and one["session"]
    assert one["cpus"] != two["cpus"] or os.cpu_count() == 1


def test_tmpdir_is_in_the_job_folder_and_short_enough_for_a_socket(finish, tmp_path):
    """TMPDIR is in the job's folder, can hold a Unix socket, and is removed with the pod."""
    code = """
import socket, tempfile
folder = tempfile.mkdtemp(prefix="pymp-")
socket.socket(socket.AF_UNIX).bind(folder + "/listener-abcdefgh")
(runs / "real").write_text(os.path.realpath(folder))
"""
    folder = tmp_path / ("deep" * 12) / "local"
    code, _, err = finish(job(code, replicas=1), folder=folder)
    assert code == 0, err
    real = (folder / "volumes" / "runs" / "real").read_text()
    assert real.startswith(f"{folder}/jobs/job/pods/worker-0/")
    assert not Path(real).exists()


@pytest.mark.parametrize(
    ("text", "local_text"),
    [
        ("/data", "/L/d"), ("/data/x", "/L/d/x"), ("--a=/data", "--a=/L/d"), ("/database",) * 2,
        ("x/data", "x/data"), ("/data:/data/b", "/L/d:/L/d/b"), ("cat '/data'", "cat '/L/d'"),
        ("/data/sub/y", "/L/s/y"), ("http://h/data", "http://h/data"), ("/data.txt", "/data.txt"),
    ],
)  # fmt: skip
def test_mount_paths_become_folders(text, local_text):
    """A mount path at the beginning of a path is replaced by its folder, the longest first."""
    folders = {"/data": Path("/L/d"), "/data/sub": Path("/L/s")}
    assert localized(text, folders) == local_text


def test_parts_of_a_patch_without_effect_are_listed(finish, tmp_path):
    """One warning lists what a local run ignores: init containers, sidecars, other volumes,
    policies, envFrom. The job runs."""
    built = job("assert not os.listdir('/certs')", replicas=1)
    pod_spec(built)["initContainers"] = [{"name": "fetch", "image": "x"}]
    pod_spec(built)["containers"].insert(0, {"name": "proxy", "image": "x"})
    pod_spec(built)["volumes"].append({"name": "certs", "secret": {"secretName": "certs"}})
    worker(built)["restartPolicy"] = "OnFailure"
    own = pod_spec(built)["containers"][1]
    own["volumeMounts"].append({"name": "certs", "mountPath": "/certs"})
    own["envFrom"] = [{"secretRef": {"name": "proxy"}}]
    own["command"][2] = own["command"][2].replace("'/certs'", "sys.argv[1]")
    own["args"] = ["/certs"]
    code, _, err = finish(built)
    assert code == 0, err
    (line,) = [line for line in err.splitlines() if "warning" in line]
    for word in ("container fetch", "container proxy", "volume certs", "OnFailure", "envFrom"):
        assert word in line


# -- restarts and the end of a job -------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "program", "ends", "words"),
    [
        ("print('the disk is on fire'); sys.exit(2)", "", "2", "the disk is on fire"),
        ("os.execvp('no-such-program', ['x'])", "", "1", "No such file"),
        ("", "no-such-program", "127", "cannot start 'no-such-program'"),  # a cluster would retry
    ],
)
def test_an_exit_code_below_128_fails_the_job_and_names_the_pod(
    finish, tmp_path, code, program, ends, words
):
    """The job is Failed at once, with the pod, its code and its last line; the other pods stop."""
    built = job(f"if first:\n    {code}\ntime.sleep(60)")
    container(built)["command"] = [program] if program else container(built)["command"]
    exit_code, _, err = finish(built)
    assert exit_code == 100
    if program:
        assert f"exited with {ends}: {words}" in err
        return
    assert f"pod job-worker-0 exited with {ends}" in err and words in err
    value = status(tmp_path)
    assert kinds(value) == ["Created", "Failed"]
    assert "1 Worker replica(s) failed" in value["conditions"][-1]["message"]
    assert value["pods"]["job-worker-1"]["exitCode"] == 143


def test_a_pod_that_exits_with_128_or_more_is_replaced(finish, tmp_path):
    """Such a pod is replaced at once; the new pod has empty scratch space and its own age."""
    code = """
scratch = pathlib.Path(os.environ["TMPDIR"])
if not first:
    wait("end"), time.sleep(60)
assert not (scratch / "mine").exists()
(scratch / "mine").touch()
if once("a"): time.sleep(1), sys.exit(143)
if once("b"): os.kill(os.getpid(), signal.SIGKILL)
(runs / "end").touch()
"""
    exit_code, _, err = finish(job(code))
    assert exit_code == 0, err
    assert "exited with 143 (SIGTERM)" in err and "exited with 137 (SIGKILL)" in err
    assert err.count("job Restarting") == 2 and err.count("job Running") == 3
    began = {name: pod["startTime"] for name, pod in status(tmp_path)["pods"].items()}
    assert began["job-worker-0"] > began["job-worker-1"] == status(tmp_path)["startTime"]


def test_a_failed_pod_outranks_a_succeeded_one_at_the_same_time(tmp_path):
    """The job fails, as the operator handles failed pods before succeeded ones."""
    ended = {"phase": "Running", "waiting": False, "deadline": math.inf, "ending": False}
    ended |= {"terminate": lambda now: None, "last_line": lambda: "", "log": tmp_path}
    both = [SimpleNamespace(name="p", poll=lambda code=code: code, **ended) for code in (0, 2)]
    controller = Controller(job(), both, lambda text: None)
    controller.tick(0.0)
    assert controller.conditions.has("Failed")
