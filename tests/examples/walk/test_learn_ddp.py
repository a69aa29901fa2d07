"""All commands of docs/learn-ddp.md, and its manifest. `make test-examples` runs this."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.example_runs import EXAMPLES
from support.manifests import container
from support.paths import ROOT

PAGE = (ROOT / "docs/learn-ddp.md").read_text()
LIMIT_S = 500
NODES = subprocess.run([EXAMPLES / "nodes.sh", "1", "true"], capture_output=True).returncode == 0


def commands() -> list[str]:
    """Every line of the page that begins with a dollar sign; nodes.sh only where it may run."""
    found = re.findall(r"^\$ (.*)$", PAGE, re.M)
    return [line for line in found if NODES or "nodes.sh" not in line]


@pytest.fixture
def shell(tmp_path):
    """Run a script of commands in a copy of the repository's top; (exit code, all output)."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    bin = tmp_path / "bin"  # commands of this interpreter, whether or not they are installed
    bin.mkdir()
    for name, code in {
        "gptddp": "from gptddp.cli import cli; cli()",
        "gptddp-k8s": "from gptddp.k8s import main; main()",
        "torchrun": "from torch.distributed.run import main; main()",
    }.items():
        (bin / name).write_text(f"#!{sys.executable}\n{code}\n")
        (bin / name).chmod(0o755)
    path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(script: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        return done.returncode, done.stdout

    return run


@pytest.mark.timeout(LIMIT_S + 60)
def test_all_commands_of_the_page_work_in_order(shell, tmp_path):
    """No command fails, and each start of digits.py continues where the one before has ended."""
    code, said = shell("\n".join([*commands(), "wait $!"]))
    assert code == 0, said
    rows = (tmp_path / "learn/digits/results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", *map(str, range(7 if NODES else 6))]
    # torchrun, spawn, torchrun with restarts, two nodes, two namespaces
    assert said.count("2 processes, gloo on cpu") == 4 + NODES
    assert said.count("SyncBatchNorm needs GPUs") == 4 + NODES
    assert said.count("[node0] ") * said.count("[node1] ") > 0 or not NODES


def test_nodes_can_be_made_here():
    """nodes.sh works; where this is skipped, the test of the page leaves out its command."""
    if not NODES:
        assert not os.environ.get("GPTDDP_CI")
        pytest.skip("needs iproute2, and root or the right to make user namespaces")


def test_nodes_share_only_a_network(tmp_path):
    """Two nodes have their own names, addresses and loopbacks; the exit code is the worst one."""
    if not NODES:
        pytest.skip("needs iproute2, and root or the right to make user namespaces")
    code = "import socket, sys; name = socket.gethostname(); server = socket.create_server(('', 9))"
    code += "; print(name, socket.gethostbyname('node0'), socket.gethostbyname('node1'))"
    code += "; sys.exit(int(name[-1]) * 3)"  # and both have the same port
    command = [EXAMPLES / "nodes.sh", "2", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    addresses = "10.0.0.1 10.0.0.2"
    assert sorted(done.stdout.splitlines()) == [f"[node{n}] node{n} {addresses}" for n in range(2)]


def test_torchrun_restarts_a_killed_process(shell, tmp_path):
    """With the page's command, a SIGKILL for one process costs no epoch and no second command."""
    (line,) = [c for c in commands() if "--max-restarts" in c]
    kill = (
        "until [ -e learn/digits/snapshot.pt ]; do sleep 0.1; done;"
        "torchrun=$!; kill -9 $(cut -d' ' -f1 /proc/$torchrun/task/$torchrun/children)"
    )
    code, said = shell(f"{line} & {kill}; wait $torchrun")
    assert code == 0, said
    assert said.count("2 processes, gloo on cpu") == 2 and "continues in epoch" in said
    rows = (tmp_path / "learn/digits/results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "2", "3", "4"]


def test_two_jobs_on_one_machine_do_not_meet(shell, tmp_path):
    """Two jobs that the page's command starts at once each train their own run to the end."""
    line, _ = (c for c in commands() if "--standalone" in c)  # the other restarts
    short = line.replace("--epochs 3", "--epochs 1")
    first, second = (short.replace("learn/digits", name) for name in ("one", "two"))
    code, said = shell(f"{first} & {second}; wait $!")
    assert code == 0, said
    for name in ("one", "two"):
        rows = (tmp_path / name / "results.csv").read_text().splitlines()
        assert len(rows) == 2
        assert float(rows[1].split(",")[4]) > 0.8


def test_the_job_of_two_pods_trains(finish, tmp_path):
    """Two local pods of the manifest, with the operator's environment, are ranks of one run."""
    job = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    own = container(job)
    assert own["args"][0] == "/opt/examples/digits.py"
    own["args"] = [str(EXAMPLES / "digits.py"), *own["args"][1:], "--epochs", "1"]
    code, out, err = finish(job)
    log = (tmp_path / "local/jobs/digits/logs/digits-worker-0.log").read_text()
    assert code == 0, out + err + log
    rows = (tmp_path / "local/volumes/runs/digits/results.csv").read_text().splitlines()
    assert len(rows) == 2
    logs = [log, (tmp_path / "local/jobs/digits/logs/digits-worker-1.log").read_text()]
    assert sum("2 processes, gloo on cpu" in text for text in logs) == 1
