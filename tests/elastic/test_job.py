"""A whole local job, the real entrypoint in four pods: killed in every way, it is the same run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked import train
from support.processes import workers
from support.same_bits import check_same_lines
from support.toy import SMALL

from gptddp.run.history import history, read_ledger

STEPS = 400


class Job:
    """`gptddp-k8s submit --replicas 4 --local` and its files."""

    def __init__(self, spawn: Callable, folder: Path, corpus: Path, *flags: str):
        self.folder, self.run = folder, folder / "volumes/runs/gptddp"
        command = [sys.executable, "-c", "from gptddp.k8s import main; main()", "submit"]
        command += ["--replicas", "4", "--local", "--local-dir", str(folder)]
        command += ["--volume", f"data={corpus}", "--", *SMALL, *flags]
        self.process = spawn(command, stderr=subprocess.PIPE, text=True)

    def pid(self, worker: int) -> int:
        """The main process of a pod, once it runs."""
        status = json.loads((self.folder / "jobs/gptddp/status.json").read_text())
        return status["pods"][f"gptddp-worker-{worker}"]["pid"]

    def reach(self, step: int, world_size: int = 4, timeout_s: float = 90) -> None:
        """Wait until a step has been done, by a world of that size, that is beyond `step`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            lines = list(history(self.run)) if self.run.exists() else []
            if lines and lines[-1]["step"] > step and lines[-1]["world_size"] == world_size:
                return
            time.sleep(0.05)
        logs = (self.folder / "jobs/gptddp/logs").glob("*")
        raise AssertionError("\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs))

    def last_step(self) -> int:
        return max(line["step"] for line in history(self.run))

    def finish(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


@pytest.fixture
def job(corpus, tmp_path, spawn):
    """Start a job: job(*trainer flags). Its reaper ends the pods when it is killed."""
    return lambda *flags: Job(spawn, tmp_path / "local", corpus, *flags)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> list[dict]:
    """The same configuration in one process that nobody disturbs."""
    run = tmp_path_factory.mktemp("undisturbed")
    flags = ["--run-dir", str(run), "--steps", str(STEPS), "--eval-every", "1000"]
    train(1, *SMALL, "--data", str(corpus), *flags)
    return list(history(run))


def worker_of(pod: int) -> int:
    """The process that trains: beside it there may be one that saves, which has less memory."""
    return max(workers(pod), key=lambda p: int(Path(f"/proc/{p}/statm").read_text().split()[1]))


def test_a_job_that_is_killed_in_every_way_is_the_same_run(job, undisturbed):
    """A pod, worker-0 twice, one worker: exit 0, the undisturbed run, and no step done twice.

    No checkpoint is written before the end: the state lives in the memory of whoever survives. Nor
    do they wait for the lease of the pod that is lost, as if it were on another machine. The ledger
    names the rank and the pod that each life has lost.
    """
    it = job("--steps", str(STEPS), "--eval-every", "1000", "--checkpoint-every", "3600")
    it.reach(10)
    os.killpg(it.pid(2), signal.SIGKILL)
    it.reach(it.last_step() + 10)
    lease = it.run / "lease.json"
    lease.write_text(json.dumps(json.loads(lease.read_text()) | {"space": "another machine"}))
    os.killpg(it.pid(0), signal.SIGKILL)
    it.reach(it.last_step() + 10)
    os.kill(it.pid(0), signal.SIGKILL)  # the launcher alone: its children must go with it
    it.reach(it.last_step() + 10)
    os.kill(worker_of(it.pid(3)), signal.SIGKILL)
    code, err = it.finish()
    assert code == 0, err
    lines = list(history(it.run))
    check_same_lines(lines, undisturbed)
    ends = [event["cause"] for event in read_ledger(it.run) if event["event"] == "end"]
    named = [re.findall(r"lost: rank (\d) \(gptddp-worker-(\d)\), whose", cause) for cause in ends]
    assert named == [[("2", "2")], [("0", "0")], [("0", "0")], [("3", "3")]], ends
    assert "whose process died " in ends[-1]
    assert all("pod was started anew" in e or "pod is not there now" in e for e in ends[:-1]), ends
    starts = [event for event in read_ledger(it.run) if event["event"] == "start"]
    assert len(starts) >= 5
    assert {start["source"] for start in starts[1:]} == {"memory"}
    assert [start["redo"] for start in starts] == [0] * len(starts)
    logs = (it.folder / "jobs/gptddp/logs").glob("*")
    assert not any("to see whether" in log.read_text() for log in logs)


def test_ctrl_c_commits_and_the_same_command_continues(job, undisturbed):
    """Exit code 130 with a checkpoint; submitted again the run goes on from there."""
    flags = ("--steps", "150", "--eval-every", "1000")
    it = job(*flags)
    it.reach(10)
    it.process.send_signal(signal.SIGINT)
    code, err = it.finish()
    assert code == 130, err
    done = it.last_step()
    assert list((it.run / "checkpoints").glob(f"step-{done:012}.*"))

    again = job(*flags)
    code, err = again.finish()
    assert code == 0, err
    lines = list(history(it.run))
    assert [line["chain_fp"] for line in lines] == [it["chain_fp"] for it in undisturbed[:150]]
    starts = [event for event in read_ledger(it.run) if event["event"] == "start"]
    assert starts[-1]["redo"] == 0 and starts[-1]["step"] == done
