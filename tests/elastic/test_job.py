"""A whole local job, the real entrypoint in two pods: the same run after stops."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forked import train
from support.same_bits import check_same_lines
from support.toy import SMALL

from gptddp.run.history import history, read_ledger

FLAGS = ("--final-lr", "1", "--eval-every", "100000", "--checkpoint-every", "3600")
ENDLESS = ("--steps", "1000000")
END_S = 9.0  # ten times a usual end; an end that waits for a lost message takes longer


class Job:
    """`gptddp-k8s submit --replicas 2 --local` and its files."""

    def __init__(self, spawn: Callable, folder: Path, corpus: Path) -> None:
        self.folder, self.run = folder, folder / "volumes/runs/gptddp"
        command = [sys.executable, "-c", "from gptddp.k8s import main; main()", "submit"]
        command += ["--replicas", "2", "--local", "--local-dir", str(folder)]
        command += ["--volume", f"data={corpus}", "--", *SMALL, *FLAGS, *ENDLESS]
        self.process = spawn(command, stderr=subprocess.PIPE, text=True)

    def reach(self, step: int) -> None:
        """Wait until both pods have done a step after `step`."""
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()
            lines = list(history(self.run)) if self.run.exists() else []
            if lines and lines[-1]["step"] > step and lines[-1]["world_size"] == 2:
                return
            time.sleep(0.05)
        logs = (self.folder / "jobs/gptddp/logs").glob("*")
        raise AssertionError("\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs))

    def interrupt(self) -> int:
        """Send Ctrl-C; return the last step, which is in a checkpoint."""
        self.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        self.finish(130)
        assert time.monotonic() - began < END_S
        done = self.last_step()
        assert list((self.run / "checkpoints").glob(f"step-{done:012}.*"))
        return done

    def last_step(self) -> int:
        return max((line["step"] for line in history(self.run)), default=0)

    def finish(self, code: int) -> None:
        _, err = self.process.communicate(timeout=120)
        assert self.process.returncode == code, err


@pytest.fixture
def job(corpus, tmp_path, spawn):
    """Start a job: job(). Its reaper ends the pods when it is killed."""
    return lambda: Job(spawn, tmp_path / "local", corpus)


def test_ctrl_c_commits_and_the_same_command_continues(job, corpus, tmp_path):
    """Ctrl-C gives exit code 130 and a checkpoint at once. Submitted again, the run equals an
    undisturbed one, and no step is repeated."""
    it = job()
    it.reach(8)
    done = it.interrupt()
    it = job()
    it.reach(done)
    last = it.interrupt()

    alone = tmp_path / "alone"
    flags = (*SMALL, *FLAGS, "--steps", str(last), "--data", str(corpus), "--run-dir", str(alone))
    train(1, *flags)
    check_same_lines(list(history(it.run)), list(history(alone)))
    events = read_ledger(it.run)
    starts = [event for event in events if event["event"] == "start"]
    assert [start["redo"] for start in starts] == [0] * len(starts)
    assert starts[-1]["step"] == done
    logs = (it.folder / "jobs/gptddp/logs").glob("*")
    assert not any("to see whether" in log.read_text() for log in logs)
