"""A process that hangs outside of collectives ends itself, or its launcher kills it."""

import multiprocessing
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.waiting import until

from gptddp.distributed import connect, pulse
from gptddp.launch import worker as launch_worker
from gptddp.launch.worker import Worker

SETUP = """
import atexit, itertools, os, sys, time
from gptddp.distributed import pulse, storage
from gptddp.distributed.process import write_stack_on_signal
write_stack_on_signal()
pulse.POLL_S, pulse.MARGIN_S, pulse.LAST_WORDS_S = 0.05, 0.3, 0.5
def beats(seconds):
    for _ in range(int(seconds * 50)):
        time.sleep(0.02)
        pulse.beat(7)
def words(where):
    print(where, flush=True)
    return 9
def here():
    print("here", flush=True)
"""
HANG = """
with pulse.Listening(words):
    pulse.allow(0.2)
    {}
    here()
    {}
print("end", flush=True)
"""
LIMIT_S = 0.5


@pytest.fixture
def process(spawn, tmp_path):
    """process(before, hang): a process that prints `here`, then hangs; its folder is tmp_path."""

    def begin(before: str, hang: str, **options):
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "SLURM_PROCID")}
        env = clean | {"GPTDDP_VERDICT": str(tmp_path / "verdict.json"), "PYTHONUNBUFFERED": "1"}
        options = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) | options
        code = SETUP + HANG.format(before, hang)
        return spawn([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, **options)

    return begin


def test_a_hang_is_reported_and_ends_the_process(process):
    """A hang in Python, or in C without the GIL, ends with the exit code of the last words."""
    it = process("pass", "time.sleep(60)")
    out, err = it.communicate(timeout=30)
    assert it.returncode == 9
    assert out.startswith(b"here\nhangs in <module> (<string>:")
    assert b"[rank 0] no progress for " in err and b"hangs in <module>" in err


def test_hanging_last_words_do_not_block_the_end(process):
    """If a hanging device blocks the last words, the process still ends."""
    it = process("words.__code__ = (lambda where: time.sleep(60)).__code__", "time.sleep(60)")
    it.communicate(timeout=30)
    assert it.returncode == pulse.HUNG


def test_a_process_with_progress_continues(process):
    """A process that beats for three times the limit is not reported, also not at its end."""
    it = process(f"beats({3 * LIMIT_S})", "pass")
    out, err = it.communicate(timeout=30)
    assert (it.returncode, out, err) == (0, b"here\nend\n", b"")


def test_a_machine_that_is_suspended_is_no_hang(process):
    """A process that was stopped for longer than the limit runs on after SIGCONT."""
    it = process("pass", "beats(0.5)")
    assert it.stdout.readline() == b"here\n"
    it.send_signal(signal.SIGSTOP)
    time.sleep(2 * LIMIT_S)
    it.send_signal(signal.SIGCONT)
    assert it.communicate(timeout=30) == (b"end\n", b"") and it.returncode == 0


def test_only_the_running_time_of_the_listener_counts(monkeypatch):
    """A pause of an hour counts as one second; a beat, or another process, resets the count."""
    clock = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: clock[0])
    silence = pulse.Silence()
    assert silence.listen(1, 5) == 0.0
    for clock[0], expected in ((0.5, 0.5), (1.0, 1.0), (3600.0, 2.0), (3600.5, 2.5)):
        assert silence.listen(1, 5) == expected
    assert silence.listen(1, 6) == 0.0
    clock[0] += 0.5
    assert silence.listen(2, 6) == 0.0


def test_at_a_terminal_a_hang_is_only_reported(process):
    """At a terminal no launcher restarts the process, and it may be at a breakpoint."""
    terminal, end = pty.openpty()
    try:
        it = process("pass", f"time.sleep({2.5 * LIMIT_S})", stdin=end)
        out, err = it.communicate(timeout=30)
    finally:
        os.close(terminal)
        os.close(end)
    assert (it.returncode, out) == (0, b"here\nend\n")
    assert err.count(b"no progress for") == 1 and err.endswith(b"it continues if it can\n")


@pytest.fixture
def impatient(monkeypatch):
    """The launcher's side, with limits as short as those of the processes in these tests."""
    monkeypatch.setattr(launch_worker, "LATER_S", 0.3)
    monkeypatch.setattr(pulse, "POLL_S", 0.05)


@pytest.fixture
def watched(impatient, monkeypatch, tmp_path):
    """watched(process): its launcher's Worker, with the printed lines and counted errors."""

    def begin(process):
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [process])
        said, counted = [], []
        it = Worker(tmp_path, 0, lambda: "rank 3", said.append, lambda *how: counted.append(how))
        return it, said, counted

    return begin


