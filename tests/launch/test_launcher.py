"""The launcher before torchrun begins, and the worker's way out."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.forked import LAUNCH as forked_launch
from support.launchers import until

from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.launch.pod import pod_from, torchrun_args
from gptddp.run.in_force import is_finished

# What the operator and the manifest give to the second of four pods.
ENV = {
    "POD_NAME": "demo-worker-1",
    "HOSTNAME": "demo-worker-1",
    "GPTDDP_GRACE_S": "60",
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "1",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": "demo-worker-0:23456",
    "PET_RDZV_ID": "demo-1a2b3c4d",
    "PET_MAX_RESTARTS": "1000",
    "PET_RDZV_CONF": "join_timeout=600,last_call_timeout=1",
}


def parsed(env: dict[str, str], *flags: str):
    """torchrun's own reading of the command line that the launcher makes."""
    from torch.distributed.run import parse_args

    return parse_args(torchrun_args(pod_from(env), "worker.py", flags))


def test_torchrun_understands_the_command_line():
    """Every option arrives, and no flag of the trainer is taken for one of torchrun's."""
    args = parsed(ENV, "--run-dir", "/runs/demo", "--run", "x", "--log", "y")
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("2:4", "1", "demo-1a2b3c4d")
    assert (args.rdzv_endpoint, args.local_addr) == ("demo-worker-0:23456", "demo-worker-1")
    assert (args.max_restarts, args.monitor_interval, args.shutdown_timeout) == (1000, 0.1, 56)
    assert (args.start_method, args.run_path) == ("forkserver", True)
    assert args.training_script == "worker.py"
    assert args.training_script_args == ["--run-dir", "/runs/demo", "--run", "x", "--log", "y"]


def test_the_manifests_rendezvous_settings_win():
    """PET_RDZV_CONF replaces our values key by key, is_host too."""
    conf = dict(pair.split("=") for pair in parsed(ENV).rdzv_conf.split(","))
    assert conf["join_timeout"] == "600" and conf["last_call_timeout"] == "1"
    assert conf["keep_alive_interval"] == "1" and conf["is_host"] == "0"
    env = ENV | {"PET_RDZV_CONF": "is_host=1"}
    assert "is_host=1" in parsed(env).rdzv_conf


@pytest.mark.parametrize(
    ("changes", "address", "is_host"),
    [
        ({}, "demo-worker-1", False),
        ({"POD_NAME": "demo-worker-0"}, "demo-worker-0", True),
        ({"POD_NAME": ""}, "demo-worker-1", False),
        ({"PET_RDZV_ENDPOINT": "demo-worker-1.ns.svc:23456"}, "demo-worker-1", True),
        ({"PET_RDZV_ENDPOINT": "127.6.3.1:2", "POD_ADDRESS": "127.6.3.1"}, "127.6.3.1", True),
        ({"PET_RDZV_ENDPOINT": "127.6.3.1:2", "POD_ADDRESS": "127.6.3.2"}, "127.6.3.2", False),
    ],
)
def test_the_pod_knows_its_address_and_whether_it_hosts(changes, address, is_host):
    """A pod goes by its own address, else its name; the one the endpoint names is the host."""
    pod = pod_from(ENV | changes)
    assert (pod.address, pod.is_host) == (address, is_host)


MASTER = {
    "HOSTNAME": "demo-master-0",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "demo-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NODE_RANK": "0",
}


def test_a_job_with_a_master_has_a_fixed_size_and_meets_there():
    """What the operator tells without an elasticPolicy: node 0 hosts, by number and not by name."""
    pod = pod_from(MASTER)
    assert (pod.endpoint, pod.nodes, pod.is_host) == ("demo-master-0:23456", (3, 3), True)
    renamed = MASTER | {"HOSTNAME": "node7"}  # hostNetwork
    assert pod_from(renamed).is_host
    assert not pod_from(renamed | {"PET_NODE_RANK": "2"}).is_host
    worker = MASTER | {"HOSTNAME": "demo-worker-1", "PET_NODE_RANK": "2"}
    assert (pod_from(worker).address, pod_from(worker).is_host) == ("demo-worker-1", False)
    assert "is_host=0" in parsed(worker).rdzv_conf and parsed(worker).nnodes == "3:3"
    both = worker | {"PET_RDZV_ENDPOINT": "demo-worker-1:23456"}  # a Master and an elasticPolicy
    assert pod_from(both).is_host and pod_from(both).endpoint == "demo-worker-1:23456"


