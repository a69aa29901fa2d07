"""The scripts of examples/slurm, edited as a user does, on a real Slurm of one node.

Whatever happens to a job, its run ends with the bits of an undisturbed run of one process.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from slurm.one_node import OneNode
from support.paths import ROOT
from support.processes import ending, workers
from support.toy import SMALL
from support.waiting import until

from gptddp.cli import cli as gptddp
from gptddp.run.history import last_step, read_ledger

STEPS, MID = 160, 30  # steps of a run, and the step at which it is disturbed
FLAGS = [*SMALL, "--steps", str(STEPS), "--checkpoint-every", "1", "--eval-every", "80"]


@pytest.fixture(scope="session")
def node():
    """One Slurm for all tests, in a folder with a short name, as paths of sockets are limited."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    one = OneNode(folder)
    yield one
    one.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def undisturbed(corpus, tmp_path_factory):
    """An undisturbed run of one process with one thread."""
    run = tmp_path_factory.mktemp("alone") / "run"
    command = [sys.executable, "-m", "gptddp.train", *FLAGS, "--data", corpus, "--run-dir", run]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return run


def edited(name: str, folder: Path, **lines: str) -> str:
    """The example of this name with other values in the lines that a user edits."""
    text = (ROOT / f"examples/slurm/train-{name}.sbatch").read_text()
    for key, value in lines.items():
        text, found = re.subn(rf"^{key}=.*$", f"{key}={value}", text, flags=re.M)
        assert found == 1, key
    (folder / "job.sbatch").write_text(text)
    return "job.sbatch"


class Job:
    """A job on the node; its output and the run are in the folder."""

    def __init__(self, node: OneNode, folder: Path, *words: str) -> None:
        self.node, self.folder, self.run = node, folder, folder / "run"
        path = f"{Path(sys.executable).parent}:{node.environment['PATH']}"  # an active venv
        environment = {**node.environment, "PATH": path}
        command = ["sbatch", "--parsable", f"--output={folder}/%x-%j.out", *words]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=True
        )
        self.id = done.stdout.strip()

    def facts(self) -> dict[str, str]:
        """JobState, ExitCode, Restarts and more."""
        text = self.node.output("scontrol", "--oneliner", "show", "job", self.id)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def log(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob("*.out"))

    def reach(self, step: int) -> None:
        """Wait until a step is logged."""
        self.until(lambda: self.run.exists() and last_step(self.run) >= step)

    def end(self) -> dict[str, str]:
        """Wait for the end of the job, over its requeues."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.until(lambda: self.facts()["JobState"] in ended)
        return self.facts()

    def until(self, holds) -> None:
        """Wait until `holds()` is true; three minutes are enough on a busy machine too."""
        until(holds, "it", 180, poll_s=0.2, why=lambda: f"{self.facts()}\n{self.log()}")

    def process(self, name: str, value: str, program: str) -> int:
        """The id of the job's process that has this variable and runs this module.

        It is the oldest such process, as its children have both too.
        """
        found = []
        for proc in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                env = (proc / "environ").read_bytes().split(b"\0")
                command = (proc / "cmdline").read_bytes().split(b"\0")
                wanted = {f"SLURM_JOB_ID={self.id}".encode(), f"{name}={value}".encode()}
                if wanted <= set(env) and command[1:3] == [b"-m", program.encode()]:
                    found.append(int(proc.name))
        return min(found)


@pytest.fixture
def submit(node, corpus, tmp_path):
    """submit(example, ranks, *options of sbatch): a job of so many ranks on the one node."""

    def begin(example: str, ranks: int, *options: str, flags=FLAGS) -> Job:
        lines = {"data": corpus, "run": tmp_path / "run", "python": sys.executable}
        lines |= {"options": f"({shlex.join(flags)})"}
        if example == "torchrun":
            lines |= {"workers": ranks}
            size = ["--ntasks-per-node=1", f"--cpus-per-task={ranks}"]
        else:
            size = [f"--ntasks-per-node={ranks}", "--cpus-per-task=1"]
        size += ["--nodes=1", "--mem=3G", "--gres=none"]
        return Job(node, tmp_path, *size, *options, edited(example, tmp_path, **lines))

    yield from ending(begin, lambda job: node.output("scancel", job.id))


def assert_same_bits(run: Path, undisturbed: Path) -> None:
    """Assert with `gptddp fingerprints` that all steps have the same rows, losses and states."""
    said = CliRunner().invoke(gptddp, ["fingerprints", str(run), str(undisturbed)])
    assert said.exit_code == 0, said.output
    assert f"same: {STEPS} steps" in said.output and "state_fp" in said.output, said.output


def stops(run: Path) -> list[dict]:
    """The ledger's stops by a signal, each of which has saved a checkpoint."""
    return [event for event in read_ledger(run) if event.get("cause") == "stopped"]


