"""`gptddp-k8s render --api slurm`: the script is run by a real shell, with Slurm's programs played.

What a real Slurm makes of it: `make test-slurm`.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gptddp.k8s.cli.main import cli

EXAMPLES = ROOT / "examples/slurm"
README = (ROOT / "docs/slurm.md").read_text()
COMMANDS = {
    line.split("> examples/slurm/")[1]: line.removeprefix("$ gptddp-k8s ").split(" >")[0]
    for line in README.splitlines()
    if "> examples/slurm/" in line
}
FOLDERS = ("--data", "/data/books", "--runs", "/runs")


def render(*args):
    return CliRunner().invoke(cli, ["render", "--api", "slurm", *args])


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_what_its_command_prints(name):
    """Byte for byte.

    After a change that is meant: `PYTHONPATH=tests python tests/k8s/test_slurm.py`.
    """
    result = CliRunner().invoke(cli, shlex.split(COMMANDS[name]))
    assert result.exit_code == 0, result.stderr
    assert (EXAMPLES / name).read_text() == result.stdout


def test_every_example_has_its_command():
    """Both launchers have one."""
    assert {path.name for path in EXAMPLES.iterdir()} == set(COMMANDS)
    assert {"torchrun", "srun"} <= {name.split(".")[0].split("-")[-1] for name in COMMANDS}


def directives(script):
    """The options of a script for sbatch, which reads them up to the first command."""
    head = script.partition("\nset ")[0]
    options = [line.removeprefix("#SBATCH ") for line in head.splitlines() if "SBATCH" in line]
    return dict(option.removeprefix("--").partition("=")[::2] for option in options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {"nodes": "1", "ntasks-per-node": "1", "cpus-per-task": "1", "signal": "B:TERM@60"}),
        (
            ("--replicas", "4", "--min", "2", "--grace-s", "90"),
            {"nodes": "2-4", "signal": "B:TERM@90"},
        ),
        (("--replicas", "4"), {"nodes": "4"}),  # half of them only where somebody says so
        (
            ("--gpus", "8", "--memory", "100Gi"),
            {"gres": "gpu:8", "cpus-per-task": "24", "mem": "102400M"},
        ),
        (
            ("--gpus", "8", "--launcher", "srun"),
            {"ntasks-per-node": "8", "cpus-per-task": "3", "job-name": "gptddp"},
        ),
        (("--nproc-per-node", "4", "--cpu", "500m", "--launcher", "srun"), {"cpus-per-task": "1"}),
    ],
)
def test_the_options_of_a_job_become_those_of_sbatch(options, expected):
    """A node for a pod; tasks, CPUs, GPUs and memory per node; the grace period before the end."""
    result = render(*FOLDERS, *options)
    assert result.exit_code == 0, result.stderr
    found = directives(result.stdout)
    assert {key: found.get(key) for key in expected} == expected
    assert "requeue" in found and found["open-mode"] == "append"


PLAYED = """#!{python}
import json, os, sys
name = os.path.basename(sys.argv[0])
with open(os.environ["PLAYED"], "a") as file:
    print(json.dumps([name, *sys.argv[1:]]), file=file)
if name == "scontrol" and sys.argv[1] == "show":
    print("node7", "node8", sep="\\n")
if name == "squeue":
    print(os.environ["STATE"])
if name == "srun":
    env = {{k: v for k, v in os.environ.items() if k.startswith(("MASTER", "PET", "GPTDDP", "X"))}}
    with open(os.environ["PLAYED"] + ".env", "w") as file:
        json.dump(env, file)
    task = sys.argv.index("bash")
    os.environ |= {{"SLURMD_NODENAME": "node8", "SLURM_PROCID": "1"}}
    os.execvp("bash", sys.argv[task:])
