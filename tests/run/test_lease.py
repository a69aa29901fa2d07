"""One job at a time on a run directory: real processes that hold it, die, stop, and come late.

Fault 28 of the fault table; tests/training/test_fence.py has the late writer.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.crashing import killed
from support.local_jobs import until

from gptddp.distributed import environment
from gptddp.errors import ConfigError, Superseded
from gptddp.run import lease
from gptddp.run.directory import LEASE

PERIOD_S, EXPIRY_S = 0.1, 1.0
HOLD = f"""
import logging, sys
from pathlib import Path
from gptddp import errors
from gptddp.run import lease
logging.basicConfig(format="%(message)s")
lease.PERIOD_S, lease.EXPIRY_S, lease._POLL_S = {PERIOD_S}, {EXPIRY_S}, 0.05
try:
    mine = lease.acquire(Path(sys.argv[1]), sys.argv[2] or None)
except errors.ConfigError as error:
    print(f"refused: {{error}}", flush=True)
    sys.exit(2)
print("held", flush=True)
for line in sys.stdin:
    try:
        mine.check()
        print("mine", flush=True)
    except errors.Superseded as error:
        print(error, flush=True)
mine.release()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The waiting of a test's own takes a second, not twelve."""
    monkeypatch.setattr(lease, "PERIOD_S", PERIOD_S)
    monkeypatch.setattr(lease, "EXPIRY_S", EXPIRY_S)


