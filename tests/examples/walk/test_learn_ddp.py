"""docs/learn-ddp.md, command after command; and its manifest. `make test-examples` runs this."""

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


def commands() -> list[str]:
    """Every line of the page that begins with a dollar sign, in order."""
    return re.findall(r"^\$ (.*)$", PAGE, re.M)


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
        "gptddp": "from gptddp import main; main()",
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
def test_every_command_of_the_page_works_in_its_order(shell, tmp_path):
    """None fails, and each of the first script goes on where the one before has ended."""
    code, said = shell("\n".join([*commands(), "wait $!"]))
    assert code == 0, said
    rows = (tmp_path / "learn/digits/results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "2", "3", "4"]
    assert said.count("2 processes, gloo on cpu") == 3  # torchrun, spawn, two nodes
    assert said.count("SyncBatchNorm needs GPUs") == 3


def test_two_jobs_on_one_machine_do_not_meet(shell, tmp_path):
    """Started at once by the page's command, each trains its own run to the end."""
    (line,) = [c for c in commands() if "--standalone" in c]
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
