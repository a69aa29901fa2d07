"""A process that hangs where no collective would notice: alone, and as its launcher sees it."""

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
    """process(before, hang): one that says `here` and then hangs so; its folder is tmp_path."""

    def begin(before: str, hang: str, **options):
        clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "SLURM_PROCID")}
        env = clean | {"GPTDDP_VERDICT": str(tmp_path / "verdict.json"), "PYTHONUNBUFFERED": "1"}
        options = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) | options
        code = SETUP + HANG.format(before, hang)
        return spawn([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, **options)

    return begin


def test_a_hang_is_said_and_ends_the_process(process):
    """In Python or in C without the GIL: after its last words, with their code."""
    it = process("pass", "time.sleep(60)")
    out, err = it.communicate(timeout=30)
    assert it.returncode == 9
    assert out.startswith(b"here\nhangs in <module> (<string>:")
    assert b"[rank 0] no progress for " in err and b"hangs in <module>" in err


def test_last_words_that_hang_do_not_hold_it_up(process):
    """As those of a device that hangs: the process ends all the same."""
    it = process("words.__code__ = (lambda where: time.sleep(60)).__code__", "time.sleep(60)")
    it.communicate(timeout=30)
    assert it.returncode == pulse.HUNG


def test_what_comes_further_goes_on(process):
    """Slow is not hung: for three times the limit, and after the end of the listening."""
    it = process(f"beats({3 * LIMIT_S})", "pass")
    out, err = it.communicate(timeout=30)
    assert (it.returncode, out, err) == (0, b"here\nend\n", b"")


def test_a_machine_that_is_suspended_is_no_hang(process):
    """A process that was stopped for longer than the limit goes on when it is continued."""
    it = process("pass", "beats(0.5)")
    assert it.stdout.readline() == b"here\n"
    it.send_signal(signal.SIGSTOP)
    time.sleep(2 * LIMIT_S)
    it.send_signal(signal.SIGCONT)
    assert it.communicate(timeout=30) == (b"end\n", b"") and it.returncode == 0


def test_only_time_counts_in_which_the_listener_was_running(monkeypatch):
    """A pause of an hour is as one of a second; a beat, and another process, begin anew."""
    clock = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: clock[0])
    silence = pulse.Silence()
    assert silence.listen(1, 5) == 0.0
    for clock[0], expected in ((0.5, 0.5), (1.0, 1.0), (3600.0, 2.0), (3600.5, 2.5)):
        assert silence.listen(1, 5) == expected
    assert silence.listen(1, 6) == 0.0
    clock[0] += 0.5
    assert silence.listen(2, 6) == 0.0


def test_at_a_terminal_it_is_only_said(process):
    """Nobody would start it again, and somebody sees it: it may be at a breakpoint."""
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
    """The launcher's side: as quick as the processes of these tests."""
    monkeypatch.setattr(launch_worker, "LATER_S", 0.3)
    monkeypatch.setattr(pulse, "POLL_S", 0.05)


@pytest.fixture
def watched(impatient, monkeypatch, tmp_path):
    """watched(process): its launcher's Worker, what that has said, and what it has counted."""

    def begin(process):
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [process])
        said, counted = [], []
        it = Worker(tmp_path, 0, lambda: "rank 3", said.append, lambda *how: counted.append(how))
        return it, said, counted

    return begin


@pytest.mark.parametrize("how", ["sum(itertools.repeat(0))", "os.kill(os.getpid(), 19)"])
def test_the_launcher_kills_what_stops_every_thread(process, watched, how):
    """A call that holds the GIL, and a stopped process: once, after the limit, and it says where.
    The first is its own error, with its step; a stop comes from outside, and is not counted.
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


def test_no_pulse_and_a_torn_one_are_no_hang(silent, watched, tmp_path):
    """Before the worker has come so far, there is nothing to be told."""
    worker, said, _ = watched(silent)
    worker.look()
    pulse.path_of(tmp_path, 0).write_bytes(b"torn")
    worker.look()
    assert not said and silent.poll() is None


NEVER = "import time; print('here', flush=True); time.sleep(60)"


@pytest.fixture
def silent(spawn, impatient, monkeypatch, tmp_path):
    """A worker that hangs before its trainer has begun, and what its launcher has."""
    monkeypatch.setattr(connect, "FIRST_TIMEOUT_S", 0.2)
    monkeypatch.setattr(pulse, "MARGIN_S", 0.1)
    it = spawn([sys.executable, "-c", NEVER], stdout=subprocess.PIPE)
    assert it.stdout.readline() == b"here\n"
    return it


def test_the_launcher_kills_what_never_begins_to_beat(silent, tmp_path, watched):
    """Not at once, and not as an error of the trainer's own; an older worker's stack is not its."""
    (tmp_path / "stack.0").write_text("process 1\n  File 'a.py', line 7 in old\n")
    worker, said, counted = watched(silent)
    begin = time.monotonic()
    until(lambda: (worker.look(), silent.poll())[1])
    assert time.monotonic() - begin > 0.6 and not counted
    (line,) = said
    assert line.startswith("no progress for 1 s: rank 3 hangs before its trainer has begun")


def test_a_worker_shares_its_pulse_as_soon_as_the_disk_has_room(process, tmp_path, impatient):
    """What was full when it began is tried again."""
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


def test_a_hang_on_the_way_out_is_the_launchers(process, watched):
    """Of a process that has ended its training: in a destructor, at the interpreter's exit."""
    it = process("pass", "atexit.register(time.sleep, 60)")
    assert it.stdout.readline() == b"here\n" and it.stdout.readline() == b"end\n"
    worker, said, counted = watched(it)
    until(lambda: (worker.look(), it.poll())[1])
    assert "it is killed" in said[0] and not counted  # no step's own error


STORAGE = """
storage.FIRST_LINE_S, storage.NEXT_LINE_S, storage.MOST_S = 0.2, 0.4, {}
import logging
logging.basicConfig(format="%(message)s", level=logging.INFO)
reading = ["/data/0.parquet, row group 3"]
"""


def test_who_waits_for_the_storage_does_not_hang(process, watched):
    """For longer than the limit, with a line now and then; the launcher sees the same."""
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
def test_what_does_not_wait_for_the_storage_or_for_too_long_hangs(process, what, limit_s):
    """A thread that reads no file is no excuse; nor is a file for ever."""
    before = STORAGE.format(limit_s).replace("\n", "\n    ")
    it = process(before, f"with storage.waiting(lambda: {what}): time.sleep(60)")
    _, err = it.communicate(timeout=30)
    assert it.returncode == 9 and b"no progress for" in err


@pytest.mark.alone
def test_a_beat_costs_next_to_nothing():
    """A step has about five: 20 us each would still be a part in ten thousand of a second."""
    begin = time.perf_counter()
    for _ in range(10_000):
        pulse.beat(3)
    assert time.perf_counter() - begin < 10_000 * 20e-6