@pytest.mark.parametrize("name", ["PET_MASTER_PORT", "PET_NODE_RANK"])
def test_a_bad_variable_of_a_job_with_a_master_is_named(name):
    """Both are numbers, and the operator sets both."""
    for value in ("", "x"):
        with pytest.raises(ConfigError, match=f"{name} is '{value}': it must be a whole number"):
            pod_from(MASTER | {name: value})


def test_without_an_operator_the_pod_is_the_whole_job():
    """No PET_*: one worker, its own host, on loopback."""
    pod = pod_from({"HOSTNAME": "laptop"})
    assert (pod.nodes, pod.workers, pod.is_host) == ((1, 1), 1, True)
    assert pod.address == "127.0.0.1" and pod.largest_world == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PET_NNODES", "4:2"),
        ("PET_NNODES", "0"),
        ("PET_NNODES", "many"),
        ("PET_NPROC_PER_NODE", "0"),
        ("PET_NPROC_PER_NODE", "cpu"),
        ("PET_RDZV_ENDPOINT", ""),
        ("PET_RDZV_ENDPOINT", "demo-worker-0"),
        ("PET_RDZV_CONF", "join_timeout=soon"),
        ("GPTDDP_GRACE_S", "1m"),
        ("GPTDDP_RENDEZVOUS_KEY", "too short"),
    ],
)
def test_a_bad_variable_is_named(name, value):
    """A mistake in the pod's environment is a ConfigError that names the variable."""
    with pytest.raises(ConfigError, match=name):
        pod_from(ENV | {name: value})


def test_the_key_is_the_jobs_and_is_not_shown():
    """As the Secret has it, with or without a line feed; a pod that is alone makes its own."""
    key = "0123456789abcdef" * 4
    pod = pod_from(ENV | {"GPTDDP_RENDEZVOUS_KEY": f"{key}\n"})
    assert pod.key == key and key not in repr(pod)
    assert pod_from(ENV).key == ""
    assert len(pod_from({}).key) == 64 and pod_from({}).key != pod_from({}).key


FORGETS = """
import os
from gptddp.launch.pod import KEY, forget_key
forget_key()
if os.fork() == 0:
    print(open("/proc/self/environ").read(), os.environ.get(KEY), flush=True)
    os._exit(0)
os.wait()
"""


def test_no_process_that_the_launcher_starts_has_the_key_in_its_environment():
    """Nor has one that is forked, where /proc shows the memory that its parent began with."""
    env = os.environ | {"GPTDDP_RENDEZVOUS_KEY": "secret" * 8, "AFTER": "kept"}
    done = subprocess.run([sys.executable, "-c", FORGETS], env=env, capture_output=True, text=True)
    assert "secret" not in done.stdout and "AFTER=kept" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("None")


