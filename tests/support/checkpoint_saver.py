"""Saves checkpoints in processes that are killed. As a script it reads JSON commands, one a line.

It imports torch once and forks a child for each command, so that a kill costs milliseconds.
{"run", "generation", "step", "crash": n}: a life does that step and saves it, with SIGKILL at its
n-th system call (half of a write is done); the answer is the child's wait status.
{"run", "generation", "step", "forever": true}: the answer is the child's pid; the child saves step
after step, and prints each committed step, until it is killed.

Tests of the writer use its states and its check of a loaded one too.
"""

import json
import os
import sys
from pathlib import Path

import torch
from support.crashing import crash_at
from support.waiting_writer import Writer

from gptddp.checkpoint import retention
from gptddp.checkpoint.load import load_newest
from gptddp.run.history import Ledger, RunLog

NBYTES = 2_000_000


def state(step, nbytes=4000):
    """A tensor that depends on the step alone."""
    return {"x": torch.full((nbytes // 4,), float(step))}


def loaded_step(run_dir):
    """The step of the newest checkpoint, whose every element must have that value."""
    loaded = load_newest(run_dir)
    assert (loaded.tensors["x"] == loaded.step).all()
    return loaded.step


def life(run, generation, step, crash):
    """The writes of rank 0 in one life: events, log, checkpoint."""
    run, ledger = Path(run), Ledger(run)
    log = RunLog(run, generation, ledger)
    crash_at(crash)
    retention.discard_unfinished(run)
    ledger.event("start", generation)
    log.append({"step": step})
    assert log.settle(60)
    writer = Writer(run, generation, keep=1, before_commit=log.sync)
    saved = writer.save(step, state(step, NBYTES), {})
    ledger.event("stop", generation)
    log.sync()
    return saved.error


def child(run, generation, step, crash=0, forever=False):
    if crash:
        return life(run, generation, step, crash)
    writer = Writer(run, generation, keep=1 + forever)
    while True:
        saved = writer.save(step, state(step, NBYTES), {"step": step})
        if not forever:
            return saved.error
        print(saved.error or step, flush=True)
        step += 1


def main():
    torch.set_num_threads(1)
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(1 if child(**command) else 0)
        if command.get("forever"):
            print(pid, flush=True)
            os.waitpid(pid, 0)
            print("gone", flush=True)
        else:
            print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
