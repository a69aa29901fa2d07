"""The environment of a pod, and torchrun's command line made from it."""

import os
import socket
import subprocess
import sys

import pytest
from support.pod_env import ENV

from gptddp.distributed import environment
from gptddp.errors import ConfigError
from gptddp.launch.pod_facts import as_elastic, pod_from, seeds, torchrun_args


def parsed(env: dict[str, str], *flags: str):
    """The launcher's command line, parsed by torchrun."""
    from torch.distributed.run import parse_args

    return parse_args(torchrun_args(pod_from(env), "worker.py", flags))


def test_torchrun_understands_the_command_line():
    """Every option arrives, and torchrun takes no flag of the trainer. The line is for one worker
    that is started once, in any environment."""
    args = parsed(ENV, "--run-dir", "/runs/demo", "--run", "x", "--log", "y")
    assert (args.nnodes, args.nproc_per_node, args.rdzv_id) == ("1", "1", "demo-1a2b3c4d")
    assert (args.rdzv_endpoint, args.local_addr) == ("demo-worker-0:23456", "demo-worker-1")
    assert (args.max_restarts, args.monitor_interval, args.shutdown_timeout) == (0, 0.1, 56)
    assert (args.start_method, args.run_path) == ("forkserver", True)
    assert (args.rdzv_backend, args.rdzv_conf) == ("gptddp", "")
    assert args.training_script == "worker.py"
    assert args.training_script_args == ["--run-dir", "/runs/demo", "--run", "x", "--log", "y"]


@pytest.mark.parametrize(
    ("changes", "address"),
    [
        ({}, "demo-worker-1"),
        ({"POD_NAME": ""}, "demo-worker-1"),
        ({"POD_NAME": "", "HOSTNAME": ""}, socket.gethostname()),
        ({"PET_RDZV_ENDPOINT": "127.6.3.1:2", "POD_ADDRESS": "127.6.3.2"}, "127.6.3.2"),
    ],
)
def test_the_pod_knows_its_address(changes, address):
    """A pod uses its own address, else its name, else the name of the machine."""
    assert pod_from(ENV | changes).address == address


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "demo-worker-0:23456 demo-worker-1:23456 demo-worker-2:23456 demo-worker-3:23456"),
        (
            {"PET_RDZV_ENDPOINT": "demo-worker-0.ns.svc:9", "PET_NNODES": "2"},
            "demo-worker-0.ns.svc:9 demo-worker-1.ns.svc:9",
        ),
        (
            {"PET_RDZV_ENDPOINT": "a-master-0:9", "PET_NNODES": "3"},
            "a-master-0:9 a-worker-0:9 a-worker-1:9 a-worker-2:9",
        ),
        (
            {"PET_RDZV_ENDPOINT": "127.6.3.100:9", "PET_NNODES": "3"},
            "127.6.3.100:9 127.6.3.101:9 127.6.3.102:9",
        ),
        (
            {"PET_RDZV_ENDPOINT": "node7:9", "PET_NPROC_PER_NODE": "3"},
            "node7:9 node7:10 node7:11",
        ),
        ({"PET_RDZV_ENDPOINT": "10.0.0.7:9"}, "10.0.0.7:9"),
        ({"PET_RDZV_ENDPOINT": "[fd00::7]:9"}, "[fd00::7]:9"),
    ],
)
def test_pods_look_for_each_other_at_all_possible_addresses(changes, wanted):
    """A pod tries all names or addresses that follow from the endpoint, as the pod there may be
    lost; each worker of a pod has a port."""
    assert seeds(pod_from(ENV | changes)) == wanted.split()


MASTER = {
    "HOSTNAME": "demo-master-0",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_MASTER_ADDR": "demo-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NODE_RANK": "0",
}


def test_a_job_with_a_master_has_a_fixed_size_and_meets_there():
    """The operator sets these variables without an elasticPolicy; with it, its endpoint counts."""
    pod = pod_from(MASTER)
    assert (pod.endpoint, pod.nodes) == ("demo-master-0:23456", (3, 3))
    both = MASTER | {"PET_RDZV_ENDPOINT": "demo-worker-1:23456"}  # a Master and an elasticPolicy
    assert pod_from(both).endpoint == "demo-worker-1:23456"


def test_a_pod_of_a_job_with_a_master_does_not_count_as_a_rank(monkeypatch):
    """RANK numbers the pods there: the launcher is no rank, and the endpoint identifies the job."""
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
    """Without PET_* a pod has one worker, on loopback, and looks for no peer."""
    pod = pod_from({"HOSTNAME": "laptop"})
    assert (pod.nodes, pod.workers, seeds(pod)) == ((1, 1), 1, [])
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


def test_the_key_of_the_job_is_not_shown():
    """The key is the Secret without a line feed, and not in `repr`; a single pod makes a key."""
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
    """Even a forked process, for which /proc shows the memory of its parent, lacks the key."""
    env = os.environ | {"GPTDDP_RENDEZVOUS_KEY": "secret" * 8, "AFTER": "kept"}
    done = subprocess.run([sys.executable, "-c", FORGETS], env=env, capture_output=True, text=True)
    assert "secret" not in done.stdout and "AFTER=kept" in done.stdout, done.stderr
    assert done.stdout.rstrip().endswith("None")