def test_the_marker_of_the_finished_run_counts_for_what_is_asked(tmp_path):
    """Finished means: no more steps are wanted, and no more time; the rest is the run's own."""
    marker = tmp_path / "finished.json"
    config = Config(run_dir=str(tmp_path))
    assert not is_finished(config)
    for torn in ("", "{", "[]", "{}", '{"step": null, "steps": 1}'):
        marker.write_text(torn)
        assert not is_finished(config)
    marker.write_text(json.dumps({"step": 40, "steps": 40}))
    assert is_finished(config) and is_finished(dataclasses.replace(config, steps=40))
    assert not is_finished(dataclasses.replace(config, steps=41))
    marker.write_text(json.dumps({"step": 30, "steps": 40, "max_time": 5.0}))
    assert is_finished(dataclasses.replace(config, max_time=5.0))
    assert not is_finished(dataclasses.replace(config, max_time=6.0)) and is_finished(config)
    assert not is_finished(dataclasses.replace(config, max_time=0.0))
    marker.write_text(json.dumps({"step": 40, "steps": 40, "max_time": 5.0}))
    assert not is_finished(dataclasses.replace(config, steps=41, max_time=5.0))
    wanted = {"steps": 40, "max_tokens": 900, "max_time": 5.0}
    marker.write_text(json.dumps({"step": 30, "tokens": 910, "train_s": 4.0} | wanted))
    assert is_finished(config) and is_finished(dataclasses.replace(config, max_tokens=905))
    assert not is_finished(dataclasses.replace(config, max_tokens=911))
    assert not is_finished(dataclasses.replace(config, max_tokens=0))
    assert is_finished(dataclasses.replace(config, max_tokens=0, max_time=4.0))
    for foreign in ({"tokens": "x"}, {"train_s": None}, {"steps": 0}, {"max_tokens": [1]}):
        marker.write_text(json.dumps({"step": 30, "tokens": 1, "train_s": 1.0} | wanted | foreign))
        assert not is_finished(config)


@pytest.fixture
def python(spawn):
    """python(code, *args, env): a process without this one's variables of a pod."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "POD_", "GPTDDP_"))}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)

    def begin(code: str, *args: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *args]
        return spawn(command, env=clean | (env or {}), text=True, **pipes)

    return begin


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


# With torch out of reach, whatever works is done before torchrun and the rendezvous.
LAUNCH = "import runpy; runpy.run_module('gptddp.launch', run_name='__main__')"
EARLY = "import sys; sys.modules['torch'] = None; " + LAUNCH


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--step", "3"], "unknown option '--step'"),
        (["--batch", "10", "--lanes", "4"], "batch 10 is not divisible by lanes 4"),
        (["--lanes", "3", "--batch", "3"], "4 workers but only 3 lanes"),
    ],
)
def test_a_mistake_ends_with_2_before_the_rendezvous(python, args, message):
    """One line on stderr says what is wrong."""
    code, out, err = ended(python(EARLY, *args, env=ENV))
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_the_lanes_of_a_run_that_is_continued_are_its_own(python, tmp_path):
    """They are not given again, and those of the preset would be too many or too few."""
    (tmp_path / "config.json").write_text('{"config": {"lanes": 3, "batch": 3}}')
    code, _, err = ended(python(EARLY, "--run-dir", str(tmp_path), env=ENV))
    assert code == 2 and "4 workers but only 3 lanes" in err


def test_a_finished_run_of_another_configuration_is_not_this_one(tmp_path):
    """Else a job of another seed would succeed without a step; open fields are the run's own."""
    (tmp_path / "finished.json").write_text('{"step": 40, "steps": 40}')
    (tmp_path / "config.json").write_text('{"config": {"seed": 7, "seq_len": 64, "lr": 0.1}}')
    config = Config(run_dir=str(tmp_path), seed=7)
    assert is_finished(config) and is_finished(dataclasses.replace(config, seq_len=64, lr=0.2))
    assert not is_finished(dataclasses.replace(config, seed=8))
    assert not is_finished(dataclasses.replace(config, seq_len=128))


def test_a_finished_run_ends_with_0_before_the_rendezvous(python, tmp_path):
    """A pod that is started again at the end of the job leaves at once."""
    (tmp_path / "finished.json").write_text('{"step": 5, "steps": 5}')
    code, out, err = ended(python(EARLY, "--run-dir", str(tmp_path), "--steps", "5", env=ENV))
    assert (code, out) == (0, "") and "is finished" in err


def test_help_is_printed(python):
    """--help shows the trainer's flags."""
    code, out, _ = ended(python(EARLY, "--help"))
    assert code == 0 and "--run-dir" in out