def test_a_killed_rank_costs_a_requeue_and_no_bit(submit, undisturbed):
    """With srun the other three of four tasks end, and the script requeues the job."""
    job = submit("srun", 4)
    job.reach(MID)
    os.kill(job.process("SLURM_PROCID", "2", "gptddp.train"), signal.SIGKILL)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert_same_bits(job.run, undisturbed)


def test_a_cancelled_job_saves_and_a_job_of_other_ranks_continues(submit, undisturbed):
    """scancel ends a job at a checkpoint, with no requeue; a job of two tasks continues the run."""
    job = submit("srun", 3)
    job.reach(MID)
    job.node.output("scancel", job.id)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), job.log()
    (stop,) = stops(job.run)
    assert stop["step"] == last_step(job.run) < STEPS
    other = submit("srun", 2)
    assert other.end()["JobState"] == "COMPLETED", other.log()
    assert f"step {stop['step']}" in other.log()
    assert_same_bits(other.run, undisturbed)


def test_a_requeued_launcher_continues_and_a_killed_worker_needs_no_requeue(submit, undisturbed):
    """With torchrun the run survives `scontrol requeue`, and SIGKILL for one of three workers."""
    job = submit("torchrun", 3)
    job.reach(MID)
    job.node.output("scontrol", "requeue", job.id)
    job.until(lambda: stops(job.run))
    job.reach(last_step(job.run) + MID)
    launcher = job.process("SLURM_PROCID", "0", "gptddp.launch")
    os.kill(workers(launcher)[-1], signal.SIGKILL)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert_same_bits(job.run, undisturbed)


def test_a_preempted_job_saves_and_continues(submit, undisturbed):
    """A job of higher priority takes the node; the other saves, is requeued, and continues."""
    job = submit("srun", 2)
    job.reach(MID)
    short = ["sbatch", "--partition=high", "--ntasks=4", "--output=/dev/null", "--wrap=sleep 1"]
    job.node.output(*short)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log()
    (stop,) = stops(job.run)
    assert 0 < stop["step"] < STEPS and "exit code 143: the job is requeued" in job.log()
    assert_same_bits(job.run, undisturbed)


@pytest.mark.parametrize("example", ["srun", "torchrun"])
def test_a_job_at_its_time_limit_saves_and_continues(submit, undisturbed, example):
    """SIGTERM to the script alone, as from Slurm, saves and requeues, even with --export=NONE."""
    job = submit(example, 2, "--export=NONE")
    job.reach(MID)
    job.node.output("scancel", "--batch", "--signal=TERM", job.id)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert len(stops(job.run)) == 1
    assert_same_bits(job.run, undisturbed)


@pytest.mark.parametrize("example", ["srun", "torchrun"])
def test_a_permanent_error_ends_the_job(submit, example):
    """The job ends with the trainer's exit code, and is not requeued."""
    job = submit(example, 2, flags=["--stepz", "4"])
    facts = job.end()
    assert [facts[key] for key in ("JobState", "ExitCode", "Restarts")] == ["FAILED", "2:0", "0"]


def test_the_example_of_digits_is_one_run_of_all_tasks(node, tmp_path):
    """In examples/digits.sbatch two tasks are ranks of one run, which continues after a requeue."""
    flags = ["--epochs", "2", "--save-every", "5", "--folder", str(tmp_path / "run")]
    script = str(ROOT / "examples/digits.sbatch")
    job = Job(node, tmp_path, "--nodes=1", f"--chdir={ROOT}", script, *flags)
    job.until((job.run / "snapshot.pt").exists)
    node.output("scontrol", "requeue", job.id)
    facts = job.end()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), job.log()
    assert "2 processes, gloo on cpu" in job.log() and "continues in epoch" in job.log()
    rows = (job.run / "results.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"]