@pytest.mark.parametrize("how", ["sum(itertools.repeat(0))", "os.kill(os.getpid(), 19)"])
def test_the_launcher_kills_a_worker_with_all_threads_stopped(process, watched, how):
    """A worker that holds the GIL or is stopped is killed once, after the limit, with one line.
    A call that holds the GIL counts as an error, with its step; a stop from outside does not.
    """
    it = process("beats(0.1)", how)
    worker, said, counted = watched(it)
    assert it.stdout.readline() == b"here\n"
    begin, hung = time.monotonic(), []
    until(lambda: hung.append(worker.look()) or it.poll())
    assert it.returncode == -signal.SIGKILL and time.monotonic() - begin >= LIMIT_S
    stopped = "19" in how
    what = "rank 3 is stopped (SIGSTOP)" if stopped else "rank 3 hangs in <module> (<string>:"
    (line,) = said
    assert line.startswith("no progress for ") and what in line and line.endswith(": it is killed")
    (told,) = filter(None, hung)  # the others
    assert f"rank 3{told.removeprefix('it')}: it is killed" in line
    assert [step for _, step in counted] == ([] if stopped else [7])
    assert stopped or re.fullmatch(r"it hangs in <module> \(<string>:\d+\)", counted[0][0])


def test_a_missing_or_torn_pulse_is_no_hang(silent, watched, tmp_path):
    """Before the worker has a pulse, the launcher reports nothing."""
    worker, said, _ = watched(silent)
    worker.look()
    pulse.path_of(tmp_path, 0).write_bytes(b"torn")
    worker.look()
    assert not said and silent.poll() is None


NEVER = "import time; print('here', flush=True); time.sleep(60)"


@pytest.fixture
def silent(spawn, impatient, monkeypatch, tmp_path):
    """A worker that hangs before its trainer has begun, and its launcher's side."""
    monkeypatch.setattr(connect, "FIRST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(pulse, "MARGIN_S", 0.1)
    it = spawn([sys.executable, "-c", NEVER], stdout=subprocess.PIPE)
    assert it.stdout.readline() == b"here\n"
    return it


def test_the_launcher_kills_a_worker_that_never_beats(silent, tmp_path, watched):
    """The worker is killed after a while; no error counts, and no older stack is printed."""
    (tmp_path / "stack.0").write_text("process 1\n  File 'a.py', line 7 in old\n")
    worker, said, counted = watched(silent)
    begin = time.monotonic()
    until(lambda: (worker.look(), silent.poll())[1])
    assert time.monotonic() - begin > 0.6 and not counted
    (line,) = said
    assert line.startswith("no progress for 1 s: rank 3 hangs before its trainer has begun")


def test_a_worker_shares_its_pulse_as_soon_as_the_disk_has_room(process, tmp_path, impatient):
    """A worker that cannot write its pulse at the start tries again."""
    (tmp_path / "pulse.0").mkdir()
    (tmp_path / "pulse.0/file").touch()
    it = process("pass", "beats(60)")
    assert it.stdout.readline() == b"here\n"
    assert pulse.read(tmp_path / "pulse.0") is None
    shutil.rmtree(tmp_path / "pulse.0")

    def its() -> pulse.Pulse | None:
        found = pulse.read(tmp_path / "pulse.0")
        return found if found and found.pid == it.pid else None

    assert until(its).limit_s == LIMIT_S
    it.kill()


def test_the_launcher_ends_a_hang_at_the_exit(process, watched):
    """A hang at the interpreter's exit, after the training, is no error of a step."""
    it = process("pass", "atexit.register(time.sleep, 60)")
    assert it.stdout.readline() == b"here\n" and it.stdout.readline() == b"end\n"
    worker, said, counted = watched(it)
    until(lambda: (worker.look(), it.poll())[1])
    assert "it is killed" in said[0] and not counted  # not an error of a step


STORAGE = """
storage.FIRST_LINE_S, storage.NEXT_LINE_S, storage.MOST_S = 0.2, 0.4, {}
import logging
logging.basicConfig(format="%(message)s", level=logging.INFO)
reading = ["/data/0.parquet, row group 3"]
"""


def test_a_wait_for_the_storage_is_no_hang(process, watched):
    """A wait may exceed the limit, with a line at intervals; the launcher kills nothing."""
    before = STORAGE.format(3600).replace("\n", "\n    ")
    it = process(before, "with storage.waiting(lambda: reading[0]): time.sleep(1.0)")
    worker, said, _ = watched(it)
    while it.poll() is None:
        worker.look()
        time.sleep(0.02)
    out, err = it.communicate()
    assert not said
    assert (it.returncode, out) == (0, b"here\nend\n")
    lines = err.decode().splitlines()
    assert 1 <= len(lines) <= 4, err
    wanted = "[rank 0] waiting for the storage: reading /data/0.parquet, row group 3 ("
    assert all(line.startswith(wanted) and line.endswith(" s so far)") for line in lines)


@pytest.mark.parametrize(("what", "limit_s"), [("''", 3600), ("reading[0]", 0.1)])
def test_other_waits_and_too_long_waits_are_hangs(process, what, limit_s):
    """A wait without a file counts as a hang; so does a file that takes for ever."""
    before = STORAGE.format(limit_s).replace("\n", "\n    ")
    it = process(before, f"with storage.waiting(lambda: {what}): time.sleep(60)")
    _, err = it.communicate(timeout=30)
    assert it.returncode == 9 and b"no progress for" in err


def test_a_beat_costs_almost_nothing():
    """A step has about five beats: even at 20 us each they take a ten-thousandth of a second."""
    begin = time.thread_time()
    for _ in range(10_000):
        pulse.beat(3)
    assert time.thread_time() - begin < 10_000 * 20e-6
