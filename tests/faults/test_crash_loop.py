"""A rank fails with an error of the trainer: it starts again, but not forever (faults 18, 19)."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.faulty_jobs import long
from support.same_bits import check_same_bits
from support.toy import SMALL
from support.trainer_patches import patched

from gptddp import train
from gptddp.run.history import history, read_ledger

STEPS = 24
# A test defines `broken(step, rank)`; steps count from 0 here.
IN_A_STEP = """
from torch.optim.optimizer import register_optimizer_step_pre_hook
_forward_backward = forward_backward
def fail(*_):
    raise ValueError("the test's own error")
def forward_backward(ddp, batch, targets, step, *rest):
    if broken(step, rest[1].rank):
        {harm}
    return _forward_backward(ddp, batch, targets, step, *rest)
"""
HARM = {
    "forward": "fail()",
    "backward": "next(ddp.parameters()).register_hook(fail)",
    "optimizer": "register_optimizer_step_pre_hook(fail)",
    "segfault": "os.kill(os.getpid(), signal.SIGSEGV)",
}
PLACES = {place: IN_A_STEP.format(harm=harm) for place, harm in HARM.items()}
PLACES["start"] = """
def settle_buckets(*args):
    if broken(0, int(os.environ["RANK"])):
        raise ValueError("the test's own error")
"""


def job(folder: Path, corpus: Path, code: str) -> tuple[int, str, Path]:
    """Run a local job of two pods with `code` in its trainer; exit code, stderr and its folder."""
    env = os.environ | patched(folder / "patch", code) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "from gptddp.k8s import main; main()", "submit"]
    command += ["--replicas", "2", "--local", "--local-dir", str(folder / "local")]
    command += ["--volume", f"data={corpus}", "--", *SMALL, "--steps", str(STEPS)]
    command += ["--eval-every", "1000"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stderr, folder / "local"


@pytest.mark.parametrize(
    "place",
    ["forward", *(pytest.param(it, marks=long) for it in ("optimizer", "segfault")), "start"],
)
def test_a_repeated_error_ends_the_job(corpus, tmp_path, place):
    """Every rank fails at this place in each life: exit code 5, and stderr has the error."""
    at = "== 10" if place in ("forward", "segfault") else ">= 0"
    code = f"def broken(step, rank): return step {at}\n" + PLACES[place]
    exit_code, err, folder = job(tmp_path, corpus, code)
    assert exit_code == 100
    what = "its process died of SIGSEGV" if place == "segfault" else "the test's own error"
    assert re.search(r"gptddp-worker-\d exited with 5", err) and "closed by peer" not in err
    assert "failed 3 times with an error of the trainer" in err and what in err
    status = json.loads((folder / "jobs/gptddp/status.json").read_text())
    assert status["conditions"][-1]["type"] == "Failed"
    assert 5 in [pod["exitCode"] for pod in status["pods"].values()]
    run = folder / "volumes/runs/gptddp"
    if place == "forward":
        assert [line["step"] for line in history(run)] == list(range(1, 11))
        assert {path.name.partition(".")[0] for path in (run / "faults").iterdir()} == {"11"}


@pytest.mark.usefixtures("train_here")
def test_an_error_that_happens_once_costs_no_step(corpus, tmp_path):
    """A backward hook fails on one rank: the other continues, exit code 0, and no bit is wrong."""
    code = "def broken(step, rank): return step == 10 and rank == 1\n"
    exit_code, err, folder = job(tmp_path, corpus, code + PLACES["backward"])
    assert exit_code == 0, err
    run, whole = folder / "volumes/runs/gptddp", tmp_path / "whole"
    assert len(list((run / "faults").iterdir())) == 1
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(whole), "--steps", str(STEPS)]
    assert train.main([*flags, "--eval-every", "1000"]) == 0
    check_same_bits(run, whole)
    starts = [event for event in read_ledger(run) if event["event"] == "start"]
    assert [(start["step"], start["redo"]) for start in starts] == [(0, 0)]
