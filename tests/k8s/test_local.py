"""Local jobs: what a pod sees, its restarts, the end of its job; real processes."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from support.local_jobs import job, kinds, pod_file, status, until
from support.manifests import container, pod_spec

from gptddp.k8s.local import run
from gptddp.k8s.local.conditions import Conditions
from gptddp.k8s.local.container import localized, operator_env
from gptddp.k8s.local.pods import BackOff
from gptddp.k8s.local.replica import Network, replicas

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
    own = container(built)
    own["args"] = ["--run=/runs/x", "--data", "/data/set", "s3://b/data", "$(POD_NAME)", "$$"]
    own["env"] += [
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
    key = tmp_path / "local/jobs/job/rendezvous.key"
    assert env["GPTDDP_RENDEZVOUS_KEY"] == key.read_text() and len(key.read_text()) == 64
    assert key.stat().st_mode & 0o777 == 0o600
    assert "MASTER_ADDR" not in env and "WORLD_SIZE" not in env
    assert env["CACHE"].endswith(f"/shm/cache:{volumes}/runs")
    assert one["args"] == [
        f"--run={volumes}/runs/x",
        *("--data", f"{volumes}/data/set", "s3://b/data", "job-worker-0", "$"),
    ]
    assert one["cpus"] == 1 and one["session"]


@pytest.mark.parametrize("torn", ["", "0123", "\xff" * 64])
def test_a_torn_key_is_made_anew(finish, tmp_path, torn):
    """A runner that was killed, or a disk that was full, may leave anything."""
    folder = tmp_path / "local/jobs/job"
    folder.mkdir(parents=True)
    for name in ("rendezvous.key", "rendezvous.key.new"):
        (folder / name).write_text(torn, "latin-1")
    code = "(runs / name).write_text(os.environ['GPTDDP_RENDEZVOUS_KEY'])"
    code, _, err = finish(job(code, replicas=1))
    assert code == 0, err
    key = (folder / "rendezvous.key").read_text()
    assert len(key) == 64 and pod_file(tmp_path, "job-worker-0").read_text() == key


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
    net = Network("127.64.1", 24000)
    env = {r.short: operator_env(r) for r in replicas(built, net)}
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
    assert localized(text, folders) == local_text


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
    code = "once('a') or once('b') or (runs / 'c').touch()"
    built = job(code, replicas=1, policy="Always", name="always", backoffLimit=1)
    exit_code, _, err = finish(built)
    assert exit_code == 100 and "exited with 0: restarted" in err


def test_a_program_that_does_not_exist_fails_the_job_with_the_reason(finish):
    """Exit code 127 and its name; a cluster would try for ever."""
    built = job()
    container(built)["command"] = ["no-such-program"]
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
        ("Created", "True"),
        ("Running", "False"),
        ("Failed", "True"),
    ]


def test_the_shell_and_a_folder_stand_in_for_secrets(tmp_path, monkeypatch):
    """Variables from Secrets and ConfigMaps are the shell's, their files those of --volume."""
    certs = tmp_path / "certs"
    certs.mkdir()
    (certs / "ca.pem").write_text("a certificate")
    monkeypatch.setenv("API_TOKEN", "s3cret")
    built = job(
        """
seen = [os.environ["API_TOKEN"], os.environ.get("NOT_THERE"), open(os.environ["CA"]).read()]
(runs / f"{name}.json").write_text(json.dumps(seen))
""",
        replicas=1,
    )
    optional = {"name": "x", "key": "k", "optional": True}
    container(built)["env"] += [
        {"name": "API_TOKEN", "valueFrom": {"secretKeyRef": {"name": "api", "key": "token"}}},
        {"name": "NOT_THERE", "valueFrom": {"configMapKeyRef": optional}},
        {"name": "CA", "value": "/etc/certs/ca.pem"},
    ]
    container(built)["envFrom"] = [{"secretRef": {"name": "proxy"}}]
    container(built)["volumeMounts"].append({"name": "c", "mountPath": "/etc/certs"})
    pod_spec(built)["volumes"].append({"name": "c", "secret": {"secretName": "certs"}})
    folders = {"certs": certs}
    assert run.run([built], local_dir=tmp_path / "local", volumes=folders) == 0
    seen = json.loads(pod_file(tmp_path, "job-worker-0.json").read_text())
    assert seen == ["s3cret", None, "a certificate"]