"""


class Shell:
    """A rendered script, run by bash; the job's program ends with `code`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name in ("srun", "scontrol", "scancel", "squeue"):
            self._program(name, PLAYED.format(python=sys.executable))

    def _program(self, name: str, text: str) -> Path:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *options, code=0, state="RUNNING", name="program", args=(), **variables):
        """The exit code, and what was called: each as a list of words."""
        # the program of the job; as Python it finds a free port
        program = self._program(
            name,
            f'#!/bin/bash\n[ "$1" = - ] && exec {sys.executable} "$@"\n'
            f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'
            f"\nexit {code}\n",
        )
        result = render(*FOLDERS, "--python", str(program), *options, "--", *args)
        assert result.exit_code == 0, result.stderr
        log = self.folder / "played"
        log.write_text("")
        own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2"}
        path = {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash"],
            input=result.stdout,
            env={"PLAYED": str(log), "STATE": state, **path, **own, **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.out, self.err = done.stdout, done.stderr
        self.env = json.loads(Path(f"{log}.env").read_text())
        return done.returncode, [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


HOSTILE = "a'b\"c $(touch pwned) `touch pwned` \\ ;#&|<>*?[é"


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_hostile_values_reach_the_program_as_they_are(shell, launcher):
    """Quotes, blanks, substitutions: in a path, a variable, the program's own name."""
    flags = ("--launcher", launcher, "--env", f"X={HOSTILE}", "--runs", f"/runs/{HOSTILE}")
    code, _ = shell.run(*flags, name="pro gram'$(touch pwned)", args=("--cache-dir", HOSTILE))
    assert code == 0, shell.err
    given = json.loads(shell.out)
    assert given[given.index("--cache-dir") + 1] == HOSTILE
    assert given[given.index("--run-dir") + 1] == f"/runs/{HOSTILE}/gptddp"
    assert shell.env["X"] == HOSTILE
    assert not list(shell.folder.rglob("pwned"))


def test_ranks_meet_at_the_first_host_and_a_port_of_their_own(shell):
    """Two jobs on one host have two ports, and a port that is taken is passed over."""
    ports = []
    for job in ("7", "8", "20007"):
        shell.run("--launcher", "srun", SLURM_JOB_ID=job, RANK="3", MASTER_PORT="29500")
        assert shell.env["MASTER_ADDR"] == "node7" and shell.env["GPTDDP_GRACE_S"] == "60"
        ports.append(int(shell.env["MASTER_PORT"]))
    assert ports[0] != ports[1] and ports[0] == ports[2]
    with socket.create_server(("", ports[0])):
        shell.run("--launcher", "srun")
        assert int(shell.env["MASTER_PORT"]) > ports[0]


def test_a_launcher_gets_what_the_operator_would_tell_a_pod(shell):
    """Endpoint, nodes and workers; a key of its own at every start; no MASTER_ADDR of its own."""
    keys = set()
    for _ in range(2):
        _, calls = shell.run("--nproc-per-node", "3", MASTER_ADDR="elsewhere")
        assert shell.env["PET_RDZV_ENDPOINT"].startswith("node7:")
        told = {key: shell.env.get(f"PET_{key}") for key in ("NNODES", "NPROC_PER_NODE", "RDZV_ID")}
        assert told == {"NNODES": "2", "NPROC_PER_NODE": "3", "RDZV_ID": "slurm-7"}
        assert "MASTER_ADDR" not in shell.env
        keys.add(shell.env["GPTDDP_RENDEZVOUS_KEY"])
    assert len(keys) == 2 and {len(key) for key in keys} == {64}
    (srun,) = [call for call in calls if call[0] == "srun"]
    wanted = {"--kill-on-bad-exit=1", "--export=ALL", "--ntasks-per-node=1", "--ntasks=2"}
    assert wanted <= set(srun)
    assert json.loads(shell.out)[:2] == ["-m", "gptddp.launch"]


@pytest.mark.parametrize(
    ("code", "state", "restarts", "ends", "requeued"),
    [
        (0, "RUNNING", "0", 0, False),
        (2, "RUNNING", "0", 2, False),
        (3, "RUNNING", "0", 3, False),
        (5, "RUNNING", "0", 5, False),
        (127, "RUNNING", "0", 7, False),
        (143, "RUNNING", "9", 143, True),  # preempted, or near the time limit: however often
        (143, "COMPLETING", "0", 143, False),  # cancelled
        (137, "RUNNING", "0", 1, True),
        (1, "RUNNING", "2", 1, True),
        (1, "RUNNING", "3", 1, False),  # within two minutes, again and again
    ],
)
def test_what_may_pass_is_requeued_and_what_is_final_is_not(
    shell, code, state, restarts, ends, requeued
):
    """By the program's exit code, unless the job is cancelled."""
    found, calls = shell.run(code=code, state=state, SLURM_RESTART_COUNT=restarts)
    assert found == ends, shell.err
    assert (["scontrol", "requeue", "7"] in calls) == requeued


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "data"), "--data: 'data' is a PersistentVolumeClaim, .*--volume data=/FOLDER"),
        (("--volume", "data=here", "--data", "data"), "--volume data: 'here' is not an absolute"),
        (("--runs", "/runs/../etc"), "--runs: '/runs/../etc' leads out of its folder"),
        (("--runs", "/a\n#SBATCH --uid=0"), "trainer option: .* has a line end"),
        (("--env", "X=a\nb"), "--env X: 'a\\\\nb' has a line end or another control character"),
        (("--env", "SLURM_JOB_ID=1"), "--env SLURM_JOB_ID: Slurm or the batch script sets it"),
        (("--name", "a b"), "--name: 'a b' is not a DNS label"),
        (("--name", "x\n#SBATCH --uid=0"), "--name: .* is not a DNS label"),
        (("--python", "-c"), "--python: '-c' is no program"),
        (("--replicas", "0"), "--replicas: 0 is less than 1"),
        (("--grace-s", "65536"), "--grace-s: 65536 s is more than sbatch takes"),
        (("--replicas", "2", "--min", "3"), "--min: 3 is above --replicas 2"),
        (("--nproc-per-node", "100"), "--nproc-per-node: 100 workers but only 12 lanes"),
        (("--memory", "lots"), "--memory: 'lots' is not a positive Kubernetes quantity"),
        (("-o", "json"), "-o has no meaning with --api slurm"),
    ],
)
def test_what_cannot_be_is_refused_with_its_fix(options, message):
    """The option, the rule and the fix; nothing is printed; exit code 2."""
    result = render(*FOLDERS, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize(
    ("python", "ends", "message"),
    [
        (None, 7, "No such file"),
        ("exit 126", 6, ""),
        (f'exec {sys.executable} -S -I "$@"', 7, "gptddp is not installed for"),
    ],
    ids=["absent", "cannot run", "without gptddp"],
)
def test_a_python_that_cannot_train_ends_the_job(tmp_path, python, ends, message):
    """On the first node, before any task: with the code that slurm.md names, and no requeue."""
    program = tmp_path / "python"
    if python:
        program.write_text(f"#!/bin/bash\n{python}\n")
        program.chmod(0o755)
    script = render(*FOLDERS, "--python", str(program)).stdout
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$1" = show ] && exec echo node7\ntouch requeued\n')
    scontrol.chmod(0o755)
    own = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(
        ["bash"],
        input=script,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == ends and message in done.stderr, done.stderr
    assert not (tmp_path / "requeued").exists()


def test_a_job_file_of_kubernetes_needs_the_folders_of_its_claims(tmp_path):
    """One job.toml for both: --volume says where a claim lies; what has no meaning is told."""
    file = tmp_path / "job.toml"
    file.write_text(
        '[job]\ndata = "corpus/books"\nimage = "mine:1"\nmax = 3\n'
        'toleration = "spot"\nread_only_data = true\n[train]\nsteps = 9\n'
    )
    folders = ("--volume", "corpus=/lustre/corpus/", "--volume", "runs=/lustre/runs")
    result = render("-f", str(file), *folders)
    assert result.exit_code == 0, result.stderr
    assert "--data /lustre/corpus/books --run-dir /lustre/runs/gptddp" in result.stdout
    assert "--max 3: a job on Slurm" in result.stderr
    for flag in ("--image", "--toleration", "--read-only-data"):
        assert f"{flag} has no meaning with --api slurm" in result.stderr


def test_options_of_slurm_are_refused_for_kubernetes():
    """Rather than ignored."""
    result = CliRunner().invoke(cli, ["render", "--launcher", "srun"])
    assert result.exit_code == 2 and "--launcher has no meaning here" in result.stderr


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        (EXAMPLES / name).write_text(CliRunner().invoke(cli, shlex.split(command)).stdout)
