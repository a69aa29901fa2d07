"""The environment of a pod, and torchrun's command line that is made of it."""

import os
import subprocess
import sys

import pytest
from support.pod_env import ENV

from gptddp.distributed import environment
from gptddp.errors import ConfigError
from gptddp.launch.pod_facts import as_elastic, pod_from, torchrun_args


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


def test_a_pod_of_a_job_with_a_master_does_not_pass_for_a_worker(monkeypatch):
    """Its RANK is a pod's: the launcher is no rank, and the job is known by its endpoint."""
    env = MASTER | {"RANK": "2", "WORLD_SIZE": "3", "PATH": "/bin"}
    as_elastic(pod_from(env), env)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "gptddp")
    assert not environment.is_launched() and environment.ranks().world_size == 1
    assert environment.job().startswith("gptddp at demo-master-0:23456")
    alone = {"HOSTNAME": "laptop"}
    as_elastic(pod_from(alone), alone)
    assert alone == {"HOSTNAME": "laptop"}


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
        ("PET_MASTER_PORT", ""),
        ("PET_MASTER_PORT", "x"),
        ("PET_NODE_RANK", ""),
        ("PET_NODE_RANK", "x"),
    ],
)
def test_a_bad_variable_is_named(name, value):
    """A mistake in the pod's environment is a ConfigError that names the variable."""
    env = MASTER if name in MASTER and name not in ENV else ENV
    with pytest.raises(ConfigError, match=name):
        pod_from(env | {name: value})


def test_the_key_is_the_jobs_and_is_not_shown():
    """As the Secret has it, with or without a line feed; a pod that is alone makes its own."""
    key = "0123456789abcdef" * 4
    pod = pod_from(ENV | {"GPTDDP_RENDEZVOUS_KEY": f"{key}\n"})
    assert pod.key == key and key not in repr(pod)
    assert pod_from(ENV).key == ""
    assert len(pod_from({}).key) == 64 and pod_from({}).key != pod_from({}).key


FORGETS = """
import os
from gptddp.launch.pod_facts import KEY, forget_key
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