def test_the_launcher_does_not_start_on_another_torch(python):
    """Exit code 2 and one line, before the pod looks for its peers."""
    hide = (
        "from torch.distributed.elastic.rendezvous import dynamic_rendezvous as d; del d._delay; "
    )
    code, out, err = ended(python(hide + LAUNCH, env=ENV))
    assert (code, out) == (2, "") and "dynamic_rendezvous._delay" in err and err.count("\n") == 1


def test_what_nobody_expected_may_be_retried(python):
    """A failure of the launcher itself ends with a traceback and a code above 127."""
    code, _, err = ended(python(EARLY, env=ENV))
    assert code == 200 and "Traceback" in err


def test_sigterm_ends_it_while_it_imports(python):
    """Long before torchrun has handlers of its own, the exit code is 143."""
    pod = python(LAUNCH, env=ENV)
    status, wanted = Path(f"/proc/{pod.pid}/status"), 1 << (signal.SIGTERM - 1)
    end = time.monotonic() + 30
    while not int(status.read_text().split("SigCgt:")[1].split()[0], 16) & wanted:
        assert time.monotonic() < end
        time.sleep(0.005)
    pod.terminate()
    assert ended(pod)[0] == 143


def test_a_launcher_that_waits_for_its_peers_says_that_it_is_alive(forked, tmp_path):
    """Again and again, from its loop: not before that begins, and not when it stands still."""
    file = tmp_path / "alive"
    file.touch()
    os.utime(file, times=(0, 0))  # as a launcher before this one may have left it
    env = os.environ | ENV | {"PET_RDZV_ENDPOINT": "127.0.0.1:9", "GPTDDP_ALIVE": str(file)}
    pod = forked(forked_launch, "--run-dir", str(tmp_path), env=env)
    until("its first sign of life", lambda: file.exists() and file.stat().st_mtime)
    first = file.stat().st_mtime
    assert abs(first - time.time()) < 30
    until("the next one", lambda: first < file.stat().st_mtime < time.time() + 1)
    trains = (
        "from gptddp.launch.launcher import Launcher, Path; it = Launcher(); "
        "it.verdict = Path('/none'); it.raise_if_over(joining=False)"
    )
    alone = env | {"GPTDDP_ALIVE": str(tmp_path / "trains")}
    assert forked(trains, env=alone).wait(60) == 0
    assert abs((tmp_path / "trains").stat().st_mtime - time.time()) < 30
    pod.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    last = file.stat().st_mtime
    time.sleep(1.5)
    assert file.stat().st_mtime == last
    assert pod.poll() is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_that_the_workers_find_is_told_once(python, tmp_path, workers):
    """No dataset: exit code 2 and one line that says so, whatever the number of workers."""
    flags = ["--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")]
    code, out, err = ended(python(LAUNCH, *flags, env={"PET_NPROC_PER_NODE": str(workers)}))
    assert (code, out) == (2, ""), err
    assert err.count("no such folder") == 1
    assert err.splitlines()[-1].startswith("gptddp.launch: rank ")


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("return None", 7, ""),  # 7: what the script does after `run` has returned
        ("return 0", 7, ""),
        ("sys.exit()", 7, ""),
        ("sys.exit(0)", 7, ""),
        ("return 3", 3, ""),
        ("sys.exit(4)", 4, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken\n"),
    ],
)
def test_success_returns_from_the_script_and_failure_leaves_at_once(python, body, code, message):
    """torchrun needs a returned success; a failure does not wait for threads or handlers."""
    script = f"""
import atexit, sys, threading, time
from gptddp.distributed.process import run
def main():
    {body}
threading.Thread(target=time.sleep, args=(0.01,)).start()
atexit.register(print, "late")
run(main)
sys.exit(7)
"""
    found, out, err = ended(python(script))
    assert found == code and err.endswith(message) and ("late" in out) == (code == 7)
