"""Saves checkpoints in processes that are killed: `saver.py` reads one JSON command a line.

Imports torch once and forks a child for each command, so that a kill costs milliseconds.
{"run", "generation", "step", "crash": n}: save that step, SIGKILL itself at the n-th system
call (a write is done by half); answers with the child's wait status.
{"run", "generation", "step", "forever": true}: answers with the child's pid; the child saves step
after step, and answers with each that is committed, until it is killed.
"""

import json
import os
import signal
import sys

import torch

from gptddp.writer import Writer

CALLS = ["mkdir", "open", "write", "fsync", "close", "rename", "replace", "unlink", "rmdir"]


def state(step):
    """2 MB that depend on the step alone."""
    return {"x": torch.full((500_000,), float(step)), "step": torch.tensor(step)}


def crash_at(number):
    """Kill this process at its n-th system call from now on."""

    def patch(call):
        original = getattr(os, call)

        def counted(*args, **kwargs):
            nonlocal number
            number -= 1
            if number == 0:
                if call == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, call, counted)

    for call in CALLS:
        patch(call)


def child(run, generation, step, crash=0, forever=False):
    writer = Writer(run, generation, keep=1 + forever)
    if crash:
        crash_at(crash)
    while True:
        saved = writer.save(step, state(step), {"step": step})
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
