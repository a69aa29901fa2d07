"""Checkpoints survive kills of their writer at each system call, and at any time."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.checkpoint_saver import loaded_step, state
from support.paths import SUPPORT
from support.waiting_writer import Writer

from gptddp.run.history import history, read_ledger


@pytest.fixture
def saver(spawn):
    """The process that forks savers; call it with a command for the first answer."""
    command = [sys.executable, str(SUPPORT / "checkpoint_saver.py")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    process = spawn(command, env=env, text=True, **pipes)

    def ask(**command):
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    ask.answers = process.stdout
    yield ask
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture
def fast_disk():
    """A folder in memory, where an fsync costs nothing."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_killed_at_every_system_call(fast_disk, saver):
    """After a kill at any system call of a life, the old or the new checkpoint and all other files
    are whole. The log has every committed step, and the next life is not blocked."""
    results = []
    first = fast_disk / "first"
    first.mkdir()
    assert saver(run=str(first), generation=1, step=1, crash=9999) == 0
    for point in range(1, 300):
        run = shutil.copytree(first, fast_disk / str(point))
        status = saver(run=str(run), generation=2, step=2, crash=point)
        assert status in (0, signal.SIGKILL)
        results.append(loaded_step(run))
        steps = [line["step"] for line in history(run)]
        assert steps in ([1], [1, 2]) and results[-1] in steps
        lives = [event["generation"] for event in read_ledger(run)]
        assert lives in ([1, 1], [1, 1, 2], [1, 1, 2, 2])
        assert 2 in lives or 2 not in steps  # no step is logged before its life's start
        assert saver(run=str(run), generation=3, step=3, crash=9999) == 0
        root = run / "checkpoints"
        assert loaded_step(run) == 3 and len(os.listdir(root)) == 3
        assert os.listdir(root / ".tmp") == os.listdir(root / ".trash") == []
        assert [line["step"] for line in history(run)] == [*steps, 3]
        shutil.rmtree(run)
        if status == 0:
            break
    assert status == 0 and len(results) > 30
    assert results == sorted(results) and set(results) == {1, 2}


def test_nothing_gets_its_name_before_it_is_durable(tmp_path, monkeypatch):
    """A save fsyncs every file and its directory before the rename, and the name after it: a loss
    of power at any time is like a kill."""
    done: list[tuple[str, str]] = []

    def noting(call, real):
        def note(target, *args, **kwargs):
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
            result = real(target, *args, **kwargs)
            done.append((call, os.path.relpath(path, tmp_path / "checkpoints")))
            return result

        return note

    for call in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, call, noting(call, getattr(os, call)))
    assert Writer(tmp_path, 1).save(1, state(1), {}).error is None
    monkeypatch.undo()
    renamed = next(n for n, (call, _) in enumerate(done) if call == "rename")
    work = done[renamed][1]
    for file in ("shard-0-of-1.bin", "manifest.json"):
        assert ("write", f"{work}/{file}") in done[:renamed]
        last = max(n for n, it in enumerate(done) if it == ("write", f"{work}/{file}"))
        assert ("fsync", f"{work}/{file}") in done[last:renamed]
    assert done[renamed - 1] == ("fsync", work)
    assert done[renamed + 1 : renamed + 3] == [("fsync", "."), ("fsync", "..")]


def test_killed_at_random_moments(tmp_path, saver):
    """If a process saves all the time and is killed, each committed step can be loaded."""
    rng, step = random.Random(1), 0
    for generation in range(1, 9):
        pid = saver(run=str(tmp_path), generation=generation, step=step + 1, forever=True)
        first = int(saver.answers.readline())
        time.sleep(rng.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        answers = [first]
        while (answer := saver.answers.readline().strip()) != "gone":
            answers.append(int(answer))
        assert answers == list(range(step + 1, step + 1 + len(answers)))
        step = loaded_step(tmp_path)
        assert step in (answers[-1], answers[-1] + 1)
    assert step >= 8
