"""Real torchrun agents on gloo: any number of processes has the same run."""

import json
import os
import signal
import subprocess
import sys

from support.forked import TRAIN, ended, ranks, train
from support.same_bits import check_same_bits
from support.toy import SMALL
from support.waiting import until

from gptddp.run.history import history

STEPS = 12


def test_a_stopped_and_resumed_run_logs_the_same_losses_bit_for_bit(corpus, tmp_path, spawn):
    """SIGTERM for torchrun in the middle commits a checkpoint; after the next life the run has the
    bits of one process."""
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "3", "-m", "gptddp.train", *flags, "--steps", str(STEPS)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = spawn(command, env=env, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run/log.1.jsonl"
    until(lambda: log.read_text().count("\n") >= 3, poll_s=0.002)
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=120)[1]
    done = len(list(history(tmp_path / "run")))
    assert done < STEPS, "the run ended before the signal came"
    assert process.returncode == 1, err  # torchrun has one code for every failure
    assert f"stopped after step {done}: checkpoint step-{done:012}.1 is saved" in err

    train(3, *flags)
    alone = tmp_path / "alone"
    train(1, *SMALL, "--data", str(corpus), "--run-dir", str(alone), "--steps", str(STEPS))
    check_same_bits(tmp_path / "run", alone)
    assert json.loads((tmp_path / "run/finished.json").read_text())["step"] == STEPS


# In the fourth step the gradients of lane 6 are a million times as large, in the fifth no longer.
# stderr has the repeated steps, without the two passes of `settle_buckets` before the first.
OVERFLOW = f"""
import sys
from gptddp.model.sums import ExactSums
begin, add, finish, step = ExactSums.begin, ExactSums._add, ExactSums.finish, -2

def counted(self, targets):
    global step
    step += 1
    return begin(self, targets)

def large(self, numbers):
    if (step, self._slot) == (4, 6):
        for i in numbers:
            self._params[i].grad.mul_(2.0**20)
    add(self, numbers)

def told(self):
    if (total := finish(self)) is None and step > 0:
        print(f"step {{step}} is done again", file=sys.stderr, flush=True)
    return total

ExactSums.begin, ExactSums._add, ExactSums.finish = counted, large, told
{TRAIN}
"""


def test_a_step_whose_sums_overflow_on_one_rank_is_repeated_by_all(corpus, tmp_path):
    """All ranks repeat the fourth step, in which lane 6 of rank 1 overflows the grids, and the
    fifth, in which the grids are too coarse. The run has the bits of one process."""
    flags = [*SMALL, "--data", str(corpus), "--steps", "8", "--eval-every", "4", "--run-dir"]
    for world in (1, 2):
        for said in train(world, *flags, str(tmp_path / str(world)), code=OVERFLOW):
            told = [line for line in said.splitlines() if "done again" in line]
            assert told == [f"step {step} is done again" for step in (1, 4, 5)]
    check_same_bits(tmp_path / "2", tmp_path / "1")


def test_a_mistake_is_reported_once_with_any_number_of_ranks(corpus, tmp_path):
    """More workers than lanes give one line from rank 0 and exit code 2, and no file remains."""
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "2"]
    err = "".join(ended(ranks(3, *flags, "--lanes", "2", "--batch", "8"), 2))
    assert err.count("3 workers but only 2 lanes") == 1
    assert not list((tmp_path / "run").glob("*"))