@pytest.fixture
def holder(tmp_path, spawn):
    """holder(job) -> a process that asks for the run."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    return lambda job="": spawn([*command, job], text=True, **pipes)


@pytest.fixture
def acquire(tmp_path):
    """acquire(job) -> the lease, held by this process until the test ends."""
    held = []

    def take(job=None):
        held.append(lease.acquire(tmp_path, job))
        return held[-1]

    yield take
    for it in held:
        it.close()


def word(process):
    return process.stdout.readline().strip()


def ask(process):
    """What a holder finds when it reads its lease."""
    process.stdin.write("\n")
    process.stdin.flush()
    return word(process)


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_of_several_jobs_one_has_the_run(tmp_path, holder):
    """Four processes at once: one holds the run, three are told who has it and what to do."""
    processes = [holder() for _ in range(4)]
    words = [word(process) for process in processes]
    assert words.count("held") == 1
    first = processes[words.index("held")]
    for text in words:
        if text != "held":
            assert f"run {tmp_path} is in use by a training on host" in text
            assert f"(process {first.pid})" in text and "--run-dir" in text
    first.communicate("")  # a clean end
    assert first.returncode == 0 and os.listdir(tmp_path) == []


def test_of_several_that_wait_one_takes_over(tmp_path, holder):
    """The lease of a machine that is gone runs out for four at once: one has it, three are told."""
    first = holder()
    assert word(first) == "held"
    first.kill()
    first.wait()
    edit(tmp_path / LEASE, space="another machine", job="old at host:1")
    processes = [holder() for _ in range(4)]
    words = [word(process) for process in processes]
    assert sorted(text[:7] for text in words) == ["held", *["refused"] * 3]
    process = processes[words.index("held")]
    err = process.communicate("")[1]
    waits = f"waiting {EXPIRY_S:.0f} s to see whether job old at host:1 on host"
    assert err.count(waits) == 1


def test_a_killed_holder_is_followed_at_once(holder, acquire, caplog):
    """On one machine nobody waits for the dead, a zombie or reaped, whatever has its pid now."""
    first = holder("job at a:1")
    assert word(first) == "held"
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: lease._start_ticks(first.pid) is None)  # not reaped yet: a zombie
    mine = acquire("other at b:1")
    edit(mine.path, owner="third", holder="x", started=1)  # its pid is another process's now
    acquire()
    assert caplog.text == ""


def test_the_same_job_takes_over_at_once(holder, acquire, caplog):
    """A later life of a job has the run at once; the one before finds out, and is over."""
    first = holder("job at a:1")
    assert word(first) == "held" and ask(first) == "mine"
    mine = acquire("job at a:1")
    assert f"(process {os.getpid()}) has taken over the run" in ask(first)
    first.communicate()  # its release leaves the successor's lease alone
    mine.check()
    assert caplog.text == ""


def test_a_stopped_holder_comes_back_late(holder, acquire):
    """SIGSTOP beyond the expiry: another job takes over; SIGCONT: the first knows it is over."""
    first = holder("one at a:1")
    assert word(first) == "held"
    first.send_signal(signal.SIGSTOP)
    mine = acquire("two at b:1")
    first.send_signal(signal.SIGCONT)
    assert "job two at b:1 on host" in ask(first)
    time.sleep(3 * PERIOD_S)
    mine.check()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff\0", b'{"owner": 1}', b"x" * 9999])
def test_a_torn_or_foreign_lease_runs_out(tmp_path, acquire, caplog, text):
    """What cannot be understood is no crash and no lock for ever: it is waited out, with a word."""
    (tmp_path / LEASE).write_bytes(text)
    acquire().check()
    assert "which is damaged" in caplog.text and caplog.text.count("waiting") == 1


def test_killed_at_every_system_call(tmp_path, acquire):
    """A process killed anywhere while it takes over leaves nothing that keeps the next one out."""
    take = f"acquire(Path({str(tmp_path)!r}), 'job')"
    for point in range(1, 30):
        acquire("job").close()
        crashed = killed(point, "gptddp.run.lease", take)
        mine = acquire("job")
        mine.check()
        mine.close()
        assert os.listdir(tmp_path) == [LEASE]
        if not crashed:
            break
    assert 4 < point < 29


def test_a_lease_that_cannot_be_renewed(acquire, holder, monkeypatch, caplog):
    """A read-only disk: one warning, the holder goes on; when another has taken over, it stops."""
    mine = acquire("one at a:1")

    def fails(*_args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", fails)
    until(lambda: "Read-only" in caplog.text)
    time.sleep(3 * PERIOD_S)
    mine.check()
    assert caplog.text.count("cannot be renewed") == 1
    second = holder("two at b:1")  # this process lives, but its lease stands still
    assert word(second) == "held"
    with pytest.raises(Superseded, match="two at b:1"):
        mine.check()
    until(lambda: mine.lost)


def test_a_lease_removed_or_damaged_by_hand(acquire, holder):
    """The holder makes it again, and renews what is no other's: the run stays its own."""
    mine = acquire("one at a:1")
    for damage in (lambda: mine.path.unlink(), lambda: mine.path.write_text("{")):
        damage()
        time.sleep(3 * PERIOD_S)
        mine.check()
        assert word(holder("two at b:1")).startswith("refused: run")


def test_who_is_the_same_job(monkeypatch):
    """A job is its rendezvous, id and place, or its Slurm step; an id alone may be anybody's."""
    for name in ("TORCHELASTIC_RUN_ID", "PET_RDZV_ENDPOINT", "SLURM_PROCID", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert environment.job() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert environment.job() is None
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "127.64.0.100:23456")
    one = environment.job()
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "127.64.1.100:23457")
    assert one and environment.job() not in (None, one)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert not environment.job().startswith("slurm")  # a shell in a Slurm step
    monkeypatch.setenv("MASTER_ADDR", "node1")
    assert environment.job().startswith("slurm-7")


def test_an_unusable_directory_is_told(tmp_path):
    """A folder in the lease's place is the user's mistake, not a traceback."""
    from gptddp.config import Config
    from gptddp.training.begin import take_run

    (tmp_path / LEASE).mkdir()
    world = type("World", (), {"job": None})
    with pytest.raises(ConfigError, match="cannot be used"):
        take_run(Config(run_dir=str(tmp_path)), world)
