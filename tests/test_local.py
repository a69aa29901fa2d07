"""Local jobs: real processes, run from manifests with small commands in place of training."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from gptddp.errors import ConfigError, DataError
from gptddp.k8s import guard, local, manifest, podspec, spec
from gptddp.k8s.conditions import Conditions
from gptddp.k8s.pods import BackOff
from gptddp.k8s.view import RunLog

RUN = """
import sys, yaml
from pathlib import Path
from gptddp.errors import GptddpError
from gptddp.k8s import local
try:
    objects = list(yaml.safe_load_all(open(sys.argv[1])))
    sys.exit(local.run(objects, local_dir=Path(sys.argv[2]), verbose="-v" in sys.argv))
except GptddpError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
# What pods are given to run; each sees its name, and /runs that all of them share.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
name, runs = os.environ["POD_NAME"], pathlib.Path("/runs")
first = name.endswith("-0")
def once(what):
    try:
        os.close(os.open(runs / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
def wait(what):
    while not (runs / what).exists():
        time.sleep(0.02)
"""


def job(code="", *, replicas=2, policy="ExitCode", grace_s=5, name="job", **run_policy):
    """A rendered PyTorchJob whose container runs Python code."""
    built = manifest.objects(spec.load(None, {"replicas": replicas, "name": name}, []))[0]
    built["spec"]["runPolicy"] |= run_policy
    worker = built["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["restartPolicy"] = policy
    worker["template"]["spec"]["terminationGracePeriodSeconds"] = grace_s
    container = worker["template"]["spec"]["containers"][0]
    container["command"], container["args"] = ["python", "-c", PRELUDE + code], []
    return built


@pytest.fixture
def start(tmp_path):
    """Start a runner as a process of its own; whatever is left at the end is killed."""
    started = []

    def begin(built, *flags, folder=tmp_path / "local"):
        path = tmp_path / f"{len(started)}.yaml"
        path.write_text(manifest.to_yaml([built]))
        command = [sys.executable, "-c", RUN, str(path), str(folder), *flags]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        started.append(
            subprocess.Popen(
                command, env=environment, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    guard.sweep(str(tmp_path))


@pytest.fixture
def finish(start):
    """Run a job to its end: (exit code, stdout, stderr)."""

    def run(built, *flags, **where):
        process = start(built, *flags, **where)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return run


def status(folder, name="job"):
    return json.loads((folder / "local" / "jobs" / name / "status.json").read_text())


def kinds(value):
    """The conditions that are True, oldest first."""
    return [c["type"] for c in value["conditions"] if c["status"] == "True"]


def until(true, timeout_s=20.0):
    """Wait for a condition of the test; it must come true."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if value := true():
                return value
        time.sleep(0.02)
    raise AssertionError("it did not happen in time")


def alive(pid):
    """Is the process there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pod_file(folder, name):
    """A file that a pod wrote into the volume `runs`."""
    return folder / "local" / "volumes" / "runs" / name


# -- what a pod sees ---------------------------------------------------------------------------


def test_a_pod_sees_what_operator_and_kubelet_would_give_it(finish, tmp_path):
    """Environment, address, arguments, volumes and CPUs are those of the manifest."""
    code = """
seen = {"env": dict(os.environ), "args": sys.argv[1:], "cpus": len(os.sched_getaffinity(0)),
        "session": os.getsid(0) == os.getpid()}
(runs / f"{name}.json").write_text(json.dumps(seen))
wait("job-worker-0.json"), wait("job-worker-1.json")
"""
    built = job(code)
    container = built["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    container["args"] = ["--run=/runs/x", "--data", "/data/set", "s3://b/data", "$(POD_NAME)", "$$"]
    container["env"] += [
        {"name": "PET_NNODES", "value": "9"},
        {"name": "CACHE", "value": "/dev/shm/cache:/runs"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "URL", "value": "http://$(IP):1"},
    ]
    os.environ["PET_RDZV_ID"] = "of another job"
    try:
        code, _, err = finish(built)
    finally:
        del os.environ["PET_RDZV_ID"]
    assert code == 0, err
    one, two = (
        json.loads(pod_file(tmp_path, f"job-worker-{i}.json").read_text()) for i in range(2)
    )
    volumes, env = tmp_path / "local" / "volumes", one["env"]
    host = env["POD_ADDRESS"]
    assert re.fullmatch(r"127\.\d+\.\d+\.100", host)
    assert two["env"]["POD_ADDRESS"] == host.removesuffix("100") + "101"
    assert (env["POD_NAME"], env["HOSTNAME"], env["IP"]) == ("job-worker-0", "job-worker-0", host)
    assert env["URL"] == f"http://{host}:1"
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"]) == ("1:2", "1")
    assert env["PET_RDZV_ENDPOINT"] == two["env"]["PET_RDZV_ENDPOINT"]
    assert env["PET_RDZV_ENDPOINT"].startswith(f"{host}:")
    assert (env["PET_RDZV_BACKEND"], env["PET_MAX_RESTARTS"]) == ("c10d", "1000")
    assert "read_timeout=60" in env["PET_RDZV_CONF"].split(",")
    assert env["PET_RDZV_ID"] == built["spec"]["elasticPolicy"]["rdzvId"]
    assert (env["PYTHONUNBUFFERED"], env["GPTDDP_GRACE_S"]) == ("1", "60")
    assert "MASTER_ADDR" not in env and "WORLD_SIZE" not in env
    assert env["CACHE"].endswith(f"/shm/cache:{volumes}/runs")
    assert one["args"] == [
        f"--run={volumes}/runs/x", "--data", f"{volumes}/data/set", "s3://b/data", "job-worker-0",
        "$",
    ]  # fmt: skip
    assert one["cpus"] == 1 and one["session"]


def test_scratch_is_deep_in_the_job_and_short_enough_for_a_socket(finish, tmp_path):
    """TMPDIR lies under the job's folder, takes a Unix socket, and is gone with the pod."""
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


def test_a_job_with_a_master_gets_the_operators_other_variables():
    """With a Master: MASTER_ADDR, a node rank and WORLD_SIZE; without elasticPolicy no endpoint."""
    built = job()
    specs = built["spec"]["pytorchReplicaSpecs"]
    specs["Master"] = {**specs["Worker"], "replicas": 1}
    del built["spec"]["elasticPolicy"]
    net = podspec.Network("127.64.1", 24000)
    env = {r.short: podspec.operator_env(r) for r in podspec.replicas(built, net)}
    assert env["worker-1"]["MASTER_ADDR"] == "127.64.1.99"
    assert [env[p]["RANK"] for p in ("master-0", "worker-0", "worker-1")] == ["0", "1", "2"]
    assert env["worker-0"]["WORLD_SIZE"] == env["worker-0"]["PET_NNODES"] == "3"
    assert "PET_RDZV_ENDPOINT" not in env["worker-0"]


@pytest.mark.parametrize(
    ("text", "local_text"),
    [
        ("/data", "/L/d"), ("/data/x", "/L/d/x"), ("--a=/data", "--a=/L/d"), ("/database",) * 2,
        ("x/data", "x/data"), ("/data:/data/b", "/L/d:/L/d/b"), ("cat '/data'", "cat '/L/d'"),
        ("/data/sub/y", "/L/s/y"), ("http://h/data", "http://h/data"), ("/data.txt", "/data.txt"),
    ],
)  # fmt: skip
def test_mount_paths_become_folders(text, local_text):
    """Whole mount paths are replaced wherever they begin a path, the longest one first."""
    folders = {"/data": Path("/L/d"), "/data/sub": Path("/L/s")}
    assert podspec.localized(text, folders) == local_text


# -- restarts and the end of a job -------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "code"), [("ExitCode", 2), ("ExitCode", 127), ("Never", 200), ("Never", 1)]
)
def test_a_final_exit_code_fails_the_job_and_names_the_pod(finish, tmp_path, policy, code):
    """The job is Failed at once, with the pod, its code and its last line; the others stop."""
    script = f"""
if first:
    print("the disk is on fire"); sys.exit({code})
time.sleep(60)
"""
    exit_code, _, err = finish(job(script, policy=policy))
    assert exit_code == 100
    assert f"pod job-worker-0 exited with {code}" in err and "the disk is on fire" in err
    value = status(tmp_path)
    assert kinds(value) == ["Created", "Failed"]
    assert "1 Worker replica(s) failed" in value["conditions"][-1]["message"]
    assert value["pods"]["job-worker-1"]["exitCode"] == 143


def test_exit_codes_from_128_bring_a_new_pod(finish, tmp_path):
    """With ExitCode such a pod is recreated at once, with empty scratch and no restart counted."""
    code = """
scratch = pathlib.Path(os.environ["TMPDIR"])
if not first:
    wait("end"), time.sleep(60)
assert not (scratch / "mine").exists()
(scratch / "mine").touch()
if once("a"): sys.exit(143)
if once("b"): os.kill(os.getpid(), signal.SIGKILL)
(runs / "end").touch()
"""
    exit_code, _, err = finish(job(code))
    assert exit_code == 0, err
    assert "exited with 143 (SIGTERM)" in err and "exited with 137 (SIGKILL)" in err
    assert err.count("job Restarting") == 2 and err.count("job Running") == 3
    assert status(tmp_path)["pods"]["job-worker-0"]["restarts"] == 0


def test_on_failure_restarts_in_place(finish, tmp_path):
    """The container comes back in the same pod: scratch is kept, and the restart is counted."""
    code = """
mark = pathlib.Path(os.environ["TMPDIR"], "mine")
if not mark.exists():
    mark.touch(); sys.exit(3)
"""
    exit_code, _, err = finish(job(code, replicas=1, policy="OnFailure"))
    assert exit_code == 0, err
    assert "exited with 3: restarted at once" in err
    assert status(tmp_path)["pods"]["job-worker-0"]["restarts"] == 1
    assert "Restarting" not in err


def test_restarts_back_off_as_the_kubelets_do():
    """0, 10, 20, 40 ... 300 s; a life of more than ten minutes begins anew."""
    back_off = BackOff()
    assert [back_off.delay_s(1) for _ in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]
    assert [back_off.delay_s(601), back_off.delay_s(1)] == [0, 10]


def test_a_restarting_pod_waits_and_can_be_stopped(start, tmp_path):
    """The second crash waits for its back-off, and Ctrl-C ends the wait."""
    process = start(job("sys.exit(3)", replicas=1, policy="OnFailure"))
    until(lambda: status(tmp_path)["pods"]["job-worker-0"]["restarts"] == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "restarted in 10 s (back-off)" in err


def test_back_off_limit_counts_the_restarts_of_all_pods(finish, tmp_path):
    """backoffLimit fails the job when the restarts of its running pods add up to it."""
    exit_code, _, err = finish(job("sys.exit(3)", policy="OnFailure", backoffLimit=2))
    assert exit_code == 100
    assert "backoff limit" in status(tmp_path)["conditions"][-1]["message"]


def test_one_worker_that_succeeds_ends_an_elastic_job(finish, tmp_path):
    """Any exit 0 makes it Succeeded; cleanPodPolicy Running stops the others gracefully."""
    code = """
if not first:
    signal.signal(signal.SIGTERM, lambda *_: ((runs / "asked").touch(), sys.exit(0)))
    (runs / "ready").touch(); time.sleep(60)
wait("ready")
"""
    exit_code, _, err = finish(job(code))
    assert exit_code == 0, err
    assert pod_file(tmp_path, "asked").exists()
    assert kinds(status(tmp_path)) == ["Created", "Succeeded"]


def test_clean_pod_policy_none_leaves_pods_to_their_end(finish, tmp_path):
    """The other pods run on after the job's end, and the runner waits for them."""
    code = """
if not first:
    wait("zero"); time.sleep(0.5); (runs / "late").touch()
else:
    (runs / "zero").touch()
"""
    exit_code, _, err = finish(job(code, cleanPodPolicy="None"))
    assert exit_code == 0 and "leaves 1 pods running" in err
    assert pod_file(tmp_path, "late").exists()


def test_without_elastic_policy_all_workers_must_succeed(finish, tmp_path):
    """A job of one worker that is not elastic succeeds with it; Always restarts exit code 0."""
    built = job("sys.exit(0 if not once('a') else 1)", replicas=1, policy="OnFailure")
    del built["spec"]["elasticPolicy"]
    assert finish(built)[0] == 0
    built = job("once('a') or once('b') or (runs / 'c').touch()", replicas=1, policy="Always",
                name="always", backoffLimit=1)  # fmt: skip
    exit_code, _, err = finish(built)
    assert exit_code == 100 and "exited with 0: restarted" in err


def test_a_program_that_does_not_exist_fails_the_job_with_the_reason(finish):
    """Exit code 127 and its name; a cluster would try for ever."""
    built = job()
    containers = built["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    containers[0]["command"] = ["no-such-program"]
    exit_code, _, err = finish(built)
    assert exit_code == 100 and "cannot start 'no-such-program'" in err


def test_conditions_change_as_the_operators_do():
    """Running and Restarting replace each other; nothing follows Failed."""
    conditions = Conditions()
    for kind in ("Created", "Running", "Restarting"):
        assert conditions.set(kind, kind, "")
    assert not conditions.has("Running")
    assert conditions.set("Running", "Running", "") and not conditions.has("Restarting")
    assert conditions.set("Failed", "Failed", "") and not conditions.set("Succeeded", "x", "")
    assert [(c["type"], c["status"]) for c in conditions.items] == [
        ("Created", "True"), ("Running", "False"), ("Failed", "True")
    ]  # fmt: skip


# -- death -------------------------------------------------------------------------------------

FAMILY = """
if once(name):
    clean = {"PATH": os.environ["PATH"]}
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    scrubbed = subprocess.Popen(["sleep", "300"], env=clean)
    (runs / f"{name}.pids.tmp").write_text(f"{os.getpid()} {other.pid} {scrubbed.pid}")
    (runs / f"{name}.pids.tmp").rename(runs / f"{name}.pids")
    time.sleep(300)
wait("end")
"""


def family(folder, name):
    return [int(pid) for pid in pod_file(folder, f"{name}.pids").read_text().split()]


def test_a_killed_pod_takes_all_of_its_processes_along(start, tmp_path):
    """SIGKILL of the main process ends children in other sessions; another pod takes its place."""
    process = start(job(FAMILY))
    pids = until(lambda: family(tmp_path, "job-worker-1"))
    assert status(tmp_path)["pods"]["job-worker-1"]["pid"] == pids[0]
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: status(tmp_path)["pods"]["job-worker-1"]["pid"] not in (None, pids[0]))
    assert not any(map(alive, pids))
    pod_file(tmp_path, "end").touch()
    assert process.wait(20) == 0


def test_a_killed_runner_leaves_no_process_and_the_job_goes_on(start, finish, tmp_path):
    """SIGKILL of the runner ends its pods and their children; the next submit continues."""
    built = job(FAMILY)
    process = start(built)
    pids = until(lambda: family(tmp_path, "job-worker-0") + family(tmp_path, "job-worker-1"))
    process.kill()
    pod_file(tmp_path, "end").touch()
    exit_code, _, err = finish(built)  # at once: it has to wait for the guard of the first
    assert not any(map(alive, pids))
    assert exit_code == 0, err
    assert guard.members(str(tmp_path)) == []


def test_a_runner_killed_with_its_guard_leaves_no_tagged_process(start, finish, tmp_path):
    """Even then the main processes die with their parent, and the next submit ends the rest."""
    built = job(FAMILY)
    process = start(built)
    pids = until(lambda: family(tmp_path, "job-worker-0") + family(tmp_path, "job-worker-1"))
    guards = subprocess.run(
        ["pgrep", "-P", str(process.pid), "-f", "guard.py"], capture_output=True, text=True
    )
    os.kill(int(guards.stdout), signal.SIGKILL)
    process.kill()
    until(lambda: not alive(pids[0]) and not alive(pids[3]))
    pod_file(tmp_path, "end").touch()
    assert finish(built)[0] == 0
    assert not alive(pids[1]) and not alive(pids[4])
    for pid in (pids[2], pids[5]):  # neither tag nor guard: nobody knew them
        os.kill(pid, signal.SIGKILL)


# -- stopping and continuing -------------------------------------------------------------------

STOPPABLE = """
signal.signal(signal.SIGTERM, lambda *_: ((runs / f"{name}.saved").touch(), sys.exit(143)))
(runs / f"{name}.up").touch()
wait("end")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_gracefully_and_the_same_submit_continues(start, finish, tmp_path, number):
    """Pods get SIGTERM and may save; exit code 130; submitting again goes on to the end."""
    built = job(STOPPABLE)
    process = start(built)
    until(lambda: all(pod_file(tmp_path, f"job-worker-{i}.up").exists() for i in range(2)))
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "the same command continues it" in err
    assert all(pod_file(tmp_path, f"job-worker-{i}.saved").exists() for i in range(2))
    assert kinds(status(tmp_path)) == ["Created", "Suspended"]
    pod_file(tmp_path, "end").touch()
    exit_code, _, err = finish(built)
    assert exit_code == 0, err


def test_a_second_ctrl_c_kills(start, tmp_path):
    """Pods that ignore SIGTERM have their grace period, unless Ctrl-C comes twice."""
    process = start(job("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STOPPABLE.split("\n")[2]
                        + "\nwait('never')", grace_s=300))  # fmt: skip
    until(lambda: all(pod_file(tmp_path, f"job-worker-{i}.up").exists() for i in range(2)))
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130
    assert guard.members(str(tmp_path)) == []


def test_the_grace_period_ends_with_sigkill(start, tmp_path):
    """A pod that ignores SIGTERM is killed when its terminationGracePeriodSeconds are over."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); (runs / 'up').touch(); wait('never')"
    process = start(job(code, replicas=1, grace_s=1))
    until(lambda: pod_file(tmp_path, "up").exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "did not stop within 1 s" in err


def test_submitting_again_is_a_no_op_or_a_refusal(start, finish, tmp_path):
    """Running: says so; another manifest: refused with the difference; succeeded: nothing to do."""
    built, other = job("wait('end')"), job("wait('end')", replicas=3)
    process = start(built)
    until(lambda: kinds(status(tmp_path)) == ["Created", "Running"])
    exit_code, _, err = finish(built)
    assert exit_code == 0 and f"already running, as process {process.pid}" in err
    exit_code, _, err = finish(other)
    assert exit_code == 2
    assert re.search(r"- +maxReplicas: 2\n", err) and re.search(r"\+ +replicas: 3\n", err)
    assert "another --name" in err
    assert "spec-hash" not in err
    pod_file(tmp_path, "end").touch()
    assert process.wait(20) == 0
    exit_code, _, err = finish(built)
    assert exit_code == 0 and "already succeeded" in err
    assert finish(other)[0] == 2


def test_a_job_whose_run_is_gone_runs_again(finish, tmp_path):
    """Succeeded counts as long as the run directory is there: who removes it wants a new run."""
    built = job("pathlib.Path(sys.argv[2]).mkdir(); print('trained', flush=True)", replicas=1)
    containers = built["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    containers[0]["args"] = ["--run-dir", "/runs/job"]
    assert "already" not in finish(built)[2]
    assert "already succeeded" in finish(built)[2]
    pod_file(tmp_path, "job").rmdir()
    assert finish(built)[0] == 0
    log = tmp_path / "local" / "jobs" / "job" / "logs" / "job-worker-0.log"
    assert log.read_text() == 2 * "trained\n"


def test_two_jobs_at_once_do_not_meet(start, tmp_path):
    """Jobs started together have other addresses and ports, and both can listen on every one."""
    code = """
import socket
host, port = os.environ["PET_RDZV_ENDPOINT"].split(":")
if first:
    store = socket.create_server(("", int(port)))
    (runs / "endpoint").write_text(f"{host} {port}")
    wait("end")
else:
    time.sleep(60)
"""
    folders = [tmp_path / f"local{i}" for i in range(3)]
    processes = [start(job(code), folder=folder) for folder in folders]
    files = [folder / "volumes" / "runs" / "endpoint" for folder in folders]
    seen = [until(lambda file=file: file.read_text().split()) for file in files]
    assert len({host for host, _ in seen}) == len({port for _, port in seen}) == 3
    for folder in folders:
        (folder / "volumes" / "runs" / "end").touch()
    assert [process.wait(20) for process in processes] == [0, 0, 0]


# -- what the user sees ------------------------------------------------------------------------


def test_logs_are_kept_as_written_and_shown_with_a_prefix(finish, tmp_path):
    """`-v` prints `[worker-i] line` on stdout; the files have the bare lines of all lives."""
    code = """
if not first: time.sleep(60)
print("out"); print("err", file=sys.stderr); sys.stdout.write("no end of line")
sys.stdout.flush(); time.sleep(0.3)
sys.exit(143 if once("a") else 0)
"""
    exit_code, out, err = finish(job(code), "-v")
    assert exit_code == 0
    assert "[worker-0] out\n[worker-0] err\n" in out
    assert "out" not in err
    log = tmp_path / "local" / "jobs" / "job" / "logs" / "job-worker-0.log"
    assert log.read_text() == 2 * "out\nerr\nno end of line"
    assert out.count("[worker-0] err") == 2


def test_a_closed_output_does_not_end_the_job(start, tmp_path):
    """Whoever reads `submit -v | head` may go; the job goes on to its own exit code."""
    code = "\nfor _ in range(40): print('x' * 99, flush=True); time.sleep(0.02)\n"
    process = start(job(code, replicas=1), "-v")
    process.stdout.close(), process.stderr.close()
    assert process.wait(20) == 0
    process.stdout = process.stderr = None


def test_the_progress_line_reads_the_newest_generation(tmp_path):
    """Step, loss and speed come from the last whole line of the highest generation; then an ETA."""
    log = RunLog(tmp_path, steps=100)
    assert log.line(0) == ""
    (tmp_path / "log.9.jsonl").write_text('{"step": 50, "loss": 1.0}\n')
    newest = tmp_path / "log.10.jsonl"
    newest.write_text('{"step": 9, "loss": 2.5, "tok_s": 45210.3}\n{"step": 10, "lo')
    assert log.line(0) == "step 9/100  loss 2.500  45,210 tok/s"
    for now, step in ((10, 20), (20, 40)):
        newest.write_text(json.dumps({"step": step, "loss": None}) + "\n")
        line = log.line(now)
    assert line == "step 40/100  ETA 0:30"


# -- refusals ----------------------------------------------------------------------------------


def test_a_missing_dataset_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """The message has the command that makes one, with the folder in which it is looked for."""
    monkeypatch.chdir(tmp_path)
    rendered = manifest.objects(spec.load(None, {"data": "corpus/small"}, []))
    with pytest.raises(DataError, match=r"gptddp prepare .* --out local/volumes/corpus/small"):
        local.run(rendered, local_dir=Path("local"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="--out elsewhere/small"):
        local.run(rendered, local_dir=Path("local"), volumes={"corpus": Path("elsewhere")})


def edited(path, value):
    """A job with one field of its pod's spec (or of the job, from `job.`) replaced."""
    built = job()
    *parents, last = path.split(".")
    where = built if parents[:1] == ["job"] else None
    where = where or built["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    for key in parents[parents[:1] == ["job"] :]:
        where = where[int(key) if key.isdigit() else key]
    where[last] = value
    return built


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("initContainers", [{"name": "x", "image": "y"}], "initContainers"),
        ("volumes", [{"name": "s", "secret": {"secretName": "s"}}], "no volume of the kind secret"),
        ("volumes", [], "no volume is named 'data'"),
        ("containers.0.envFrom", [{"secretRef": {"name": "s"}}], "envFrom"),
        ("containers.0.env", [{"name": "A", "valueFrom": {"secretKeyRef": {}}}], "secretKeyRef"),
        ("containers.0.resources", {"limits": {"nvidia.com/gpu": 99}}, "need 198 GPUs"),
        ("job.spec.runPolicy.suspend", True, "suspend"),
        ("job.spec.elasticPolicy.rdzvConf", [], "panic"),
        ("job.spec.pytorchReplicaSpecs.Worker.replicas", 151, "replica-count"),
        ("job.spec.pytorchReplicaSpecs", {}, "Worker"),
        ("job.spec", "text", "shape"),
        ("job.kind", "Job", "0 objects of kind PyTorchJob"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path, path, value, message):
    """Nothing is started and nothing written for a manifest that would not behave as written."""
    with pytest.raises(ConfigError, match=message):
        local.run([edited(path, value)], local_dir=tmp_path / "local")
    assert not (tmp_path / "local").exists()


def test_a_claim_or_a_folder_that_cannot_be_is_refused(tmp_path):
    """A misspelt claim of --volume, and a --local-dir where nothing can be written."""
    with pytest.raises(ConfigError, match="no such claim: did you mean 'data'"):
        local.run([job()], local_dir=tmp_path, volumes={"dta": tmp_path})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot run in .*choose another --local-dir"):
        local.run([job()], local_dir=tmp_path / "file")


def test_other_systems_are_told_what_is_missing(monkeypatch):
    """On a Mac the refusal names what does not work there, and the way out."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*loopback.*gptddp train"):
        local.run([job()])


def test_a_manifest_is_the_same_after_a_round_through_yaml():
    """What `render` prints and what `submit --local` runs are one and the same."""
    built = job()
    assert yaml.safe_load(manifest.to_yaml([built])) == built
